"""The plan: who owns each block, which block pairs run in which stage, and what travels when.

Letters in shapes: R rows (one per data-parallel group), N ranks, T tokens a rank in the caller's
layout, S block slots a rank, B rows a block, K stages, G rounds a stage, F fragments, I items.
A *place* is a row of the caller's layout, in [0, N*T); a *plan row* is a row of the plan's layout,
in [0, N*S*B); block b of the plan's layout is slot b % S of rank b // S. -1 stands for none.

A plan is host data (numpy). Under jit its tables are traced and `PlanShape` is the compile key.
"""

import dataclasses
import json
from typing import Any

import numpy as np

from fcp_jax.config import PlanConfig
from fcp_jax.rounds import Round
from fcp_jax.stats import PlanStats

FORMAT_VERSION = 3

Table = Any
"""np.ndarray on host, jax.Array under jit."""


@dataclasses.dataclass(frozen=True)
class PlanShape:
    """Everything about a plan that is compiled in, besides the sizes of its tables.

    Attributes:
      num_rows: R, data-parallel rows planned together.
      num_ranks: N.
      tokens_per_rank: T.
      block_size: B, as the planner chose it.
      num_slots: S.
      causal: whether the mask is causal.
      transport: "static", "xor", "shift" or "ragged".
      groups: rounds of each group of KV stages.
      dispatch_groups: rounds of each group of dispatch stages.
    """

    num_rows: int
    num_ranks: int
    tokens_per_rank: int
    block_size: int
    num_slots: int
    causal: bool
    transport: str
    groups: tuple[tuple[Round, ...], ...]
    dispatch_groups: tuple[tuple[Round, ...], ...]

    @property
    def plan_rows_per_rank(self) -> int:
        """S * B, the tokens a rank has room for in the plan's layout."""
        return self.num_slots * self.block_size


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A validated schedule of one attention over packed rows; all tables are int32.

    Attributes:
      fragment_row: [R, F] first plan row of each fragment, ascending; padding entries are N*S*B.
      fragment_start: [R, F] first place of each fragment; padding entries are N*T.
      fragment_length: [R, F] tokens, 0 for padding entries.
      fragment_lo: [R, F] first place of the fragment's segment.
      fragment_hi: [R, F] last place of the fragment's segment.
      trips: [groups] stages of each group of rounds, in order.
      send_slot: [R, N, K, G] slot whose keys and values a rank sends in each round; for "ragged"
        in order of destination rank, -1 at the end.
      recv_block: [R, N, K, G] block that arrives in each round; for "ragged" in order of source
        rank, -1 at the end.
      local_row_starts: [R, N, S + 1] work list over own blocks before the first stage: first item
        of each query slot.
      local_columns: [R, N, I] own kv slot of each item.
      stage_row_starts: [R, N, K, S + 1] work list of each stage.
      stage_columns: [R, N, K, I] round whose arrival is each item's kv block; G + s for own slot s.
      dispatch_trips: [dispatch groups] stages of each group of dispatch rounds.
      dispatch_send: [R, N, K, G, 2] (destination rank, chunk) of each dispatch round, ordered as
        send_slot.
      dispatch_recv: [R, N, K, G, 2] (source rank, chunk) of each dispatch round, ordered as
        recv_block. Chunk c of a rank
        pair is the c-th run of B tokens, in order of place, that the source owns in the caller's
        layout and the destination in the plan's.
      shape: what is compiled in.
      config: the request; not part of the compile key.
      stats: what the plan costs; not part of the compile key.
    """

    fragment_row: Table
    fragment_start: Table
    fragment_length: Table
    fragment_lo: Table
    fragment_hi: Table
    trips: Table
    send_slot: Table
    recv_block: Table
    local_row_starts: Table
    local_columns: Table
    stage_row_starts: Table
    stage_columns: Table
    dispatch_trips: Table
    dispatch_send: Table
    dispatch_recv: Table
    shape: PlanShape
    config: PlanConfig | None = None
    stats: PlanStats | None = None

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """The sizes that bucketing rounds up: F, K, local I, stage I, dispatch K."""
        return (
            self.fragment_row.shape[1],
            self.send_slot.shape[2],
            self.local_columns.shape[2],
            self.stage_columns.shape[3],
            self.dispatch_send.shape[2],
        )

    def save(self, path) -> None:
        """Writes the plan to an `.npz` file."""
        header = {
            "version": FORMAT_VERSION,
            "shape": dataclasses.asdict(self.shape),
            "config": self.config and dataclasses.asdict(self.config),
            "stats": self.stats and dataclasses.asdict(self.stats),
        }
        tables = {name: getattr(self, name) for name in TABLES}
        with open(path, "wb") as file:
            np.savez_compressed(file, header=np.array(json.dumps(header)), **tables)

    @classmethod
    def load(cls, path) -> "Plan":
        """Reads what `save` wrote.

        Raises:
          ValueError: if the file was written by another format version.
        """
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header["version"] != FORMAT_VERSION:
                raise ValueError(
                    f"path holds plan format {header['version']}, this version reads "
                    f"{FORMAT_VERSION}: plan again"
                )
            tables = {name: file[name] for name in TABLES}
        shape: dict[str, Any] = {
            key: _tuples(value) if isinstance(value, list) else value
            for key, value in header["shape"].items()
        }
        config = header["config"]
        if config and config["rank_speeds"] is not None:
            config["rank_speeds"] = tuple(config["rank_speeds"])
        return cls(
            **tables,
            shape=PlanShape(**shape),
            config=PlanConfig(**config) if config else None,
            stats=PlanStats(**header["stats"]) if header["stats"] else None,
        )


TABLES = tuple(
    field.name
    for field in dataclasses.fields(Plan)
    if field.name not in ("shape", "config", "stats")
)


def pad_plan(plan: Plan, sizes: tuple[int, ...]) -> Plan:
    """Returns the same plan with tables padded to at least `sizes` (see `Plan.table_sizes`).

    The stages of a "static" plan are compiled in and keep their number.
    """
    static = plan.shape.transport == "static"
    fragments, stages, local_items, items, dispatch_stages = (
        max(a, b) for a, b in zip(plan.table_sizes, sizes, strict=True)
    )
    if static:
        stages, dispatch_stages = plan.send_slot.shape[2], plan.dispatch_send.shape[2]
    shape = plan.shape
    end_row, end_place = shape.num_ranks * shape.plan_rows_per_rank, _num_places(shape)
    return dataclasses.replace(
        plan,
        fragment_row=_pad(plan.fragment_row, {1: fragments}, end_row),
        fragment_start=_pad(plan.fragment_start, {1: fragments}, end_place),
        fragment_length=_pad(plan.fragment_length, {1: fragments}, 0),
        fragment_lo=_pad(plan.fragment_lo, {1: fragments}, 0),
        fragment_hi=_pad(plan.fragment_hi, {1: fragments}, 0),
        send_slot=_pad(plan.send_slot, {2: stages}, -1),
        recv_block=_pad(plan.recv_block, {2: stages}, -1),
        local_columns=_pad(plan.local_columns, {2: local_items}, 0),
        stage_row_starts=_pad(plan.stage_row_starts, {2: stages}, 0),
        stage_columns=_pad(plan.stage_columns, {2: stages, 3: items}, 0),
        dispatch_send=_pad(plan.dispatch_send, {2: dispatch_stages}, -1),
        dispatch_recv=_pad(plan.dispatch_recv, {2: dispatch_stages}, -1),
    )


def bucket_size(size: int) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes, at most half again too large."""
    power = 1 << max(size - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def _num_places(shape: PlanShape) -> int:
    return shape.num_ranks * shape.tokens_per_rank


def _pad(table: np.ndarray, sizes: dict[int, int], value: int) -> np.ndarray:
    widths = [(0, sizes.get(axis, size) - size) for axis, size in enumerate(table.shape)]
    return np.pad(table, widths, constant_values=value)


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
