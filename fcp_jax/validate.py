"""Proof, from the tables alone, that a plan computes the attention it was made for.

A kernel computes every visible token pair of each block pair it is given, and what a token sees
follows from its place. So a plan is right when every token lies in exactly one block, every block
pair that holds a visible token pair is in exactly one work list, and the keys and values of a work
list are on the rank, in the buffer of that very stage, when it runs.
"""

import numpy as np

from fcp_jax.blocks import Blocks, block_pairs
from fcp_jax.plan import TABLES, Plan
from fcp_jax.rounds import occurrence, permutation
from fcp_jax.tables import fragment_blocks, work_items


class InvalidPlanError(ValueError):
    """A plan breaks an invariant; the message says which, and where."""


def validate_plan(plan: Plan) -> None:
    """Checks every invariant of a plan.

    1. Tokens: fragments tile each segment, in blocks inside the slots, without overlap.
    2. Matchings: a round has each rank at most once as sender and once as receiver, and what one
       rank sends is what the other expects.
    3. Buffers: a stage reads only what its own rounds bring, and runs within the trip counts.
    4. Completeness: every (query, kv) token pair of the mask is computed exactly once.
    5. Dispatch: every token that changes rank travels exactly once, there and back.

    Args:
      plan: tables on host.

    Raises:
      InvalidPlanError: naming the broken invariant.
    """
    _check_table_shapes(plan)
    for row in range(plan.shape.num_rows):
        blocks = _check_fragments(plan, row)
        _check_rounds(plan, row)
        _check_pairs(plan, row, blocks)
        _check_dispatch(plan, row, blocks)


def _require(condition, message: str) -> None:
    if not condition:
        raise InvalidPlanError(message)


def _check_table_shapes(plan: Plan) -> None:
    shape = plan.shape
    fragments, stages, local_items, items, dispatch_stages = plan.table_sizes
    lead = (shape.num_rows, shape.num_ranks)
    width = max((len(group) for group in shape.groups), default=1)
    dispatch_width = max((len(group) for group in shape.dispatch_groups), default=1)
    expected = {
        "trips": (len(shape.groups),),
        "dispatch_trips": (len(shape.dispatch_groups),),
        "send_slot": (*lead, stages, width),
        "recv_block": (*lead, stages, width),
        "local_row_starts": (*lead, shape.num_slots + 1),
        "local_columns": (*lead, local_items),
        "stage_row_starts": (*lead, stages, shape.num_slots + 1),
        "stage_columns": (*lead, stages, items),
        "dispatch_send": (*lead, dispatch_stages, dispatch_width, 2),
        "dispatch_recv": (*lead, dispatch_stages, dispatch_width, 2),
    }
    for name in TABLES:
        table = getattr(plan, name)
        want = expected.get(name, (shape.num_rows, fragments))
        _require(
            table.dtype == np.int32 and table.shape == want,
            f"table {name} must be int32 {want}, got {table.dtype} {table.shape}",
        )
    for name, size in (("trips", stages), ("dispatch_trips", dispatch_stages)):
        trips = getattr(plan, name)
        _require((trips >= 0).all(), f"{name} must not be negative")
        _require(trips.sum() <= size, f"{name} run {trips.sum()} stages, tables hold {size}")
        _require(shape.transport != "static" or (trips == 1).all(), f"static {name} must all be 1")


def _check_fragments(plan: Plan, row: int) -> Blocks:
    shape = plan.shape
    size = shape.block_size
    real = plan.fragment_length[row] > 0
    first, start, length, lo, hi = (
        getattr(plan, f"fragment_{name}")[row].astype(np.int64)
        for name in ("row", "start", "length", "lo", "hi")
    )
    _require((np.diff(first) >= 0).all(), "fragments must ascend by plan row")
    _require(not real[int(real.sum()) :].any(), "padding fragments must come last")
    _require(
        (start[~real] >= shape.num_ranks * shape.tokens_per_rank).all(),
        "padding fragments must lie past every place",
    )
    first, start, length, lo, hi = (x[real] for x in (first, start, length, lo, hi))
    capacity = shape.num_ranks * shape.plan_rows_per_rank
    _require(
        (first >= 0).all() and (first + length <= capacity).all(),
        f"slot capacity: a fragment lies outside the {shape.num_slots} slots a rank",
    )
    _require((first // size == (first + length - 1) // size).all(), "a fragment spans two blocks")
    _require((first[1:] >= (first + length)[:-1]).all(), "two fragments share a plan row")
    by_place = np.lexsort((start, lo))
    begin, end = start[by_place], (start + length)[by_place]
    new = np.diff(lo[by_place], prepend=-1) > 0
    last = np.append(new[1:], True)[: len(new)]
    _require((begin[new] == lo[by_place][new]).all(), "a segment's first token is in no block")
    _require((begin[~new] == end[:-1][~new[1:]]).all(), "a segment is not tiled by its fragments")
    _require((end[last] == hi[by_place][last] + 1).all(), "a segment's last token is in no block")
    same_segment = ~new[1:]
    _require(
        (hi[by_place][1:] == hi[by_place][:-1])[same_segment].all(),
        "fragments disagree on a segment",
    )
    _require(
        (begin >= 0).all()
        and (end <= shape.num_ranks * shape.tokens_per_rank).all()
        and (begin[1:] >= end[:-1]).all(),
        "segments overlap or leave the caller's layout",
    )
    return fragment_blocks(plan, row)


def _round_tables(plan: Plan, groups, trips, sources: np.ndarray):
    """Yields (stage, position at the sender, at the receiver, senders, receivers), for one row.

    Once for every round that runs; for "ragged" once a stage, from the sources [N, K, G] of what
    the ranks receive.
    """
    shape = plan.shape
    if shape.transport == "ragged":
        ordered = np.where(sources < 0, shape.num_ranks, sources)
        _require((np.diff(ordered) >= 0).all(), "a ragged stage is not in order of source")
        for stage in range(int(trips.sum())):
            dst, position = np.nonzero(sources[:, stage] >= 0)
            src = sources[dst, stage, position]
            yield stage, occurrence(src), position, src, dst
        return
    stage = 0
    for rounds, times in zip(groups, trips, strict=True):
        pairs = [
            np.array(permutation(shape.transport, round_, shape.num_ranks)).reshape(-1, 2)
            for round_ in rounds
        ]
        for _ in range(int(times)):
            for position, pair in enumerate(pairs):
                yield stage, position, position, pair[:, 0], pair[:, 1]
            stage += 1


def _own_pairs(plan: Plan, row: int, src: np.ndarray, dst: np.ndarray):
    """The pairs of one row; static rounds number the ranks of all rows through."""
    if plan.shape.transport != "static":
        return src, dst
    ranks = plan.shape.num_ranks
    _require((src // ranks == dst // ranks).all(), "a static round crosses rows")
    mine = src // ranks == row
    return src[mine] % ranks, dst[mine] % ranks


def _check_rounds(plan: Plan, row: int) -> None:
    shape = plan.shape
    slots, block = plan.send_slot[row], plan.recv_block[row]
    _require(((slots >= -1) & (slots < shape.num_slots)).all(), "send_slot names no slot")
    expected = np.full_like(block, -1)
    carried = np.full_like(slots, -1)
    sources = np.where(block < 0, -1, block // shape.num_slots)
    _require((sources < shape.num_ranks).all(), "recv_block names no block")
    rounds = _round_tables(plan, shape.groups, plan.trips, sources)
    for stage, leaving, position, src, dst in rounds:
        src, dst = _own_pairs(plan, row, src, dst)
        _require(
            shape.transport == "ragged"
            or (len(np.unique(src)) == len(src) and len(np.unique(dst)) == len(dst)),
            f"round {position} of stage {stage} is not a matching",
        )
        _require(np.max(leaving, initial=0) < slots.shape[2], "a rank is to send too much at once")
        sent = slots[src, stage, leaving]
        carried[src, stage, leaving] = sent
        expected[dst, stage, position] = np.where(sent < 0, -1, src * shape.num_slots + sent)
    _require((carried == slots).all(), "a rank is to send in a round in which it has no receiver")
    wrong = np.argwhere(expected != block)
    if len(wrong):
        rank, stage, position = wrong[0]
        raise InvalidPlanError(
            f"rank {rank} expects block {block[rank, stage, position]} in round {position} of "
            f"stage {stage}, but block {expected[rank, stage, position]} arrives"
        )


def _check_pairs(plan: Plan, row: int, blocks: Blocks) -> None:
    shape = plan.shape
    ranks, slots = shape.num_ranks, shape.num_slots
    for name in ("local_row_starts", "stage_row_starts"):
        row_starts = getattr(plan, name)[row]
        _require(
            (row_starts[..., 0] == 0).all() and (np.diff(row_starts, axis=-1) >= 0).all(),
            f"{name} must ascend from 0",
        )
        size = getattr(plan, name.replace("row_starts", "columns")).shape[-1]
        _require((row_starts[..., -1] <= size).all(), f"{name} end past the columns")
    items = work_items(plan, row)
    local = items.stage < 0
    _require((items.column >= 0).all(), "a work list names a negative column")
    _require((items.column[local] < slots).all(), "a local work list names no slot")
    _require((items.stage < plan.trips.sum()).all(), "a work list is of a stage that never runs")
    width = plan.send_slot.shape[3]
    _require((items.column[~local] < width + slots).all(), "a work list reads past its buffers")
    _require((items.kv_block >= 0).all(), "a work list reads a buffer in which nothing arrived")
    num_blocks = ranks * slots
    keys = items.query_block * num_blocks + items.kv_block
    computed, counts = np.unique(keys, return_counts=True)
    if (counts > 1).any():
        _fail_pair("computed more than once", computed[counts > 1][0], num_blocks)
    wanted_query, wanted_kv = block_pairs(blocks, shape.causal)
    wanted = wanted_query * num_blocks + wanted_kv
    missing = np.setdiff1d(wanted, computed, assume_unique=True)
    if len(missing):
        _fail_pair("never computed", missing[0], num_blocks)
    extra = np.setdiff1d(computed, wanted, assume_unique=True)
    if len(extra):
        _fail_pair("computed, but the mask hides all of it", extra[0], num_blocks)


def _fail_pair(what: str, key: int, num_blocks: int) -> None:
    raise InvalidPlanError(
        f"the pair (query block {key // num_blocks}, kv block {key % num_blocks}) is {what}"
    )


def _check_dispatch(plan: Plan, row: int, blocks: Blocks) -> None:
    shape = plan.shape
    ranks, tokens, size = shape.num_ranks, shape.tokens_per_rank, shape.block_size
    begin, end = blocks.start, blocks.start + blocks.length
    moved = np.zeros((ranks, ranks), np.int64)
    for src in range(ranks):
        overlap = np.minimum(end, (src + 1) * tokens) - np.maximum(begin, src * tokens)
        dst = blocks.block // shape.num_slots
        moved[src] += np.bincount(dst, np.maximum(overlap, 0), ranks).astype(np.int64)
    np.fill_diagonal(moved, 0)

    chunks: list[tuple[int, int, int]] = []
    sends, receives = plan.dispatch_send[row], plan.dispatch_recv[row]
    used = np.zeros((2, *sends.shape[:3]), bool)
    rounds = _round_tables(plan, shape.dispatch_groups, plan.dispatch_trips, receives[..., 0])
    for stage, leaving, position, src, dst in rounds:
        src, dst = _own_pairs(plan, row, src, dst)
        _require(np.max(leaving, initial=0) < sends.shape[2], "dispatch sends too much at once")
        used[0, src, stage, leaving] = used[1, dst, stage, position] = True
        sent, received = sends[src, stage, leaving], receives[dst, stage, position]
        travels = sent[:, 0] >= 0
        _require((sent[travels, 0] == dst[travels]).all(), "dispatch sends to another rank")
        _require(
            (received[:, 0] == np.where(travels, src, -1)).all()
            and (received[:, 1] == sent[:, 1]).all(),
            f"dispatch round {position} of stage {stage}: sender and receiver disagree",
        )
        chunks += zip(
            src[travels].tolist(), dst[travels].tolist(), sent[travels, 1].tolist(), strict=True
        )
    _require((sends[..., 0][~used[0]] == -1).all(), "dispatch sends outside every round")
    _require((receives[..., 0][~used[1]] == -1).all(), "dispatch receives outside every round")
    wanted = [
        (int(s), int(d), c)
        for s, d in np.argwhere(moved)
        for c in range(-(-int(moved[s, d]) // size))
    ]
    _require(sorted(chunks) == sorted(wanted), "dispatch does not move every token exactly once")
