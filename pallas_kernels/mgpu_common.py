"""What the forward and backward Mosaic GPU attention kernels share."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

LOG2_E = math.log2(math.e)
ROWS = 64  # the M of a wgmma instruction: tile rows that one compute warpgroup owns
ACC, ROW, COLUMN = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # 16-bit wgmma operands


def unit_plan(cta, num_ctas: int, num_live, per_row: int, num_sections: int, order_ref):
    """Deals (row tile, part) units to persistent thread blocks.

    Units run section by section (a section is a kv head, whose tiles stay in L2), inside a section
    from the longest row of tiles to the shortest. The blocks get them in rounds that go back and
    forth, so that the one with the longest unit of a round has the shortest of the next; every
    other section begins from the other end. Sections smaller than a round are dealt together.

    Args:
      cta: index of this thread block.
      num_ctas: how many there are.
      num_live: how many row tiles have anything to do.
      per_row: parts of a row tile in one section.
      num_sections: sections.
      order_ref: row tiles, longest first.

    Returns:
      How many units this block runs, and a function from r to the r-th (section, row tile, part).
    """
    size = num_live * per_row
    together = size < num_ctas
    whole, left = divide(lax.select(together, size * num_sections, size), num_ctas)
    sections = lax.select(together, 1, num_sections)

    def place(round_, section):
        return lax.select(lax.rem(round_ + section, 2) == 0, cta, num_ctas - 1 - cta)

    # How many units of an even section, and of an even and an odd one, are this block's.
    even, odd = (whole + (place(whole, i) < left).astype(jnp.int32) for i in range(2))
    both = jnp.maximum(even + odd, 1)
    pairs, single = divide(sections, 2)
    rounds = pairs * (even + odd) + single * even

    def unit_at(r):
        pair, round_ = divide(r, both)
        is_odd = (round_ >= even).astype(jnp.int32)
        section, round_ = 2 * pair + is_odd, round_ - is_odd * even
        unit = round_ * num_ctas + place(round_, section)
        mixed_unit, mixed_section = divide(unit, num_sections)
        unit = lax.select(together, mixed_unit, unit)
        row, part = divide(unit, per_row)
        return lax.select(together, mixed_section, section), order_ref[row], part

    return rounds, unit_at


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
