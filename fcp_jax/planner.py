"""Making a plan: segments -> blocks -> placement -> transfers -> rounds -> tables. Host, numpy."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fcp_jax.baselines import bytescale_blocks, magi_blocks, wlb_blocks
from fcp_jax.blocks import Blocks, block_pairs, query_costs
from fcp_jax.config import PlanConfig
from fcp_jax.layouts import Layout, pull_layout, window_layout
from fcp_jax.plan import TABLES, Plan, PlanShape, pad_plan
from fcp_jax.ring import all_gather_blocks, ring_blocks
from fcp_jax.rounds import Schedule, max_degree, occurrence, schedule
from fcp_jax.segments import Segments, as_segments
from fcp_jax.stats import PlanStats, transfer_stats

_FINEST_BLOCK = 2048
"""Above 8 ranks, blocks are halved, but not below this: balance, bandwidth and rounds all gain
(docs/planner.md), and a kernel loses 5% (cuDNN on an H200, causal, one block a launch: 618 TFLOP/s
with 4096 rows, 590 with 2048, 430 with 1024)."""

_GATHERING = ("ring", "all_gather", "wlb")
"""Methods with one block a rank, which visits every other rank."""


def make_plan(segments, config: PlanConfig) -> Plan:
    """Plans one row of packed segments.

    Args:
      segments: tokens of each segment in packed order, or `Segments` where there are gaps.
      config: the request.

    Returns:
      The plan; the same for the same arguments on every machine.

    Raises:
      ValueError: if the segments are malformed or do not fit into the caller's layout.
    """
    return make_batch_plan([segments], config)


def make_batch_plan(rows: Sequence, config: PlanConfig) -> Plan:
    """Plans the rows of one step together, one per data-parallel group.

    The rows share one compiled program: tables of the same sizes, groups of rounds that run as
    often as the row that needs them most, static rounds as one permutation over all ranks.

    Args:
      rows: the segments of each row, as in `make_plan`.
      config: the request, for each row.

    Returns:
      The plan; its stats are those of the row with the highest value of each figure.

    Raises:
      ValueError: as `make_plan`, or if there are no rows.
    """
    started = time.perf_counter()
    if not len(rows):
        raise ValueError("rows must hold at least one row of segments")
    rows = [_checked(as_segments(row), config) for row in rows]
    block_size, num_slots = _slots(config)
    transport, reason = _transport(config)
    coalesce = _stage_rounds(config, block_size)
    layouts = [_lay_out(row, config, block_size, num_slots, transport, coalesce) for row in rows]
    schedules = _schedules(
        [(lay.rank[lay.transfer_block], lay.transfer_dst, lay.transfer_work) for lay in layouts],
        config.num_ranks,
        transport,
        coalesce,
        by_distance=config.method == "fcp",
        starts=True,
    )
    moved = [_moved_tokens(lay.blocks, lay.rank, config) for lay in layouts]
    chunks = [_dispatch_chunks(tokens, block_size) for tokens in moved]
    dispatches = _schedules(
        [(src, dst, None) for src, dst, _ in chunks], config.num_ranks, transport, config.coalesce
    )
    shape = PlanShape(
        num_rows=len(rows),
        num_ranks=config.num_ranks,
        tokens_per_rank=config.tokens_per_rank,
        block_size=block_size,
        num_slots=num_slots,
        causal=config.causal,
        transport=transport,
        groups=schedules[0].groups,
        dispatch_groups=dispatches[0].groups,
    )
    plans = [
        Plan(
            **_row_tables(lay, shape, rounds, chunk, dispatch),
            trips=rounds.trips.astype(np.int32),
            dispatch_trips=dispatch.trips.astype(np.int32),
            shape=shape,
            config=config,
        )
        for lay, rounds, chunk, dispatch in zip(layouts, schedules, chunks, dispatches, strict=True)
    ]
    stats = [
        _stats(lay, shape, config, rounds, tokens, reason)
        for lay, rounds, tokens in zip(layouts, schedules, moved, strict=True)
    ]
    plan = _join(plans)
    return dataclasses.replace(plan, stats=_worst(stats, time.perf_counter() - started))


def _checked(segments: Segments, config: PlanConfig) -> Segments:
    end = int(segments.ends.max(initial=0))
    if end > config.capacity:
        raise ValueError(
            f"segments end at row {end}, beyond the capacity num_ranks * tokens_per_rank = "
            f"{config.num_ranks} * {config.tokens_per_rank} = {config.capacity}"
        )
    real = segments.lengths > 0
    return Segments(segments.starts[real], segments.lengths[real])


def _slots(config: PlanConfig) -> tuple[int, int]:
    """Returns (block size, slots a rank), fixed by the config so that batches share a program."""
    if config.method in _GATHERING:
        return -(-config.tokens_per_rank // 64) * 64, 1
    size = config.block_size
    if config.method == "fcp" and config.num_ranks > 8 and size % 128 == 0:
        size = max(size // 2, min(size, _FINEST_BLOCK))
    needed = -(-config.tokens_per_rank // size)
    if config.method == "magi":
        return size, needed
    return size, max(needed, 5 * config.tokens_per_rank // (4 * size))


def _stage_rounds(config: PlanConfig, block_size: int) -> int:
    """Returns the most rounds of a stage, which bring the tokens of `coalesce` asked-for blocks."""
    if config.method == "ring":
        return 1
    if config.method in _GATHERING:
        return max(config.num_ranks - 1, 1)
    return config.coalesce * max(config.block_size // block_size, 1)


def _transport(config: PlanConfig) -> tuple[str, str]:
    chosen = config.resolved_transport
    if config.transport != "auto":
        return chosen, "requested"
    if chosen == "xor":
        return chosen, "rounds as data; num_ranks is a power of two"
    if config.method in _GATHERING:
        return chosen, f"rounds as data; {config.method} is a rotation in every round"
    return chosen, "rounds as data"


def _lay_out(
    segments: Segments,
    config: PlanConfig,
    block_size: int,
    num_slots: int,
    transport: str,
    coalesce: int,
) -> Layout:
    ranks, tokens, causal = config.num_ranks, config.tokens_per_rank, config.causal
    if config.method == "fcp":
        return window_layout(segments, config, block_size, num_slots, transport, coalesce)
    if config.method == "magi":
        return pull_layout(
            *magi_blocks(segments, ranks, tokens, block_size, causal), segments, config
        )
    if config.method == "bytescale":
        placed = bytescale_blocks(segments, ranks, tokens, block_size, num_slots)
        return pull_layout(*placed, segments, config)
    if config.method == "ring":
        blocks = ring_blocks(segments, ranks, block_size)
    elif config.method == "wlb":
        blocks = wlb_blocks(segments, ranks, tokens, block_size, causal)
    else:
        blocks = all_gather_blocks(segments, ranks, tokens, block_size)
    # Every rank's block visits every other rank.
    block, dst = np.nonzero(~np.eye(blocks.num_blocks, ranks, dtype=bool))
    rank, pairs = np.arange(blocks.num_blocks), block_pairs(blocks, causal)
    return Layout(segments, blocks, rank, pairs, block, dst)


def _moved_tokens(blocks: Blocks, rank: np.ndarray, config: PlanConfig) -> np.ndarray:
    """Tokens [N, N] owned by the first rank in the caller's layout, by the second in the plan's."""
    tokens = config.tokens_per_rank
    first, last = blocks.start // tokens, (blocks.start + blocks.length - 1) // tokens
    spans = last - first + 1
    fragment = np.repeat(np.arange(len(spans)), spans)
    src = first[fragment] + np.arange(len(fragment)) - np.repeat(np.cumsum(spans) - spans, spans)
    begin = np.maximum(blocks.start[fragment], src * tokens)
    end = np.minimum((blocks.start + blocks.length)[fragment], (src + 1) * tokens)
    moved = np.zeros((config.num_ranks, config.num_ranks), np.int64)
    np.add.at(moved, (src, rank[blocks.block[fragment]]), end - begin)
    return moved


def _dispatch_chunks(moved: np.ndarray, chunk_size: int):
    """Lists (src, dst, chunk), int64 [num_chunks] each, of all tokens that change rank."""
    counts = -(-moved // chunk_size)
    np.fill_diagonal(counts, 0)
    src, dst = np.nonzero(counts)
    times = counts[src, dst]
    src, dst = np.repeat(src, times), np.repeat(dst, times)
    return src, dst, occurrence(src * len(moved) + dst)


def _schedules(
    edges: list,
    num_ranks: int,
    transport: str,
    coalesce: int,
    by_distance: bool = False,
    starts: bool = False,
) -> list[Schedule]:
    """Schedules every row, then makes rows share groups and trips.

    With `starts` the first group runs at least once: the pipeline fetches it behind local work.
    """
    rows = [
        schedule(src, dst, num_ranks, transport, coalesce, by_distance, work)
        for src, dst, work in edges
    ]
    if transport == "static":
        groups = _joint_static_groups([row.groups for row in rows], num_ranks)
        trips = np.ones(len(groups), np.int64)
    else:
        groups = rows[0].groups
        trips = np.maximum.reduce([row.trips for row in rows])
        trips[:1] = trips[:1].clip(int(starts))
    return [dataclasses.replace(row, groups=groups, trips=trips) for row in rows]


def _joint_static_groups(row_groups: list, num_ranks: int):
    """Merges the rounds of all rows into permutations over row * num_ranks + rank."""
    joint: list[list[list[tuple[int, int]]]] = []
    for row, groups in enumerate(row_groups):
        for g, rounds in enumerate(groups):
            joint += [[]] * (g + 1 - len(joint))
            joint[g] = joint[g] + [[] for _ in range(len(rounds) - len(joint[g]))]
            for p, pairs in enumerate(rounds):
                joint[g][p] += [(row * num_ranks + s, row * num_ranks + d) for s, d in pairs]
    return tuple(tuple(tuple(pairs) for pairs in rounds) for rounds in joint)


def _row_tables(
    lay: Layout, shape: PlanShape, rounds: Schedule, chunks, dispatch: Schedule
) -> dict[str, Any]:
    """The tables of one row, with a leading axis of 1."""
    ranks, slots, block_size = shape.num_ranks, shape.num_slots, shape.block_size
    blocks, segments = lay.blocks, lay.segments
    plan_block = lay.rank * slots + lay.slot

    row = plan_block[blocks.block] * block_size + blocks.offset
    order = np.argsort(row)
    tables = {
        "fragment_row": row[order],
        "fragment_start": blocks.start[order],
        "fragment_length": blocks.length[order],
        "fragment_lo": segments.starts[blocks.segment[order]],
        "fragment_hi": segments.ends[blocks.segment[order]] - 1,
    }

    stage, width = rounds.stage(rounds.trips), _width(rounds)
    num_stages = max(int(rounds.trips.sum()), 1)
    src = lay.rank[lay.transfer_block]
    send_slot = np.full((ranks, num_stages, width), -1)
    recv_block = np.full((ranks, num_stages, width), -1)
    send_slot[src, stage, rounds.send_position] = lay.slot[lay.transfer_block]
    recv_block[lay.transfer_dst, stage, rounds.position] = plan_block[lay.transfer_block]
    tables |= {"send_slot": send_slot, "recv_block": recv_block}

    # Each pair runs where its queries live, in the stage that brings its keys and values, or where
    # they are the rank's own, whenever it has least to do.
    query, kv = lay.pairs
    rank, query_slot, transfer = lay.rank[query], lay.slot[query], lay.transfer_of_pair
    own = transfer < 0
    column = np.where(own, width + lay.slot[kv], 0)
    column[~own] = rounds.position[transfer[~own]]
    when = np.full(len(query), -1)
    when[~own] = stage[transfer[~own]]
    when[own] = _spread_own(lay, when, int(rounds.trips.sum()))
    early = when < 0
    tables["local_row_starts"], tables["local_columns"] = _work_lists(
        rank[early], query_slot[early], column[early] - width, ranks, slots
    )
    row_starts, columns = _work_lists(
        rank[~early] * num_stages + when[~early],
        query_slot[~early],
        column[~early],
        ranks * num_stages,
        slots,
    )
    tables["stage_row_starts"] = row_starts.reshape(ranks, num_stages, slots + 1)
    tables["stage_columns"] = columns.reshape(ranks, num_stages, -1)

    src, dst, chunk = chunks
    stage, width = dispatch.stage(dispatch.trips), _width(dispatch)
    sends = np.full((2, ranks, max(int(dispatch.trips.sum()), 1), width, 2), -1)
    sends[0, src, stage, dispatch.send_position] = np.stack([dst, chunk], 1)
    sends[1, dst, stage, dispatch.position] = np.stack([src, chunk], 1)
    tables["dispatch_send"], tables["dispatch_recv"] = sends
    return {name: table[None].astype(np.int32) for name, table in tables.items()}


def _spread_own(lay: Layout, when: np.ndarray, stages: int) -> np.ndarray:
    """Puts work on own blocks where a rank has least to do, before the first stage and in each.

    However coarse, some of it comes before the first stage, to hide that one's transfers.

    Args:
      lay: of the row.
      when: int64 [num_pairs], the stage of each pair; -1 for own ones.
      stages: how many run.

    Returns:
      int64 [own pairs], the stage of each, -1 for before the first.
    """
    rank = lay.rank[lay.pairs[0]]
    own = np.flatnonzero(when < 0)
    ranks, steps = int(rank.max(initial=-1)) + 1, 1 + stages
    brought = np.bincount(
        rank * steps + when + 1, np.where(when < 0, 0.0, lay.pair_work), ranks * steps
    ).reshape(ranks, steps)
    total = np.bincount(rank[own], lay.pair_work[own], ranks)
    # Own work fills the steps of a rank up to one level, as water would.
    lowest = np.sort(brought, axis=1)
    level = (total[:, None] + np.cumsum(lowest, axis=1)) / np.arange(1, steps + 1)
    flooded = (level >= lowest).sum(axis=1, keepdims=True)
    level = np.take_along_axis(level, flooded - 1, axis=1)
    done = np.cumsum(np.maximum(level - brought, 0.0), axis=1)
    order = np.lexsort((lay.slot[lay.pairs[0][own]], rank[own]))
    work, of = lay.pair_work[own][order], rank[own][order]
    middle = np.cumsum(work) - work / 2 - np.concatenate([[0.0], np.cumsum(total)])[of]
    step = (done[of, :-1] < middle[:, None]).sum(axis=1)
    step[np.diff(of, prepend=-1) > 0] = 0
    stage = np.empty(len(own), np.int64)
    stage[order] = step - 1
    return stage


def _width(rounds: Schedule) -> int:
    return max((len(group) for group in rounds.groups), default=1)


def _work_lists(bucket, row, column, num_buckets: int, num_rows: int):
    """Compressed sparse rows per bucket: (row_starts [buckets, rows + 1], columns [buckets, I])."""
    order = np.lexsort((column, row, bucket))
    bucket, row, column = bucket[order], row[order], column[order]
    counts = np.zeros((num_buckets, num_rows), np.int64)
    np.add.at(counts, (bucket, row), 1)
    row_starts = np.zeros((num_buckets, num_rows + 1), np.int64)
    np.cumsum(counts, axis=1, out=row_starts[:, 1:])
    columns = np.zeros((num_buckets, int(row_starts[:, -1].max(initial=0)) or 1), np.int64)
    columns[bucket, occurrence(bucket)] = column
    return row_starts, columns


def _join(plans: list[Plan]) -> Plan:
    """Puts the rows of single-row plans into one, padded to common table sizes."""
    sizes = tuple(max(1, *each) for each in zip(*(p.table_sizes for p in plans), strict=True))
    plans = [pad_plan(plan, sizes) for plan in plans]
    shared = ("trips", "dispatch_trips")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(plan, name) for plan in plans])
        for name in TABLES
        if name not in shared
    }
    return dataclasses.replace(plans[0], **joined)


def _stats(
    lay: Layout,
    shape: PlanShape,
    config: PlanConfig,
    rounds: Schedule,
    moved: np.ndarray,
    reason: str,
) -> PlanStats:
    src, dst = lay.rank[lay.transfer_block], lay.transfer_dst
    costs = query_costs(lay.blocks, lay.segments, config.causal)
    rank_pairs = np.bincount(lay.rank, weights=costs, minlength=config.num_ranks)
    degree = max_degree(src, dst)
    num_rounds = degree if shape.transport == "ragged" else rounds.num_rounds
    return PlanStats(
        method=config.method,
        num_ranks=config.num_ranks,
        block_size=shape.block_size,
        num_blocks=lay.blocks.num_blocks,
        transport=shape.transport,
        transport_reason=reason,
        num_transfers=len(src),
        max_degree=degree,
        num_rounds=num_rounds,
        num_stages=int(rounds.trips.sum()),
        memory_tokens_max=shape.plan_rows_per_rank,
        planning_seconds=0.0,
        **transfer_stats(
            config,
            shape.block_size,
            rank_pairs,
            src,
            dst,
            moved,
            num_rounds,
            shape.transport,
        ),
    )


def _worst(stats: list[PlanStats], planning_seconds: float) -> PlanStats:
    """The largest value of every figure over the rows."""
    values = {
        field.name: max(getattr(row, field.name) for row in stats)
        for field in dataclasses.fields(PlanStats)
    }
    return PlanStats(**values | {"planning_seconds": planning_seconds})
