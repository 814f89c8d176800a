"""Dispatch and undispatch: the caller's layout to the plan's and back (paper: reshuffler).

In the caller's layout rank r owns the places [r*T, (r+1)*T). In the plan's layout it owns S blocks
of B rows. Only tokens that change rank travel, in the same kind of rounds as keys and values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fcp_jax.check import raise_if_no_plan
from fcp_jax.exchange import all_sources, run_stages, transfer
from fcp_jax.mesh import Axes, rank_tables, resolve_axes, spmd, table_specs
from fcp_jax.places import for_each_row, places_to_rows, rows_to_places
from fcp_jax.plan import Plan


def dispatch(
    x,
    plan: Plan,
    *,
    mesh: Mesh | None = None,
    axis_name: str = "cp",
    batch_axis_name: str | tuple[str, ...] = "dp",
    feature_spec: tuple = (),
):
    """Moves tokens from the caller's layout to the plan's.

    Args:
      x: array or pytree of arrays, [N*T, ...features] or [R, N*T, ...features], any dtype.
      plan: where tokens go.
      mesh: devices; None for one device.
      axis_name: mesh axis of the plan's ranks.
      batch_axis_name: mesh axis or axes of the plan's rows.
      feature_spec: mesh axes of the feature dimensions, as in a `PartitionSpec`.

    Returns:
      Like x with N*S*B rows for N*T; rows that hold no token are 0. Differentiable.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if shapes, plan and mesh do not fit together.
    """
    return _move_tree(x, plan, mesh, axis_name, batch_axis_name, tuple(feature_spec), True)


def undispatch(
    x,
    plan: Plan,
    *,
    mesh: Mesh | None = None,
    axis_name: str = "cp",
    batch_axis_name: str | tuple[str, ...] = "dp",
    feature_spec: tuple = (),
):
    """Moves tokens from the plan's layout back to the caller's; the inverse of `dispatch`.

    Args:
      x: array or pytree of arrays, [N*S*B, ...features] or [R, N*S*B, ...features], any dtype.
      plan: as in `dispatch`.
      mesh: as in `dispatch`.
      axis_name: as in `dispatch`.
      batch_axis_name: as in `dispatch`.
      feature_spec: as in `dispatch`.

    Returns:
      Like x with N*T rows; places that no segment covers are 0. Differentiable.

    Raises:
      TypeError: if an argument is of a wrong kind.
      ValueError: if shapes, plan and mesh do not fit together.
    """
    return _move_tree(x, plan, mesh, axis_name, batch_axis_name, tuple(feature_spec), False)


def _move_tree(x, plan: Plan, mesh, axis_name, batch_axis_name, feature_spec, forward: bool):
    raise_if_no_plan(plan)
    shape, axes = plan.shape, None
    if mesh is not None:
        axes = resolve_axes(plan, mesh, axis_name, batch_axis_name, "")
        _check_feature_spec(feature_spec, axes)
    rows = shape.num_ranks * (shape.tokens_per_rank if forward else shape.plan_rows_per_rank)
    leaves, treedef = jax.tree.flatten(x)
    with_rows = [_with_row_axis(leaf, shape.num_rows, rows) for leaf in leaves]
    least = min((leaf.ndim - 2 for leaf in with_rows), default=len(feature_spec))
    if len(feature_spec) > least:
        raise ValueError(
            f"feature_spec must have at most {least} entries, one for each feature axis of x, got "
            f"{feature_spec}"
        )
    moved = _move((axes, feature_spec, forward), tuple(with_rows), plan)
    moved = [
        out if leaf.ndim == out.ndim else out[0] for leaf, out in zip(leaves, moved, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)


def _check_feature_spec(feature_spec: tuple, axes: Axes) -> None:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in feature_spec)
    names = [name for entry in entries for name in entry if name is not None]
    allowed = [name for name in axes.mesh.shape if name not in axes.joint]
    if not set(names) <= set(allowed) or len(set(names)) < len(names):
        raise ValueError(
            f"feature_spec must name mesh axes of {allowed}, each once, or None, got {feature_spec}"
        )


def _with_row_axis(x, num_rows: int, rows: int):
    if not isinstance(x, (np.ndarray, jax.Array)):
        raise TypeError(f"x must hold arrays only, got {type(x).__name__}")
    if num_rows == 1 and x.shape[:1] == (rows,):
        return x[None]
    if x.shape[:2] != (num_rows, rows):
        raise ValueError(
            f"x must be [{num_rows}, {rows}, ...]"
            + (f" or [{rows}, ...]" if num_rows == 1 else "")
            + f" for this plan, got {x.shape}"
        )
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(static, leaves, plan: Plan):
    return _run(static, leaves, plan)


@functools.partial(jax.jit, static_argnums=0)  # op by op, shard_map is very slow
def _run(static, leaves, plan: Plan):
    axes, feature_spec, forward = static
    if axes is None:
        return tuple(_move_on_one_device(x, plan, forward) for x in leaves)
    specs = tuple(P(axes.rows or None, axes.cp, *feature_spec) for _ in leaves)
    tables = table_specs(plan, axes)
    body = functools.partial(_move_rank, axes=axes, forward=forward)
    return spmd(body, axes, (specs, tables), specs)(leaves, plan)


def _move_fwd(static, leaves, plan):
    return _move(static, leaves, plan), plan


def _move_bwd(static, plan, cotangents):
    axes, feature_spec, forward = static
    real = [x.dtype != jax.dtypes.float0 for x in cotangents]
    floats = tuple(x for x, keep in zip(cotangents, real, strict=True) if keep)
    moved = iter(_move((axes, feature_spec, not forward), floats, plan))
    return tuple(next(moved) if keep else None for keep in real), None


_move.defvjp(_move_fwd, _move_bwd)


def _move_on_one_device(x: jax.Array, plan: Plan, forward: bool) -> jax.Array:
    shape = plan.shape

    def one_row(plan, x):
        if forward:
            rows = jnp.arange(shape.num_ranks * shape.plan_rows_per_rank, dtype=jnp.int32)
            source = rows_to_places(plan, rows)
            source = jnp.where(source < 0, x.shape[0], source)
        else:
            places = jnp.arange(shape.num_ranks * shape.tokens_per_rank, dtype=jnp.int32)
            source = places_to_rows(plan, places)
        return _take(x, source)

    return for_each_row(one_row, plan, x)


class _Side(NamedTuple):
    """A rank's rows in one layout, grouped by the rank that owns them in the other.

    Attributes:
      order: int32 [rows], rows sorted by (peer, place).
      starts: int32 [N + 1], where each peer's rows begin in `order`.
      peer: int32 [rows], the peer of each row; N where there is none.
      partner: int32 [rows], the row that holds the same token on the peer.
    """

    order: jax.Array
    starts: jax.Array
    peer: jax.Array
    partner: jax.Array

    def chunks(self, peers_and_chunks: jax.Array, size: int) -> jax.Array:
        """Returns the rows of many (peer, chunk), int32 [n, size]; out of bounds past the end."""
        peer, chunk = peers_and_chunks[:, 0, None], peers_and_chunks[:, 1, None]
        at = self.starts[peer] + chunk * size + jnp.arange(size, dtype=jnp.int32)
        rows = self.order[jnp.minimum(at, self.order.shape[0] - 1)]
        return jnp.where((peer >= 0) & (at < self.starts[peer + 1]), rows, self.order.shape[0])


def _side(peer: jax.Array, sort_key: jax.Array, partner: jax.Array, num_ranks: int) -> _Side:
    order = jnp.argsort(sort_key, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(peer[order], jnp.arange(num_ranks + 1)).astype(jnp.int32)
    return _Side(order, starts, peer, partner)


def _sides(plan: Plan, rank: jax.Array) -> tuple[_Side, _Side]:
    """This rank's side of the caller's layout and of the plan's."""
    shape = plan.shape
    tokens, rows, ranks = shape.tokens_per_rank, shape.plan_rows_per_rank, shape.num_ranks
    to_row = places_to_rows(plan, rank * tokens + jnp.arange(tokens, dtype=jnp.int32))
    to_place = rows_to_places(plan, rank * rows + jnp.arange(rows, dtype=jnp.int32))
    owner = to_row // rows
    source = jnp.where(to_place < 0, ranks, to_place // tokens)
    sorted_place = jnp.where(to_place < 0, ranks * tokens, to_place)
    return (
        _side(owner, owner, to_row % rows, ranks),
        _side(source, sorted_place, to_place % tokens, ranks),
    )


def _move_rank(leaves, plan: Plan, *, axes: Axes, forward: bool):
    """The program of one rank; leaves are [1, rows, ...features]."""
    plan = rank_tables(plan)
    shape = plan.shape
    rank = lax.axis_index(axes.cp)
    caller, planned = _sides(plan, rank)
    sender, receiver = (caller, planned) if forward else (planned, caller)
    sends, receives = plan.dispatch_send, plan.dispatch_recv
    if not forward:
        sends, receives = receives, sends

    source = plan.dispatch_recv[:, :, 0]
    sources = all_sources(jnp.where(source < 0, shape.num_ranks, source), shape, axes)

    packed, unpack = _pack([leaf[0] for leaf in leaves])
    stay = jnp.where(receiver.peer == rank, receiver.partner, sender.order.shape[0])
    out = [_take(x, stay) for x in packed]

    def stage(index, rounds, out):
        leaving = sender.chunks(sends[index, : len(rounds)], shape.block_size)
        landing = receiver.chunks(receives[index, : len(rounds)], shape.block_size).reshape(-1)
        stage_sources = None if sources is None else sources[:, index]
        for i, x in enumerate(packed):
            payloads = [_take(x, rows) for rows in leaving]
            arrivals = transfer(payloads, rounds, shape, axes, stage_sources, back=not forward)
            out[i] = out[i].at[landing].set(jnp.concatenate(arrivals), mode="drop")
        return out

    out = run_stages(shape.dispatch_groups, plan.dispatch_trips, shape, stage, out)
    return tuple(x[None] for x in unpack(out))


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _pack(leaves: list[jax.Array]):
    """Joins the features of leaves of one dtype, so that a round sends one payload for them."""
    kinds = list(dict.fromkeys(leaf.dtype for leaf in leaves))
    flat = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
    packed = [jnp.concatenate([x for x in flat if x.dtype == kind], axis=1) for kind in kinds]

    def unpack(moved: list[jax.Array]) -> list[jax.Array]:
        used = dict.fromkeys(kinds, 0)
        leaves_out = []
        for leaf, x in zip(leaves, flat, strict=True):
            whole, begin = moved[kinds.index(leaf.dtype)], used[leaf.dtype]
            part = whole[:, begin : begin + x.shape[1]]
            used[leaf.dtype] += x.shape[1]
            leaves_out.append(part.reshape(whole.shape[0], *leaf.shape[1:]))
        return leaves_out

    return packed, unpack
