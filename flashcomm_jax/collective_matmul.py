"""Matmul + reduce-scatter and all-gather + matmul, plain and overlapped. For use in `shard_map`.

Rows are in destination order: of the rows of x, block d belongs to rank d. The overlapped forms
rest on one idiom, `_tie` (an `optimization_barrier`): what it returns is available only when all
of its arguments are. Tying a transfer to the product computed meanwhile keeps the product from
sinking below the end of the transfer, and the compiler from merging the transfers into one. Tying
the input of the next product to the result of this one keeps the compiler from merging the
products (XLA:GPU joins dots that share an operand) and from running them all first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from flashcomm_jax.products import Quantized, multiply, out_features

Operand = jax.Array | Quantized
Product = Callable[..., jax.Array]

_tie = lax.optimization_barrier

# XLA:GPU otherwise keeps one collective in flight and makes the others synchronous.
GPU_COMPILER_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}


def compiler_options() -> dict[str, Any] | None:
    """What to give `jax.jit(..., compiler_options=)` so that fused products overlap."""
    return GPU_COMPILER_OPTIONS if jax.default_backend() == "gpu" else None


# Pieces a product is cut into when each is reduced while the next is computed.
MAX_PIECES = 4


def num_pieces(features: int) -> int:
    """Into how many equal column pieces a product of `features` columns is cut; 1 if not at all."""
    return next((n for n in range(MAX_PIECES, 1, -1) if features % n == 0), 1)


def implementation(backend: str) -> str | None:
    """What a backend gives `multiply` and `quantize`: None lets "pallas" use kernels."""
    return None if backend == "pallas" else "xla"


def matmul_reduce_scatter(
    x: Operand,
    kernel: Operand,
    axis_name: str,
    axis_size: int,
    *,
    backend: str,
    out_dtype: jax.typing.DTypeLike,
    precision: lax.PrecisionLike = None,
    reserve_sms: int = 0,
) -> jax.Array:
    """Sum over ranks of x @ kernel, of which each rank keeps its block of rows.

    Args:
      x: [axis_size * rows, in / axis_size], this rank's columns of the activations.
      kernel: [in / axis_size, out], this rank's rows of the kernel (or its quantized form).
      axis_name: mesh axis to reduce over.
      axis_size: its size.
      backend: "none" (one product, one reduce-scatter), "pallas" or "ring".
      out_dtype: dtype of partial products and of what travels.
      precision: of float products.
      reserve_sms: multiprocessors that Pallas kernels leave to a transfer beside them.

    Returns:
      [rows, out].
    """

    def product(part: Operand, kernel: Operand, **options) -> jax.Array:
        options |= dict(precision=precision, implementation=implementation(backend))
        return multiply(part, kernel, out_dtype, **options)

    if axis_size == 1:
        return product(x, kernel)
    if backend == "pallas":
        return _reduce_scatter_pieces(x, kernel, axis_name, product, reserve_sms)
    if backend == "ring":
        return _reduce_scatter_ring(x, kernel, axis_name, axis_size, product)
    return lax.psum_scatter(product(x, kernel), axis_name, tiled=True)


def _reduce_scatter_pieces(
    x: Operand, kernel: Operand, axis_name: str, product: Product, reserve_sms: int
) -> jax.Array:
    """Reduces column piece i while piece i + 1 is computed."""
    width = out_features(kernel) // num_pieces(out_features(kernel))
    starts = range(0, out_features(kernel), width)
    part = product(x, kernel, columns=(0, width))
    done = []
    for start in starts[1:]:
        x, part = _tie((x, part))
        scattered = lax.psum_scatter(part, axis_name, tiled=True)
        columns = start, start + width
        part = product(x, kernel, columns=columns, reserve_sms=reserve_sms)
        scattered, part = _tie((scattered, part))
        done.append(scattered)
    done.append(lax.psum_scatter(part, axis_name, tiled=True))
    return jnp.concatenate(done, axis=1)


def _reduce_scatter_ring(
    x: Operand, kernel: Operand, axis_name: str, axis_size: int, product: Product
) -> jax.Array:
    """Two rings in opposite directions, each carrying half of every destination's rows.

    The sum for destination d starts at rank d + 1 (d - 1 in the other direction) and visits every
    rank once before it arrives. At step s rank r therefore adds its product for destination
    r - 1 - s (r + 1 + s) to what arrives, which it computed while that was on its way.
    """
    rank = lax.axis_index(axis_name)
    rows = jax.tree.leaves(x)[0].shape[0] // axis_size
    half = rows // 2
    up = [(r, (r + 1) % axis_size) for r in range(axis_size)]
    down = [(r, (r - 1) % axis_size) for r in range(axis_size)]

    def partial_products(x: Operand, step: int) -> jax.Array:
        to_up = lax.rem(rank - 1 - step + 2 * axis_size, axis_size) * rows
        to_down = lax.rem(rank + 1 + step, axis_size) * rows + half
        part = jax.tree.map(
            lambda leaf: jnp.concatenate(
                [
                    lax.dynamic_slice_in_dim(leaf, to_up, half),
                    lax.dynamic_slice_in_dim(leaf, to_down, rows - half),
                ]
            ),
            x,
        )
        return product(part, kernel)

    out = partial_products(x, 0)
    sums = out[:half], out[half:]
    for step in range(1, axis_size):
        x, sums = _tie((x, sums))
        arriving = lax.ppermute(sums[0], axis_name, up), lax.ppermute(sums[1], axis_name, down)
        out = partial_products(x, step)
        arriving, out = _tie((arriving, out))
        sums = arriving[0] + out[:half], arriving[1] + out[half:]
    return jnp.concatenate(sums)


def all_gather_matmul(
    x: Operand,
    kernels: Sequence[Operand],
    axis_name: str,
    axis_size: int,
    *,
    backend: str,
    out_dtype: jax.typing.DTypeLike,
    precision: lax.PrecisionLike = None,
    reserve_sms: int = 0,
) -> list[jax.Array]:
    """Products of the rows of all ranks with several kernels that share one gather.

    Args:
      x: [rows, in], this rank's rows; a quantized x travels as int8 with its scales.
      kernels: [in, out_i] each, this rank's columns of the kernels.
      axis_name: mesh axis to gather over.
      axis_size: its size.
      backend: "none" (one gather, then the products), "pallas" or "ring".
      out_dtype: of the results.
      precision: of float products.
      reserve_sms: multiprocessors that Pallas kernels leave to a transfer beside them.

    Returns:
      One [axis_size * rows, out_i] per kernel.
    """

    def products(part: Operand, **options) -> list[jax.Array]:
        options |= dict(precision=precision, implementation=implementation(backend))
        return [multiply(part, k, out_dtype, **options) for k in kernels]

    rows = jax.tree.leaves(x)[0].shape[0]
    if axis_size == 1:
        return products(x)
    if backend == "ring":
        return _all_gather_ring(x, axis_name, axis_size, products)
    pieces = num_pieces(rows) if backend == "pallas" else 1
    return _all_gather_pieces(x, axis_name, axis_size, pieces, products, reserve_sms)


def _all_gather_pieces(
    x: Operand,
    axis_name: str,
    axis_size: int,
    pieces: int,
    products: Callable[..., list[jax.Array]],
    reserve_sms: int,
) -> list[jax.Array]:
    """Gathers row piece i + 1 of every rank while the products of piece i are computed."""
    rows = jax.tree.leaves(x)[0].shape[0]
    width = rows // pieces

    def gather(piece: int) -> Operand:
        return jax.tree.map(
            lambda leaf: lax.all_gather(
                leaf[piece * width : (piece + 1) * width], axis_name, tiled=True
            ),
            x,
        )

    part = gather(0)
    outs = []
    for piece in range(1, pieces):
        arriving = gather(piece)
        out = products(part, reserve_sms=reserve_sms)
        part, out = _tie((arriving, out))
        outs.append(out)
    outs.append(products(part))
    if pieces == 1:
        return outs[0]
    # [axis_size * width, out] per piece, to rows in the order of their owners.
    return [
        jnp.stack([piece.reshape(axis_size, width, -1) for piece in column], axis=1).reshape(
            axis_size * rows, -1
        )
        for column in zip(*outs, strict=True)
    ]


def _all_gather_ring(
    x: Operand,
    axis_name: str,
    axis_size: int,
    products: Callable[[Operand], list[jax.Array]],
) -> list[jax.Array]:
    """Passes shards on in both directions; what arrived last is multiplied meanwhile."""
    rank = lax.axis_index(axis_name)
    rows = jax.tree.leaves(x)[0].shape[0]
    up = [(r, (r + 1) % axis_size) for r in range(axis_size)]
    down = [(r, (r - 1) % axis_size) for r in range(axis_size)]

    def shift(shard, permutation):
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis_name, permutation), shard)

    def place(outs, results, owner):
        start = lax.rem(owner + axis_size, axis_size) * rows
        return [
            lax.dynamic_update_slice_in_dim(out, result, start, axis=0)
            for out, result in zip(outs, results, strict=True)
        ]

    # Shards in hand, each with the offset of its owner from this rank.
    held = [(x, 0)]
    outs = None
    forward, backward = x, x
    for step in range(1, axis_size // 2 + 2):
        arriving = []
        if 2 * step <= axis_size:
            forward = shift(forward, up)
            arriving.append((forward, -step))
        if 2 * step < axis_size:
            backward = shift(backward, down)
            arriving.append((backward, step))
        stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(s for s, _ in held))
        results = products(stacked)
        if arriving:
            shards, results = _tie(([s for s, _ in arriving], results))
            forward, backward = shards[0], shards[-1]
            arriving = list(zip(shards, (offset for _, offset in arriving), strict=True))
        if outs is None:
            outs = [jnp.zeros((axis_size * rows, r.shape[1]), r.dtype) for r in results]
        for i, (_, offset) in enumerate(held):
            outs = place(outs, [r[i * rows : (i + 1) * rows] for r in results], rank + offset)
        held = arriving
        if not held:
            break
    assert outs is not None
    return outs
