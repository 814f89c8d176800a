"""How a plan's rows and ranks, and the heads, lie on a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fcp_jax.plan import TABLES, Plan

_RAGGED_PLATFORMS = ("gpu", "cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Axes:
    """Mesh axes by role; hashable, part of the compile key.

    Attributes:
      mesh: the device mesh.
      cp: axis of the plan's ranks.
      rows: axes of the plan's rows, outermost first; empty when the plan has one row.
      heads: axis that splits heads, or None.
    """

    mesh: Mesh
    cp: str
    rows: tuple[str, ...]
    heads: str | None

    @property
    def joint(self) -> tuple[str, ...]:
        """Axes over which static rounds of several rows are permutations."""
        return (*self.rows, self.cp)


def resolve_axes(
    plan: Plan,
    mesh: Mesh,
    axis_name: str,
    batch_axis_name: str | tuple[str, ...],
    head_axis_name: str,
) -> Axes:
    """Checks a mesh against a plan.

    Args:
      plan: what will run.
      mesh: where.
      axis_name: the context parallel axis.
      batch_axis_name: the axis or axes of the rows; used when the plan has several.
      head_axis_name: the tensor parallel axis; ignored if the mesh has none of that name.

    Raises:
      TypeError: if `mesh` is none of devices.
      ValueError: if an axis is missing or its size is not the plan's, if two roles name one axis,
        or if the devices cannot run the plan's transport.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh of devices, got {type(mesh).__name__}")
    sizes = dict(mesh.shape)
    platform = mesh.devices.flat[0].platform
    if plan.shape.transport == "ragged" and platform not in _RAGGED_PLATFORMS:
        raise ValueError(
            f'transport="ragged" runs on GPUs only, the mesh has devices of platform {platform!r}; '
            'plan with transport="auto"'
        )
    if axis_name not in sizes:
        raise ValueError(
            f"axis_name must be one of the mesh axes {tuple(sizes)}, got {axis_name!r}"
        )
    if sizes[axis_name] != plan.shape.num_ranks:
        raise ValueError(
            f"plan is for num_ranks={plan.shape.num_ranks}, but mesh axis {axis_name!r} has "
            f"{sizes[axis_name]} devices"
        )
    rows: tuple[str, ...] = ()
    if plan.shape.num_rows > 1:
        rows = (batch_axis_name,) if isinstance(batch_axis_name, str) else tuple(batch_axis_name)
        missing = [name for name in rows if name not in sizes]
        size = int(np.prod([sizes.get(name, 1) for name in rows]))
        if missing or size != plan.shape.num_rows:
            raise ValueError(
                f"plan has {plan.shape.num_rows} rows: batch_axis_name must name mesh axes of that "
                f"many devices together, got {batch_axis_name!r} on a mesh of {sizes}"
            )
    heads = head_axis_name if head_axis_name in sizes else None
    roles = [axis_name, *rows, *([heads] if heads else [])]
    if len(set(roles)) < len(roles):
        raise ValueError(
            "axis_name, batch_axis_name and head_axis_name must name different mesh axes, got "
            f"{axis_name!r}, {batch_axis_name!r} and {head_axis_name!r}"
        )
    return Axes(mesh, axis_name, rows, heads)


def table_specs(plan: Plan, axes: Axes) -> Plan:
    """Returns the plan with the `PartitionSpec` of each table in its place."""
    rows = axes.rows or None
    specs: dict[str, Any] = {}
    for name in TABLES:
        if name in ("trips", "dispatch_trips"):
            specs[name] = P()
        elif name.startswith("fragment_"):
            specs[name] = P(rows)
        else:
            specs[name] = P(rows, axes.cp)
    return dataclasses.replace(plan, **specs)


def rank_tables(plan: Plan) -> Plan:
    """Inside `shard_map`: returns the tables of this device's row and rank, those axes removed."""
    own: dict[str, Any] = {}
    for name in TABLES:
        table = getattr(plan, name)
        if name.startswith("fragment_"):
            table = table[0]
        elif name not in ("trips", "dispatch_trips"):
            table = table[0, 0]
        own[name] = table
    return dataclasses.replace(plan, **own)


def spmd(function: Callable, axes: Axes, in_specs, out_specs) -> Callable:
    """Wraps `jax.shard_map` to take operands of any sharding, on Auto and on Explicit axes."""
    mapped = jax.shard_map(
        function, mesh=axes.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    explicit = explicit_axes(axes.mesh)
    if not explicit:
        return mapped

    @functools.wraps(function)
    def call(*operands):
        def place(spec, tree):
            sharding = NamedSharding(axes.mesh, _only(spec, explicit))
            return jax.tree.map(lambda leaf: jax.reshard(leaf, sharding), tree)

        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        return mapped(*jax.tree.map(place, in_specs, operands, is_leaf=is_spec))

    return call


def explicit_axes(mesh: Mesh) -> set[str]:
    """Returns the mesh axes whose shardings are part of an array's type."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def _only(spec: P, names: set[str]) -> P:
    """The parts of a spec that speak of some axes."""

    def keep(entry):
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name in names) or None
        return entry if entry in names else None

    return P(*map(keep, spec))
