"""On device: which place of the packed batch a row of the plan's layout holds, and the reverse.

All of it follows from the plan's short fragment table, so that no table of one entry a token ever
crosses from host to device.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fcp_jax.plan import Plan
from pallas_kernels import TokenMask


def rows_to_places(plan: Plan, rows: jax.Array) -> jax.Array:
    """Returns the place of each plan row, -1 for padding and for negative rows.

    Args:
      plan: with fragment tables [F].
      rows: int32 [n] plan rows.
    """
    _, place = _find(plan, rows)
    return place


def query_ranges(plan: Plan, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (first visible place, last visible place, own place) of each plan row, int32 [n]."""
    fragment, place = _find(plan, rows)
    last = place if plan.shape.causal else plan.fragment_hi[fragment]
    real = place >= 0
    return jnp.where(real, plan.fragment_lo[fragment], 1), jnp.where(real, last, 0), place


def token_mask(plan: Plan, query_rows: jax.Array, kv_rows: jax.Array) -> TokenMask:
    """Returns the mask between plan rows of queries and of keys."""
    lo, hi, _ = query_ranges(plan, query_rows)
    return TokenMask(lo, hi, rows_to_places(plan, kv_rows))


def places_to_rows(plan: Plan, places: jax.Array) -> jax.Array:
    """Returns the plan row of each place; N*S*B where no segment covers it.

    Args:
      plan: with fragment tables [F].
      places: int32 [n].
    """
    fragment, offset, inside = _find_place(plan, places)
    nowhere = plan.shape.num_ranks * plan.shape.plan_rows_per_rank
    return jnp.where(inside, plan.fragment_row[fragment] + offset, nowhere)


def segment_starts(plan: Plan, places: jax.Array) -> jax.Array:
    """Returns the first place of the segment that covers each place, -1 where none does."""
    fragment, _, inside = _find_place(plan, places)
    return jnp.where(inside, plan.fragment_lo[fragment], -1)


def for_each_row(function: Callable, plan: Plan, *operands):
    """Maps `function(plan, *operands)` over the leading axis of operands and fragment tables."""
    names = ("row", "start", "length", "lo", "hi")
    tables = {f"fragment_{name}": jnp.asarray(getattr(plan, f"fragment_{name}")) for name in names}

    def one_row(tables, *operands):
        return function(dataclasses.replace(plan, **tables), *operands)

    return jax.vmap(one_row)(tables, *operands)


def _find(plan: Plan, rows: jax.Array):
    """The fragment [n] that covers each plan row, and the place [n] of the row."""
    fragment = jnp.searchsorted(plan.fragment_row, rows, side="right").astype(jnp.int32) - 1
    safe = jnp.maximum(fragment, 0)
    offset = rows - plan.fragment_row[safe]
    inside = (fragment >= 0) & (offset < plan.fragment_length[safe])
    return safe, jnp.where(inside, plan.fragment_start[safe] + offset, -1)


def _find_place(plan: Plan, places: jax.Array):
    by_place = jnp.argsort(plan.fragment_start)
    found = jnp.searchsorted(plan.fragment_start[by_place], places, side="right") - 1
    fragment = by_place[jnp.maximum(found, 0)].astype(jnp.int32)
    offset = places - plan.fragment_start[fragment]
    return fragment, offset, (offset >= 0) & (offset < plan.fragment_length[fragment])
