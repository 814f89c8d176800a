"""Products of 16-bit floats at the full speed of a GPU, also where they are cut into pieces.

    y = matmul(x, w, columns=(start, stop))

multiplies x by a range of the columns of w where it lies: a product that is reduced over ranks
column piece by column piece reads w once, and copies none of it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import implementations, matmul_mgpu


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    columns: tuple[int, int] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    reserve_sms: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Computes x @ w, or some of its columns.

    Differentiable; what the gradients multiply, XLA does.

    Args:
      x: [m, k], floating point; bfloat16 or float16 for "mosaic_gpu".
      w: [k, n], same dtype.
      columns: the columns to compute, [start, stop); None for all.
      out_dtype: of the result, None for that of x. Accumulation is in float32.
      precision: of "xla"; for the kernels nothing but None.
      reserve_sms: streaming multiprocessors that "mosaic_gpu" leaves to others, such as transfers;
        "xla" knows no such thing.
      implementation: "mosaic_gpu", "xla", or None for the kernel where it serves the case;
        `explain_matmul` tells which that is. A named one is used or refused.

    Returns:
      [m, stop - start].

    Raises:
      ValueError: if shapes, dtypes, `columns`, `reserve_sms` or `implementation` do not fit.
    """
    _check(x, w, reserve_sms)
    columns = column_range(columns, w.shape[1])
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    unsupported = _unsupported(x, w, columns, out_dtype, precision)
    if implementations.choose(implementation, unsupported) == "mosaic_gpu":
        return _on_hopper(x, w, columns, out_dtype, reserve_sms)
    return _plain(x, w, columns, out_dtype, precision)


def explain_matmul(
    x, w, *, columns=None, out_dtype=None, precision=None, implementation: str | None = None
) -> str:
    """Says in a sentence which implementation `matmul` uses for operands, and why.

    Args:
      x: left operand, or anything with its shape and dtype.
      w: right operand, likewise.
      columns: as in `matmul`.
      out_dtype: as in `matmul`.
      precision: as in `matmul`.
      implementation: as in `matmul`.

    Returns:
      The sentence; it begins with the name of the implementation.

    Raises:
      ValueError: if the operands do not fit or `implementation` cannot be used.
    """
    _check(x, w, 0)
    columns = column_range(columns, w.shape[1])
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    unsupported = _unsupported(x, w, columns, out_dtype, precision)
    return implementations.explain(implementation, unsupported)


def column_range(columns: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """Start and stop of `columns`, checked; None means all of `size`."""
    start, stop = (0, size) if columns is None else columns
    if not 0 <= start <= stop <= size:
        raise ValueError(f"columns must be a range within the {size} columns of w, got {columns}")
    return start, stop


def _plain(x, w, columns, out_dtype, precision):
    part = w if columns == (0, w.shape[1]) else w[:, slice(*columns)]
    return lax.dot(x, part, precision=precision, preferred_element_type=out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _on_hopper(x, w, columns, out_dtype, reserve_sms):
    return matmul_mgpu.matmul(x, w, columns=columns, out_dtype=out_dtype, reserve_sms=reserve_sms)


def _forward(x, w, columns, out_dtype, reserve_sms):
    return _on_hopper(x, w, columns, out_dtype, reserve_sms), (x, w)


def _backward(columns, out_dtype, reserve_sms, operands, cotangent):
    del reserve_sms
    plain = functools.partial(_plain, columns=columns, out_dtype=out_dtype, precision=None)
    return jax.vjp(plain, *operands)[1](cotangent)


_on_hopper.defvjp(_forward, _backward)


def _unsupported(x, w, columns, out_dtype, precision) -> str | None:
    if x.dtype == jnp.int8:
        return "it multiplies int8 in quantized_matmul only"
    if precision is not None:
        return f"it has no precision to choose, got {precision=}"
    return matmul_mgpu.unsupported(x, w, columns, out_dtype)


def _check(x, w, reserve_sms: int) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"x must be [m, k] and w [k, n], got {x.shape=} and {w.shape=}")
    if x.dtype != w.dtype:
        raise ValueError(f"x and w must share a dtype, got {x.dtype=} and {w.dtype=}")
    if reserve_sms < 0:
        raise ValueError(f"reserve_sms must not be negative, got {reserve_sms}")
