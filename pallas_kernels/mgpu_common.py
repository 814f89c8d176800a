"""What the forward and backward Mosaic GPU attention kernels share."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.work_list import TokenMask

LOG2_E = math.log2(math.e)
ROWS = 64  # the M of a wgmma instruction: tile rows that one compute warpgroup owns
ACC, ROW, COLUMN = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # 16-bit wgmma operands


def query_spans(mask: TokenMask) -> jax.Array:
    """First visible place and how many follow it, int32 [query_rows / 64, 2, 64].

    Padding rows (lo > hi) see only a place that no token has.
    """
    real = mask.query_lo <= mask.query_hi
    first = jnp.where(real, mask.query_lo, 2**30)
    spans = jnp.stack([first, jnp.where(real, mask.query_hi - mask.query_lo, 0)])
    return spans.reshape(2, -1, ROWS).swapaxes(0, 1)


def take_number(counter_ref, out_ref) -> None:
    """Writes the counter's value to out_ref[0] and adds 1 to it, by one thread.

    Args:
      counter_ref: int32 [1] in global memory.
      out_ref: int32 [1] in shared memory; what arrives on a barrier next makes it visible.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(ctx, counter, out):
        del ctx
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
            old = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                mgpu_utils.memref_ptr(counter),
                arith.constant(i32, 1),
                llvm.AtomicOrdering.monotonic,
            )
            memref.store(old, out, [arith.constant(index, 0)])

    take(counter_ref, out_ref)


def divide(a, b):
    """Quotient and remainder of non-negative integers."""
    a, b = jnp.int32(a), jnp.int32(b)
    return lax.div(a, b), lax.rem(a, b)


def load(ref, layout) -> jax.Array:
    """Loads a ref into registers, before any later arrival on a barrier.

    A plain load may sink below an arrival that tells others that its memory may be reused.
    """
    return lax.optimization_barrier(plgpu.load(ref, layout=layout, optimized=False))


def stride_loop(first, end, stride: int, body) -> None:
    """Runs body(i) for i = first, first + stride, ... below end."""
    trips = lax.div(jnp.maximum(end - first, 0) + (stride - 1), stride)
    lax.fori_loop(0, trips, lambda t, _: body(first + t * stride), None)


def full(shape, value: float, layout) -> jax.Array:
    """Returns a constant float32 register array."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """What a wgmma computes, for the interpreter."""
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
