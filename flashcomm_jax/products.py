"""Products of one rank, float or w8a8-dynamic int8: the only place that picks a GEMM.

An activation or a kernel is an array or a `Quantized` pair, and `multiply` takes either.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Quantized(NamedTuple):
    """Symmetric int8 values and what to multiply them with.

    Attributes:
      values: int8; activations [tokens, features], kernels [out_features, in_features].
      scale: float32; activations one per token, [tokens, 1]; kernels one per output channel,
        [out_features].
    """

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, axis: int = -1) -> Quantized:
    """Rounds to int8 with one scale per slice along `axis`; slices of zeros have scale 1.

    Args:
      x: floating point, any shape.
      axis: the axis that shares a scale.

    Returns:
      int8 values shaped like x, and a float32 scale with `axis` kept as 1.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127.0, 1.0)
    return Quantized(jnp.round(x / scale).astype(jnp.int8), scale)


def quantize_kernel(kernel: jax.Array) -> Quantized:
    """A float kernel [in, out] as int8 [out, in] with one scale per output channel."""
    values, scale = quantize(kernel, axis=0)
    return Quantized(values.T, scale[0])


def out_features(kernel: jax.Array | Quantized) -> int:
    """Columns of the product with this kernel."""
    return kernel.values.shape[0] if isinstance(kernel, Quantized) else kernel.shape[1]


def columns(kernel: jax.Array | Quantized, start: int, stop: int) -> jax.Array | Quantized:
    """The part of a kernel that produces output columns [start, stop)."""
    if isinstance(kernel, Quantized):
        # Behind a barrier, because XLA:GPU fuses a contiguous slice with the product into a
        # cuBLAS call without autotuning, which for int8 runs at 0.6 of the speed (H200).
        values = lax.optimization_barrier(kernel.values[start:stop])
        return Quantized(values, kernel.scale[start:stop])
    return kernel[:, start:stop]


def multiply(
    x: jax.Array | Quantized,
    kernel: jax.Array | Quantized,
    out_dtype: jax.typing.DTypeLike,
    *,
    precision: lax.PrecisionLike = None,
    implementation: str | None = "xla",
) -> jax.Array:
    """Computes x @ kernel for two-dimensional operands, accumulated in float32 or int32.

    Args:
      x: [tokens, in]; quantized here per token where the kernel is quantized and x is not yet.
      kernel: [in, out], or quantized [out, in].
      out_dtype: of the result. int8 products are dequantized to it: scales differ between
        ranks, so no integer ever reaches a reduction.
      precision: of float products.
      implementation: "xla", or None for a Pallas kernel where the device has one.

    Returns:
      [tokens, out].
    """
    if isinstance(kernel, Quantized):
        x = x if isinstance(x, Quantized) else quantize(x)
        accumulated = lax.dot_general(
            x.values, kernel.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        return (accumulated.astype(jnp.float32) * x.scale * kernel.scale).astype(out_dtype)
    assert not isinstance(x, Quantized)
    return lax.dot(x, kernel, precision=precision, preferred_element_type=out_dtype)
