"""w8a8-dynamic products: int8 operands, int32 sums, scales applied before the sums leave the chip.

    values, scale = quantize_rows(x)
    y = quantized_matmul(values, scale, w, w_scale, out_dtype=x.dtype)

Activations get one scale per row (token), kernels one per column of the product.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import implementations, matmul_mgpu, quantize_mgpu
from pallas_kernels.matmul import column_range


def quantize_rows(
    x: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to int8, symmetrically, with one scale each.

    Args:
      x: [m, k], floating point and finite; bfloat16 or float16 for "mosaic_gpu".
      implementation: "mosaic_gpu", "xla", or None for the kernel where it serves the case. A named
        one is used or refused.

    Returns:
      int8 values [m, k] and their float32 scale [m]. Rows of zeros, and of values below 1e-30, are
      zeros with scale 1.

    Raises:
      ValueError: if x is not a matrix or `implementation` cannot be used.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [m, k], got {x.shape=}")
    if implementations.choose(implementation, quantize_mgpu.unsupported(x)) == "mosaic_gpu":
        return quantize_mgpu.quantize(x)
    values, scale = quantize_along(x, axis=1)
    return values, scale[:, 0]


def quantize_along(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """`quantize_rows` in plain JAX along any axis, which the scale keeps as 1."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    tiny = largest < quantize_mgpu.SMALLEST
    values = jnp.round(x * jnp.where(tiny, 1.0, 127.0 / largest)).astype(jnp.int8)
    return values, jnp.where(tiny, 1.0, largest / 127.0)


def quantized_matmul(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    out_dtype: jax.typing.DTypeLike,
    columns: tuple[int, int] | None = None,
    reserve_sms: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Computes (x @ w.T) * x_scale[:, None] * w_scale, or some of its columns.

    Args:
      x: int8 [m, k].
      x_scale: float32 [m].
      w: int8 [n, k].
      w_scale: float32 [n].
      out_dtype: of the result.
      columns: the columns to compute, [start, stop): rows of w; None for all.
      reserve_sms: as in `pallas_kernels.matmul`.
      implementation: as in `pallas_kernels.matmul`.

    Returns:
      [m, stop - start]. Sums are exact in int32, up to k = 131,071 even where every value is -128.

    Raises:
      ValueError: if shapes, dtypes, `columns`, `reserve_sms` or `implementation` do not fit.
    """
    (m, n), k = (x.shape[0], w.shape[0]), x.shape[-1]
    if (x.shape, w.shape, x_scale.shape, w_scale.shape) != ((m, k), (n, k), (m,), (n,)):
        raise ValueError(
            "x, x_scale, w, w_scale must be [m, k], [m], [n, k], [n], got "
            f"{x.shape=}, {x_scale.shape=}, {w.shape=}, {w_scale.shape=}"
        )
    if x.dtype != jnp.int8 or w.dtype != jnp.int8:
        raise ValueError(f"x and w must be int8, got {x.dtype=} and {w.dtype=}")
    if x_scale.dtype != jnp.float32 or w_scale.dtype != jnp.float32:
        raise ValueError(f"scales must be float32, got {x_scale.dtype=} and {w_scale.dtype=}")
    if reserve_sms < 0:
        raise ValueError(f"reserve_sms must not be negative, got {reserve_sms}")
    columns = start, stop = column_range(columns, n)
    unsupported = matmul_mgpu.unsupported(x, w, columns, jnp.dtype(out_dtype))
    if implementations.choose(implementation, unsupported) == "mosaic_gpu":
        scales = x_scale, w_scale
        return matmul_mgpu.matmul(
            x, w, scales, columns=columns, out_dtype=out_dtype, reserve_sms=reserve_sms
        )
    if columns != (0, n):
        # Behind a barrier, because XLA:GPU fuses a contiguous slice with the product into a
        # cuBLAS call without autotuning, which for int8 runs at 0.6 of the speed (H200).
        w, w_scale = lax.optimization_barrier(w[start:stop]), w_scale[start:stop]
    sums = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * x_scale[:, None] * w_scale).astype(out_dtype)
