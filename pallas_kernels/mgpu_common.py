"""What the forward and backward Mosaic GPU attention kernels share."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

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

    Units run section by section (a section is a kv head, whose keys and values stay in L2), inside
    a section from the longest row of tiles to the shortest. Rounds go back and forth over the
    blocks: the one that got the longest unit of a round gets the shortest of the next.

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
    units_per_section = jnp.maximum(num_live * per_row, 1)
    num_units = num_live * (per_row * num_sections)

    def place_in_round(r):
        return lax.select(lax.rem(r, 2) == 0, cta, num_ctas - 1 - cta)

    whole_rounds = lax.div(num_units, num_ctas)
    leftover = lax.rem(num_units, num_ctas)
    rounds = whole_rounds + (place_in_round(whole_rounds) < leftover).astype(jnp.int32)

    def unit_at(r):
        unit = r * num_ctas + place_in_round(r)
        section, rest = lax.div(unit, units_per_section), lax.rem(unit, units_per_section)
        return section, order_ref[lax.div(rest, per_row)], lax.rem(rest, per_row)

    return rounds, unit_at


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
