# pyrefly: ignore-errors
"""Rows to int8 on Hopper, reading them once: a warp holds a whole row in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMALLEST = 1e-30  # rows of smaller values count as zeros: 127 divided by one must be finite
_ROWS = 4  # of a thread block: one per warp
_COLUMNS = 256  # 8 per lane
_MAX_COLUMNS = 4096  # that registers hold
# [4, n]: a row to each warp, and of every 256 columns 8 to each lane.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((_ROWS, _COLUMNS), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


def unsupported(x) -> str | None:
    """Says why the kernel cannot serve x, or None where it can."""
    rows, columns = x.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16 rows, got {x.dtype}"
    if rows == 0 or rows % _ROWS:
        return f"it needs a multiple of {_ROWS} rows, got {rows}"
    if columns % _COLUMNS or not 0 < columns <= _MAX_COLUMNS:
        return f"it needs a multiple of {_COLUMNS} columns, at most {_MAX_COLUMNS}, got {columns}"
    return None


def quantize(x: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Rounds rows to int8 with one scale each.

    Args:
      x: [rows, columns], bfloat16 or float16.
      interpret: run in the Pallas interpreter, on any machine.

    Returns:
      int8 [rows, columns] and float32 [rows].
    """

    def kernel(x_ref, values_ref, scale_ref):
        rows = pl.ds(lax.axis_index("rows") * _ROWS, _ROWS)
        values = plgpu.load(x_ref.at[rows], layout=_LAYOUT, optimized=False).astype(jnp.float32)
        largest = jnp.max(jnp.abs(values), axis=1)
        tiny = largest < SMALLEST
        inverse = jnp.where(tiny, 1.0, 127.0 / largest)
        # The lowest byte of the sum is the nearest integer: cheaper than two conversions.
        values = values * lax.broadcast_in_dim(inverse, values.shape, [0]) + 1.5 * 2**23
        values_ref[rows] = lax.bitcast_convert_type(values, jnp.int32).astype(jnp.int8)
        scale_ref[rows] = jnp.where(tiny, 1.0, largest / 127.0)

    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(x.shape, jnp.int8),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
        ),
        grid=(x.shape[0] // _ROWS,),
        grid_names=("rows",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x)
