"""Reading a plan's tables back as blocks and work items, on host."""

import dataclasses

import numpy as np

from fcp_jax.blocks import Blocks, pair_areas
from fcp_jax.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class WorkItems:
    """The block pairs of one row, int64 [num_items] each.

    Attributes:
      rank: where the pair is computed.
      stage: when; -1 for what comes before stage 0.
      column: entry of the work list: before stage 0 the own kv slot, else the round of the stage,
        or the number of rounds plus the own kv slot.
      query_block: block of the plan's layout.
      kv_block: likewise; -1 if the stage's round brings none.
    """

    rank: np.ndarray
    stage: np.ndarray
    column: np.ndarray
    query_block: np.ndarray
    kv_block: np.ndarray


def fragment_blocks(plan: Plan, row: int = 0) -> Blocks:
    """Returns the blocks of one row, numbered as in the plan's layout."""
    shape = plan.shape
    real = plan.fragment_length[row] > 0
    first, start, length, lo = (
        getattr(plan, f"fragment_{name}")[row][real].astype(np.int64)
        for name in ("row", "start", "length", "lo")
    )
    block, offset = np.divmod(first, shape.block_size)
    segment = np.unique(lo, return_inverse=True)[1]
    num_blocks = shape.num_ranks * shape.num_slots
    return Blocks(shape.block_size, num_blocks, block, offset, start, length, segment)


def work_items(plan: Plan, row: int = 0) -> WorkItems:
    """Returns every block pair that a row's work lists name."""
    slots = plan.shape.num_slots
    rank, _, slot, column = _flatten(
        plan.local_row_starts[row][:, None], plan.local_columns[row][:, None]
    )
    stage_rank, stage, stage_slot, stage_column = _flatten(
        plan.stage_row_starts[row], plan.stage_columns[row]
    )
    width = plan.recv_block.shape[3]
    own = stage_rank * slots + stage_column - width
    arrived = plan.recv_block[row][stage_rank, stage, np.clip(stage_column, 0, width - 1)]
    return WorkItems(
        rank=np.concatenate([rank, stage_rank]),
        stage=np.concatenate([np.full(len(rank), -1), stage]),
        column=np.concatenate([column, stage_column]),
        query_block=np.concatenate([rank * slots + slot, stage_rank * slots + stage_slot]),
        kv_block=np.concatenate(
            [rank * slots + column, np.where(stage_column < width, arrived, own).astype(np.int64)]
        ),
    )


def stage_areas(plan: Plan, row: int = 0) -> np.ndarray:
    """Counts token pairs by rank and stage, int64 [N, 1 + K]; column 0 is before stage 0."""
    blocks, items = fragment_blocks(plan, row), work_items(plan, row)
    query, kv, area = pair_areas(blocks, plan.shape.causal)
    keys = query * blocks.num_blocks + kv
    found = np.searchsorted(keys, items.query_block * blocks.num_blocks + items.kv_block)
    stages = 1 + plan.send_slot.shape[2]
    total = np.bincount(
        items.rank * stages + items.stage + 1, area[found], plan.shape.num_ranks * stages
    )
    return total.astype(np.int64).reshape(-1, stages)


def _flatten(row_starts: np.ndarray, columns: np.ndarray):
    """Flattens [N, K, S + 1], [N, K, I] to (rank, stage, slot, column), int64 [num_items] each."""
    counts = np.diff(row_starts, axis=-1)
    where = np.repeat(np.arange(counts.size), counts.ravel())
    rank, stage, slot = np.unravel_index(where, counts.shape)
    real = np.arange(columns.shape[-1]) < row_starts[..., -1:]
    return rank, stage, slot, columns[real].astype(np.int64)
