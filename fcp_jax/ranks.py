"""Ranks while they are being filled: whole slots taken by units, and runs that share the others."""

import numpy as np

from fcp_jax.blocks import Blocks
from fcp_jax.leveling import Limits, SharedSegment, level_traffic

ANY_LOAD = float(np.finfo(float).max)
"""A limit that only a rank without room (whose load counts as infinite) exceeds."""

Run = tuple[int, int]
"""(first place, tokens)."""

Unit = list[list[Run]]
"""Slots that go to one rank together, each a list of runs."""


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
        self._units: list[tuple[int, list[tuple[int, Unit]]]] = []
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

    def put(self, taken: list[tuple[int, Unit]]) -> None:
        """Takes note of the units of the present segment, given as (rank, unit)."""
        self._units.append((self._segment, taken))
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

    def reserve(self, rank: int, unit: Unit, cost: int) -> None:
        """Keeps free slots of a rank for a unit."""
        self.load[rank] += cost / self.speeds[rank]
        self.free[rank] -= len(unit)
        self.room[rank] -= len(unit) * self.block_size

    def take_whole(self, run: Run, limit: float) -> bool:
        """Puts a run behind others on the least loaded rank with the room, if within the limit."""
        return self.take_at(
            int(np.argmin(np.where(self.room >= run[1], self.load, np.inf))), run, limit
        )

    def take_at(self, rank: int, run: Run, limit: float) -> bool:
        """Puts a run behind others on a rank, if there is room and its load stays in the limit."""
        finish = self.load[rank] + self.cost([[run]]) / self.speeds[rank]
        if self.room[rank] < run[1] or not finish <= limit:
            return False
        self.share(rank, run)
        return True

    def pour(self, run: Run) -> None:
        """Puts a run wherever there is room, in parts if no rank has enough."""
        if self.take_whole(run, ANY_LOAD):
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

    def level(self, aim: float, limits: Limits | None) -> None:
        """Lets units trade ranks, to even out traffic (see `leveling.level_traffic`)."""
        if not self.causal:  # everyone pulls everything, whoever holds what
            return
        shared = [SharedSegment(*zip(*taken, strict=True)) for _, taken in self._units]
        level_traffic(shared, len(self.load), aim, limits)
        for index, (each, (segment, taken)) in enumerate(zip(shared, self._units, strict=True)):
            ranks = each.members[each.owner].tolist()
            units = [
                [slot for half in halves(unit) for slot in half] if folded else unit
                for folded, (_, unit) in zip(each.folded.tolist(), taken, strict=True)
            ]
            self._units[index] = segment, list(zip(ranks, units, strict=True))

    def blocks(self) -> tuple[Blocks, np.ndarray]:
        """Returns (blocks, rank of each), rank after rank; shared runs lie end to end.

        No rank has more than num_slots blocks; the ranks are int64 [num_blocks].
        """
        rank_of: list[int] = []
        fragments: list[tuple[int, int, int, int]] = []
        slots_of: list[list[tuple[int, list[Run]]]] = [[] for _ in range(len(self.load))]
        for segment, taken in self._units:
            for rank, unit in taken:
                slots_of[rank] += [(segment, slot) for slot in unit]
        for rank, (slots, shared) in enumerate(zip(slots_of, self._shared, strict=True)):
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


def token_pairs(offset, length, segment_length, causal: bool):
    """Counts the visible pairs of queries [offset, offset + length) of a segment."""
    if causal:
        return length * offset + length * (length + 1) // 2
    return length * segment_length


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


def halves(unit: Unit) -> list[Unit]:
    """Cuts a unit into two that compute nearly the same, of one slot each."""
    runs = [run for slot in unit for run in slot]
    cuts = [_cut(run, 2) for run in runs]
    if len(runs) == 1:
        return [[[part]] for part in cuts[0]]
    (a, b), (c, d) = cuts
    return [[[a, d]], [[b, c]]]


def _cut(run: Run, count: int) -> list[Run]:
    edges = [run[0] + run[1] * i // count for i in range(count + 1)]
    return [(a, b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]
