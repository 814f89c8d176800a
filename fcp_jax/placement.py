"""Cutting segments and placing the blocks on ranks (paper: Block Distributor).

LPT (Graham 1969) over single blocks balances computation but strews every long segment over all
ranks, so that everybody sends to everybody. Here a segment lives in the smallest *window* that can
compute it: the ranks are cut into equal windows, those into smaller ones, down to single ranks.
Ranks of a window differ only in low digits, so `rounds.schedule` needs few rounds, and few ranks
pull a block. Longest segments come first; whatever would overload a rank is cut finer, and short
segments, whole on one rank, fill up what is left.
"""

import math

import numpy as np

from fcp_jax.ranks import (
    ANY_LOAD,
    Ranks,
    Run,
    Unit,
    halves,
    token_pairs,
    zigzag_pairs,
    zigzag_slots,
)
from fcp_jax.rounds import window_sizes
from fcp_jax.segments import Segments

LIMIT = 1.03
"""No rank gets more than this times its fair share of token pairs while any way around exists."""

_WHOLE = 0.3
"""A segment of at most this times a rank's fair share stays whole if some rank can take it."""

_FILLER = 0.02
"""Below this times a fair share a segment is never cut for balance: it fills up the last gaps."""

_PAIR = 0.9
"""A zigzag pair of blocks above this times a fair share is cut to fit one slot."""

_CUTS = 2
"""How often a unit that fits nowhere is halved."""


def place_windows(
    segments: Segments,
    num_ranks: int,
    block_size: int,
    num_slots: int,
    causal: bool,
    speeds: np.ndarray,
    *,
    even: float = 0.0,
    only_roomy: bool = False,
    tokens_per_rank: int | None = None,
) -> Ranks:
    """Cuts segments into blocks and gives each a rank.

    Args:
      segments: of at least one token each, num_ranks * num_slots * block_size together at most.
      num_ranks: ranks.
      block_size: rows a slot.
      num_slots: slots a rank.
      causal: whether queries see only what stands before them.
      speeds: float64 [num_ranks], relative speed of each rank.
      even: a window may be up to this times as wide as the longest segment's, in proportion to
        length. As computation grows with the square of length, the smallest windows give shorter
        segments' ranks less traffic for the same computation; 1 or more makes up for it.
      only_roomy: cut finer or take a wider window rather than one in which not every unit fits;
        else the units that do not fit go to the ranks around.
      tokens_per_rank: rows of the caller's layout on each rank: segments that stay whole prefer
        the rank that has them already, while it has less than its fair share.

    Returns:
      The ranks with everything placed; `Ranks.blocks` makes blocks of it.
    """
    ranks = Ranks(num_ranks, block_size, num_slots, causal, speeds)
    costs = token_pairs(np.zeros_like(segments.lengths), segments.lengths, segments.lengths, causal)
    fair = float(costs.sum()) / math.fsum(speeds)
    unplaced = int(segments.lengths.sum())
    longest = int(segments.lengths.max(initial=1))
    steepest = even * max(float(costs.max(initial=0)) / max(fair, 1.0), 1.0) / longest
    fillers = []
    for segment in np.argsort(-segments.lengths, kind="stable").tolist():
        length, cost = int(segments.lengths[segment]), int(costs[segment])
        run = (int(segments.starts[segment]), length)
        needed = -(-length // block_size)
        ranks.begin(segment, run)
        later = unplaced - length
        sliver = length <= block_size // 4  # not worth a transfer, whatever it does to balance
        small = sliver or cost <= _WHOLE * fair
        home = None if tokens_per_rank is None else (run[0] + length // 2) // tokens_per_rank
        if small and home is not None and ranks.take_at(home, run, fair):
            unplaced = later
        elif small and ranks.take_whole(run, ANY_LOAD if sliver else LIMIT * fair):
            unplaced = later
        elif cost < _FILLER * fair or ranks.tokens_left - needed * block_size < later:
            fillers.append((segment, run))
        else:
            units, window = _choose(ranks, run, cost, fair, steepest * length, only_roomy)
            _fill(ranks, units, window, fair, later)
            unplaced = later
    for segment, run in fillers:
        ranks.begin(segment, run)
        ranks.pour(run)
    return ranks


def _choose(
    ranks: Ranks, run: Run, cost: int, fair: float, width: float, only_roomy: bool
) -> tuple[list[Unit], tuple[int, int]]:
    """Returns the units to cut a segment into and the window (first rank, size) for them.

    Windows start from the smallest that can compute the segment, or the widest up to `width`. Of
    one size that with most room is taken, then that with least load, and traffic where there is a
    `width`.
    """
    num_ranks, needed = len(ranks.load), -(-run[1] // ranks.block_size)
    sizes = window_sizes(num_ranks)
    wanted = max(cost / fair, 1.25 * needed / max(int(ranks.free.max()), 1))
    smallest = next((size for size in sizes if size >= wanted), num_ranks)
    smallest = max([smallest, *(size for size in sizes if size <= width)])
    cuts = [zigzag_slots(run, needed)]
    if needed > 1 and 2 * cost <= _PAIR * fair * needed:
        cuts.insert(0, zigzag_pairs(run, needed))
    choices = [(size, units) for size in sizes if size >= smallest for units in cuts]
    for size, units in choices:
        missing = _missing(ranks, units, cost, fair, size)
        if not only_roomy or not missing.min():
            break
    else:
        size, units = choices[-1]
        missing = _missing(ranks, units, cost, fair, size)
    busy = ranks.load.reshape(-1, size).mean(axis=1) / fair
    if width:
        traffic = (ranks.received + ranks.sent).reshape(-1, size).mean(axis=1)
        busy += traffic / max(traffic.max(), 1.0)
    return units, (int(np.argmin(busy + 10.0 * missing)) * size, size)


def _missing(ranks: Ranks, units: list[Unit], cost: int, fair: float, size: int) -> np.ndarray:
    """The part of the units that does not fit within the limit, for every window of a size."""
    fits = np.floor((LIMIT * fair - ranks.load) * ranks.speeds * len(units) / cost + 1e-9)
    fits = np.minimum(fits, ranks.free // len(units[0])).clip(0).reshape(-1, size).sum(axis=1)
    return (len(units) - fits).clip(0) / len(units)


def _fill(
    ranks: Ranks, units: list[Unit], window: tuple[int, int], fair: float, later: int
) -> None:
    """Gives each unit to the least loaded rank of the window, which widens when it is full.

    Args:
      ranks: what is placed so far; changed.
      units: of one segment.
      window: first rank, number of ranks.
      fair: token pairs of a rank of speed 1.
      later: tokens of other segments that still need room.
    """
    first, size = window
    num_ranks = len(ranks.load)
    sizes = window_sizes(num_ranks)
    pending = [(unit, 0) for unit in reversed(units)]
    taken = []
    while pending:
        unit, cuts = pending.pop()
        unit_cost = ranks.cost(unit)
        while True:
            inside = slice(first, first + size)
            finish = ranks.load[inside] + unit_cost / ranks.speeds[inside]
            able = ranks.free[inside] >= len(unit)
            good = able & (finish <= LIMIT * fair)
            if good.any() or size == num_ranks:
                break
            size = sizes[sizes.index(size) + 1]
            first = first // size * size
        if good.any():
            rank = first + int(np.argmin(np.where(good, finish, np.inf)))
            ranks.reserve(rank, unit, unit_cost)
            taken.append((rank, unit))
        elif _may_halve(ranks, unit, cuts, pending, later):
            pending += [(half, cuts + (len(unit) == 1)) for half in halves(unit)]
        elif able.any():
            rank = first + int(np.argmin(np.where(able, finish, np.inf)))
            ranks.reserve(rank, unit, unit_cost)
            taken.append((rank, unit))
        elif len(unit) == 2:
            pending += [([slot], cuts) for slot in unit]
        else:
            for part in unit[0]:
                ranks.pour(part)
    if taken:
        taken = _neighbors(ranks, taken)
        ranks.put(taken)


def _neighbors(ranks: Ranks, taken: list[tuple[int, Unit]]) -> list[tuple[int, Unit]]:
    """Trades units that compute the same, so that each rank has neighbors.

    A rank pulls what stands before its last block: neighbors of a zigzag order need less of it.
    The rank that has received least, compared with what it sent, takes the outermost units.
    """
    result = []
    kinds: dict[tuple[int, int], list[tuple[int, Unit]]] = {}
    for rank, unit in taken:
        tokens = sum(length for slot in unit for _, length in slot)
        kinds.setdefault((len(unit), tokens.bit_length()), []).append((rank, unit))
    for members in kinds.values():
        units = sorted((unit for _, unit in members), key=lambda unit: -unit[-1][-1][0])
        order = sorted((int(ranks.received[rank] - ranks.sent[rank]), rank) for rank, _ in members)
        result += [(rank, unit) for (_, rank), unit in zip(order, units, strict=True)]
    return result


def _may_halve(ranks: Ranks, unit: Unit, cuts: int, pending: list, later: int) -> bool:
    if min(length for slot in unit for _, length in slot) < 2:
        return False
    if len(unit) == 2:  # two slots as before
        return True
    slots = 2 + sum(len(unit) for unit, _ in pending)
    return cuts < _CUTS and ranks.tokens_left >= slots * ranks.block_size + later
