"""Products of one rank, float or w8a8-dynamic int8: the only place that picks a GEMM.

An activation or a kernel is an array or a `Quantized` pair, and `multiply` takes either.
"""

from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels import matmul, quantize_rows, quantized_matmul
from pallas_kernels.quantized_matmul import quantize_along


class Quantized(NamedTuple):
    """Symmetric int8 values and what to multiply them with.

    Attributes:
      values: int8; activations [tokens, features], kernels [out_features, in_features].
      scale: float32; activations one per token, [tokens, 1]; kernels one per output channel,
        [out_features].
    """

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, *, implementation: str | None = "xla") -> Quantized:
    """Rounds activations to int8 with one scale per token; tokens of zeros have scale 1.

    Args:
      x: [tokens, features], floating point.
      implementation: "xla", or None for a Pallas kernel where the device has one.

    Returns:
      int8 values shaped like x, and a float32 scale [tokens, 1].
    """
    values, scale = quantize_rows(x, implementation=implementation)
    return Quantized(values, scale[:, None])


def quantize_kernel(kernel: jax.Array) -> Quantized:
    """A float kernel [in, out] as int8 [out, in] with one scale per output channel."""
    values, scale = quantize_along(kernel, axis=0)
    return Quantized(values.T, scale[0])


def out_features(kernel: jax.Array | Quantized) -> int:
    """Columns of the product with this kernel."""
    return kernel.values.shape[0] if isinstance(kernel, Quantized) else kernel.shape[1]


def multiply(
    x: jax.Array | Quantized,
    kernel: jax.Array | Quantized,
    out_dtype: jax.typing.DTypeLike,
    *,
    columns: tuple[int, int] | None = None,
    precision: lax.PrecisionLike = None,
    reserve_sms: int = 0,
    implementation: str | None = "xla",
) -> jax.Array:
    """Computes x @ kernel for two-dimensional operands, accumulated in float32 or int32.

    Args:
      x: [tokens, in]; quantized here per token where the kernel is quantized and x is not yet.
      kernel: [in, out], or quantized [out, in].
      out_dtype: of the result. int8 products are dequantized to it: scales differ between
        ranks, so no integer ever reaches a reduction.
      columns: the columns of the result to compute, [start, stop); None for all.
      precision: of float products.
      reserve_sms: multiprocessors that the Pallas kernel leaves to transfers.
      implementation: "xla", or None for a Pallas kernel where the device has one.

    Returns:
      [tokens, out], or [tokens, stop - start].
    """
    options: Any = dict(
        columns=columns,
        out_dtype=out_dtype,
        reserve_sms=reserve_sms,
        implementation=implementation,
    )
    if isinstance(kernel, Quantized):
        x = x if isinstance(x, Quantized) else quantize(x, implementation=implementation)
        return quantized_matmul(
            x.values, x.scale.reshape(-1), kernel.values, kernel.scale, **options
        )
    assert not isinstance(x, Quantized)
    return matmul(x, kernel, precision=precision, **options)
