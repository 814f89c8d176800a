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

from fcp_jax.blocks import Blocks
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

_ANY = float(np.finfo(float).max)
"""A limit that only a rank without room (whose load counts as infinite) exceeds."""

Run = tuple[int, int]
"""(first place, tokens)."""

Unit = list[list[Run]]
"""Slots that go to one rank together, each a list of runs."""


def place_windows(
    segments: Segments,
    num_ranks: int,
    block_size: int,
    num_slots: int,
    causal: bool,
    speeds: np.ndarray,
    *,
    spread: float = 1.0,
    only_roomy: bool = False,
    level: bool = False,
) -> tuple[Blocks, np.ndarray]:
    """Cuts segments into blocks and gives each a rank.

    Args:
      segments: of at least one token each, num_ranks * num_slots * block_size together at most.
      num_ranks: ranks.
      block_size: rows a slot.
      num_slots: slots a rank.
      causal: whether queries see only what stands before them.
      speeds: float64 [num_ranks], relative speed of each rank.
      spread: a window must compute its segment in 1 / spread of the mean time of a rank. More
        costs traffic and evens it out.
      only_roomy: cut finer or take a wider window rather than one in which not every unit fits;
        else the units that do not fit go to the ranks around.
      level: share segments that could stay whole among ranks that lack traffic, so that all send
        and receive as much as the busiest.

    Returns:
      (blocks, rank): no rank holds more than num_slots blocks; rank is int64 [num_blocks].
    """
    ranks = Ranks(num_ranks, block_size, num_slots, causal, speeds)
    costs = token_pairs(np.zeros_like(segments.lengths), segments.lengths, segments.lengths, causal)
    fair = float(costs.sum()) / math.fsum(speeds)
    unplaced = int(segments.lengths.sum())
    fillers = []
    for segment in np.argsort(-segments.lengths, kind="stable").tolist():
        length, cost = int(segments.lengths[segment]), int(costs[segment])
        run = (int(segments.starts[segment]), length)
        needed = -(-length // block_size)
        ranks.begin(segment, run)
        later = unplaced - length
        sliver = length <= block_size // 4  # not worth a transfer, whatever it does to balance
        small = sliver or cost <= _WHOLE * fair
        if small and level and needed > 1 and _level(ranks, run, cost, fair, later):
            unplaced = later
        elif small and ranks.take_whole(run, _ANY if sliver else LIMIT * fair):
            unplaced = later
        elif cost < _FILLER * fair or ranks.tokens_left - needed * block_size < later:
            fillers.append((segment, run))
        else:
            units, window = _choose(ranks, run, cost, fair, spread, only_roomy)
            _fill(ranks, units, window, fair, later)
            unplaced = later
    for segment, run in fillers:
        ranks.begin(segment, run)
        ranks.pour(run)
    return ranks.blocks()


def token_pairs(offset, length, segment_length, causal: bool):
    """Counts the visible pairs of queries [offset, offset + length) of a segment."""
    if causal:
        return length * offset + length * (length + 1) // 2
    return length * segment_length


def window_sizes(num_ranks: int) -> list[int]:
    """Returns nested window sizes, 1 to num_ranks: each divides the next, by a prime."""
    sizes, left, factor = [1], num_ranks, 2
    while left > 1:
        while left % factor == 0:
            sizes.append(sizes[-1] * factor)
            left //= factor
        factor += 1
    return sizes


class Ranks:
    """What is on each rank so far: whole slots taken by units, and runs that share the others.

    Attributes:
      load: float64 [num_ranks], token pairs over speed.
      free: int64 [num_ranks], slots with nothing in them.
      room: int64 [num_ranks], rows that shared runs may still fill.
      received: int64 [num_ranks], slots pulled for units, as far as known.
      sent: int64 [num_ranks], slots of units that others pull.
    """

    def __init__(
        self, num_ranks: int, block_size: int, num_slots: int, causal: bool, speeds: np.ndarray
    ):
        """Starts with empty ranks; arguments as in `place_windows`."""
        self.block_size = block_size
        self.causal = causal
        self.speeds = speeds
        self.load = np.zeros(num_ranks)
        self.free = np.full(num_ranks, num_slots)
        self.room = np.full(num_ranks, num_slots * block_size)
        self.received = np.zeros(num_ranks, np.int64)
        self.sent = np.zeros(num_ranks, np.int64)
        self._slots: list[list[tuple[int, list[Run]]]] = [[] for _ in range(num_ranks)]
        self._shared: list[list[tuple[int, Run]]] = [[] for _ in range(num_ranks)]

    @property
    def tokens_left(self) -> int:
        """Rows that are still free on all ranks together."""
        return int(self.room.sum())

    def begin(self, segment: int, run: Run) -> None:
        """Says which segment the runs to come belong to."""
        self._segment = segment
        self._start, self._length = run

    def cost(self, unit: Unit) -> int:
        """Returns the token pairs of a unit of the present segment."""
        return sum(
            token_pairs(start - self._start, length, self._length, self.causal)
            for slot in unit
            for start, length in slot
        )

    def add_traffic(self, taken: list[tuple[int, Unit]]) -> None:
        """Counts the transfers among the slots of one segment, given as (rank, unit)."""
        slots = [(rank, slot) for rank, unit in taken for slot in unit]
        rank_of = np.array([rank for rank, _ in slots])
        first = np.array([min(start for start, _ in slot) for _, slot in slots])
        end = np.array([max(start + length for start, length in slot) for _, slot in slots])
        seen = np.zeros(len(self.load), np.int64)
        np.maximum.at(seen, rank_of, end)
        ranks = np.unique(rank_of)
        if not self.causal:
            seen[ranks] = self._start + self._length
        owned = np.bincount(rank_of, minlength=len(self.load))[ranks]
        self.received[ranks] += np.searchsorted(np.sort(first), seen[ranks]) - owned
        pulled_by = len(ranks) - np.searchsorted(np.sort(seen[ranks]), first, side="right")
        np.add.at(self.sent, rank_of, pulled_by - 1)

    def put(self, rank: int, unit: Unit) -> None:
        """Puts a unit into slots that are reserved for it or its like."""
        self._slots[rank] += [(self._segment, slot) for slot in unit]

    def reserve(self, rank: int, unit: Unit, cost: int) -> None:
        """Keeps free slots of a rank for a unit."""
        self.load[rank] += cost / self.speeds[rank]
        self.free[rank] -= len(unit)
        self.room[rank] -= len(unit) * self.block_size

    def take_whole(self, run: Run, limit: float) -> bool:
        """Puts a run behind others on the least loaded rank with the room, if within the limit."""
        finish = np.where(self.room >= run[1], self.load, np.inf)
        rank = int(np.argmin(finish))
        if not finish[rank] + self.cost([[run]]) / self.speeds[rank] <= limit:
            return False
        self.share(rank, run)
        return True

    def pour(self, run: Run) -> None:
        """Puts a run wherever there is room, in parts if no rank has enough."""
        if self.take_whole(run, _ANY):
            return
        start, length = run
        while length:
            rank = int(np.argmax(self.room))
            part = min(length, int(self.room[rank]))
            self.share(rank, (start, part))
            start, length = start + part, length - part

    def share(self, rank: int, run: Run) -> None:
        """Puts a run behind the other shared ones of a rank."""
        self.load[rank] += self.cost([[run]]) / self.speeds[rank]
        self.room[rank] -= run[1]
        self.free[rank] = self.room[rank] // self.block_size
        self._shared[rank].append((self._segment, run))

    def blocks(self) -> tuple[Blocks, np.ndarray]:
        """Returns (blocks, rank of each), rank after rank; shared runs lie end to end."""
        rank_of: list[int] = []
        fragments: list[tuple[int, int, int, int]] = []
        for rank, (slots, shared) in enumerate(zip(self._slots, self._shared, strict=True)):
            for segment, runs in slots:
                fragments += [(len(rank_of), *run, segment) for run in runs if run[1]]
                rank_of.append(rank)
            used = 0
            for segment, (start, length) in shared:
                while length:
                    if used % self.block_size == 0:
                        rank_of.append(rank)
                    part = min(length, self.block_size - used % self.block_size)
                    fragments.append((len(rank_of) - 1, start, part, segment))
                    start, length, used = start + part, length - part, used + part
        table = np.array(fragments, np.int64).reshape(-1, 4).T
        return Blocks.from_fragments(self.block_size, *table), np.array(rank_of, np.int64)


def _choose(
    ranks: Ranks, run: Run, cost: int, fair: float, spread: float, only_roomy: bool
) -> tuple[list[Unit], tuple[int, int]]:
    """Returns the units to cut a segment into and the window (first rank, size) for them."""
    num_ranks, needed = len(ranks.load), -(-run[1] // ranks.block_size)
    sizes = window_sizes(num_ranks)
    wanted = max(spread * cost / fair, 1.25 * needed / max(int(ranks.free.max()), 1))
    smallest = next((size for size in sizes if size >= wanted), num_ranks)
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
    return units, (int(np.argmin(busy + 10.0 * missing)) * size, size)


def _level(ranks: Ranks, run: Run, cost: int, fair: float, later: int) -> bool:
    """Shares a segment among ranks that send and receive less than the busiest, if there are."""
    needed = -(-run[1] // ranks.block_size)
    if ranks.tokens_left - needed * ranks.block_size < later:
        return False
    traffic, larger = ranks.received + ranks.sent, np.maximum(ranks.received, ranks.sent)
    lacking = np.minimum(traffic.max() - traffic, 1.5 * (larger.max() - larger))
    for size in reversed(window_sizes(len(ranks.load))):
        if size == 1 or 2 * size > max(needed, 4):
            continue
        units = zigzag_pairs(run, needed) if needed >= 2 * size else zigzag_slots(run, needed)
        per_rank = -(-len(units) // size)
        able = (
            (lacking >= (3 * needed) // 2)
            & (ranks.free >= per_rank * len(units[0]))
            & (ranks.load + cost * per_rank / len(units) / ranks.speeds <= LIMIT * fair)
        )
        open_ = able.reshape(-1, size).all(axis=1)
        if open_.any():
            least = np.where(open_, lacking.reshape(-1, size).min(axis=1), -1)
            _fill(ranks, units, (int(np.argmax(least)) * size, size), fair, later)
            return True
    return False


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
            pending += [(half, cuts + (len(unit) == 1)) for half in _halves(unit)]
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
        for rank, unit in taken:
            ranks.put(rank, unit)
        ranks.add_traffic(taken)


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


def zigzag_pairs(run: Run, count: int) -> list[Unit]:
    """Cuts a run into `count` equal blocks; blocks i and count-1-i form a unit of two slots.

    Under a causal mask all such units of a segment compute, and send plus receive, the same.
    """
    slots = [[part] for part in _cut(run, count)]
    units = [[slots[i], slots[-1 - i]] for i in range(count // 2)]
    return units + [[slots[count // 2]]] * (count % 2)


def zigzag_slots(run: Run, count: int) -> list[Unit]:
    """Cuts a run into `count` slots that compute the same: parts i and 2*count-1-i share one."""
    parts = _cut(run, 2 * count)
    return [[[parts[i], parts[-1 - i]]] for i in range(count)]


def _cut(run: Run, count: int) -> list[Run]:
    edges = [run[0] + run[1] * i // count for i in range(count + 1)]
    return [(a, b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _halves(unit: Unit) -> list[Unit]:
    """Cuts a unit into two that compute nearly the same, of one slot each."""
    runs = [run for slot in unit for run in slot]
    cuts = [_cut(run, 2) for run in runs]
    if len(runs) == 1:
        return [[[part]] for part in cuts[0]]
    (a, b), (c, d) = cuts
    return [[[a, d]], [[b, c]]]


def _may_halve(ranks: Ranks, unit: Unit, cuts: int, pending: list, later: int) -> bool:
    if min(length for slot in unit for _, length in slot) < 2:
        return False
    if len(unit) == 2:  # two slots as before
        return True
    slots = 2 + sum(len(unit) for unit, _ in pending)
    return cuts < _CUTS and ranks.tokens_left >= slots * ranks.block_size + later
