"""Is this the batch the plan was made for? Cheap checks, on host where values are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fcp_jax.mesh import Axes, rank_tables, resolve_axes, spmd, table_specs
from fcp_jax.places import for_each_row, rows_to_places, segment_starts
from fcp_jax.plan import Plan

STALE_PLAN = 1
"""Flag: segment_ids do not have the segments that the plan was made for."""
POSITIONS_NOT_INCREASING = 2
"""Flag: positions do not increase strictly inside a segment."""


def check_batch(
    plan: Plan,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    layout: str = "caller",
    mesh: Mesh | None = None,
    axis_name: str = "cp",
    batch_axis_name: str | tuple[str, ...] = "dp",
) -> jax.Array:
    """Compares a batch with its plan, on device.

    Args:
      plan: what the batch is to run with.
      segment_ids: int32 [N*T] or [R, N*T] (N*S*B with layout="plan"); zero is padding.
      positions: int32, like segment_ids.
      layout: "caller" or "plan".
      mesh: as in `fcp_jax.attention`.
      axis_name: as in `fcp_jax.attention`.
      batch_axis_name: as in `fcp_jax.attention`.

    Returns:
      int32 scalar: 0, or the sum of `STALE_PLAN` and `POSITIONS_NOT_INCREASING`.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if there is nothing to check, or an argument does not fit the others.
    """
    raise_if_no_plan(plan)
    check_layout(layout)
    if segment_ids is None and positions is None:
        raise ValueError("segment_ids or positions must be given, both are None")
    _check_sizes(plan, segment_ids, positions, layout)
    shape = plan.shape
    operands = tuple(
        None if x is None else jnp.reshape(x, (shape.num_rows, -1))
        for x in (segment_ids, positions)
    )
    axes = None
    if mesh is not None:
        axes = resolve_axes(plan, mesh, axis_name, batch_axis_name, "")
    return _check((axes, layout), operands, plan)


@functools.partial(jax.jit, static_argnums=0)
def _check(static, operands, plan: Plan) -> jax.Array:
    axes, layout = static
    if axes is None:
        whole = functools.partial(_flags, first=0, layout=layout)
        flags = for_each_row(
            lambda plan, *xs: whole(plan, *map(_after_nothing, xs)), plan, *operands
        )
        return flags.max()
    body = functools.partial(_rank_flags, axes=axes, layout=layout)
    spec = P(axes.rows or None, axes.cp)
    specs = tuple(None if x is None else spec for x in operands)
    return spmd(body, axes, (specs, table_specs(plan, axes)), P())(operands, plan)


def raise_if_known_bad(plan: Plan, segment_ids, positions, layout: str) -> None:
    """Raises where sizes are wrong, or where host arrays fail `check_batch`.

    Raises:
      TypeError: naming the argument.
      ValueError: naming the argument.
    """
    _check_sizes(plan, segment_ids, positions, layout)
    given = [x for x in (segment_ids, positions) if x is not None]
    if not given or not all(isinstance(x, np.ndarray) for x in (*given, plan.fragment_row)):
        return
    flags = int(check_batch(plan, segment_ids=segment_ids, positions=positions, layout=layout))
    if flags & STALE_PLAN:
        raise ValueError("segment_ids are not the segments that plan was made for; plan again")
    if flags & POSITIONS_NOT_INCREASING:
        raise ValueError("positions must increase strictly inside each segment")


def raise_if_no_plan(plan) -> None:
    """Raises TypeError where `plan` is something else."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a Plan, as make_plan returns, got {type(plan).__name__}")


def check_layout(layout: str) -> None:
    """Raises ValueError where `layout` is unknown."""
    if layout not in ("caller", "plan"):
        raise ValueError(f'layout must be "caller" or "plan", got {layout!r}')


def _check_sizes(plan: Plan, segment_ids, positions, layout: str) -> None:
    shape = plan.shape
    rows = shape.tokens_per_rank if layout == "caller" else shape.plan_rows_per_rank
    allowed = [(shape.num_rows, shape.num_ranks * rows)]
    allowed += [allowed[0][1:]] * (shape.num_rows == 1)
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is None:
            continue
        if not isinstance(x, (np.ndarray, jax.Array)) or not jnp.issubdtype(x.dtype, jnp.integer):
            kind = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"{name} must be an array of integers, got {kind}")
        if x.shape not in allowed:
            shapes = " or ".join(map(str, allowed))
            raise ValueError(
                f'{name} must have shape {shapes} for this plan and layout="{layout}", got '
                f"{x.shape}"
            )


def _rank_flags(operands, plan: Plan, *, axes: Axes, layout: str) -> jax.Array:
    plan = rank_tables(plan)
    ranks = plan.shape.num_ranks
    after = [(i, (i + 1) % ranks) for i in range(ranks)]
    with_neighbor = [
        None if x is None else jnp.concatenate([lax.ppermute(x[0, -1:], axes.cp, after), x[0]])
        for x in operands
    ]
    sizes = {"caller": plan.shape.tokens_per_rank, "plan": plan.shape.plan_rows_per_rank}
    first = lax.axis_index(axes.cp) * sizes[layout]
    return lax.pmax(_flags(plan, *with_neighbor, first=first, layout=layout), axes.joint)


def _after_nothing(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else jnp.pad(x, (1, 0))


def _flags(plan: Plan, ids, positions, *, first, layout: str) -> jax.Array:
    """Flags of a run of rows from `first` on; operands hold one row more, the one before it."""
    size = next(x.shape[0] for x in (ids, positions) if x is not None)
    rows = first - 1 + jnp.arange(size, dtype=jnp.int32)
    places = rows if layout == "caller" else rows_to_places(plan, rows)
    start = jnp.where(places < 0, -1, segment_starts(plan, places))
    covered = start >= 0
    joined = covered[1:] & (start[1:] == start[:-1])
    flags = jnp.int32(0)
    if ids is not None:
        same = covered[1:] & covered[:-1] & (ids[1:] == ids[:-1])
        # In the plan's layout two pieces of one segment need not be neighbors, but neighbors
        # that are of one segment are so in both layouts.
        fits = jnp.all((ids[1:] != 0) == covered[1:]) & jnp.all(same == joined)
        flags += jnp.where(fits, 0, STALE_PLAN)
    if positions is not None:
        follows = joined & (places[1:] > places[:-1])
        flags += jnp.where(
            jnp.all(~follows | (positions[1:] > positions[:-1])), 0, POSITIONS_NOT_INCREASING
        )
    return flags.astype(jnp.int32)
