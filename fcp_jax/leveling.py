"""Evening out traffic by trades that leave computation, memory and windows as they are.

Under a causal mask a rank pulls what stands before its last block of a segment. Units of a segment
that compute the same may trade ranks, and a rank's traffic follows from the outermost unit that it
holds. So a busy rank gives its outermost unit for an inner one, and a rank with little traffic
takes a unit from further out, off a rank that holds others as far out.

Where trades end, zigzag pairs are *folded*: two slots of one run each become two slots that hold
half of either run. That computes the same, but now both slots are pulled by whoever needs the first
half of one.

Traffic of others than the busiest costs no time. It is raised only as far as no rank sends,
receives or does both together more than the busiest did, and no round is added.
"""

from collections.abc import Callable, Sequence

import numpy as np

_FEWEST = 2
"""A segment of fewer units leaves nothing to trade."""

_ROUNDING = 4
"""Equal units may differ by this many tokens, as cuts are rounded."""

_TRIALS = 4
"""Trades that are tried for a rank before it stays as it is."""

_WORK = 2_000_000
"""Bound on trials, each of which counts 1000 and the entries of the matrix it looks at."""

Limits = Callable[[np.ndarray], np.ndarray]
"""From the slots that each rank (row) pulls from each other (column) to the most that it may."""


class SharedSegment:
    """A segment whose units lie on several ranks.

    Attributes:
      members: int64 [m], the ranks.
      owner: int64 [num_units], the position in `members` of each unit's rank.
      needs: int64 [num_units], how many slots, in order of place, a unit sees.
      trades: bool [num_units], units that compute the same and fill as many slots.
      folded: bool [num_units].
    """

    def __init__(self, ranks: Sequence[int], units: Sequence[list[list[tuple[int, int]]]]):
        """Takes the rank of each unit, and the runs of each of its slots."""
        self.members, self.owner = np.unique(ranks, return_inverse=True)
        slots = [(slot[0][0], index) for index, unit in enumerate(units) for slot in unit]
        self._first, self._unit = np.array(slots).T
        runs = [[run for slot in unit for run in slot] for unit in units]
        self._end = np.array([max(start + length for start, length in each) for each in runs])
        tokens = np.array([sum(length for _, length in each) for each in runs])
        counts = np.array([len(unit) for unit in units])
        usual = int(np.argmax(np.bincount(counts)))
        typical = np.median(tokens[counts == usual])
        self.trades = (counts == usual) & (np.abs(tokens - typical) <= _ROUNDING)
        self._pairs = usual == 2
        self.folded = np.zeros(len(units), bool)
        self._sort()

    def _sort(self) -> None:
        order = np.argsort(self._first, kind="stable")
        self._first, self._unit = self._first[order], self._unit[order]
        self.needs = self._first.searchsorted(self._end)
        self._last = np.empty_like(self.needs)
        self._last[self._unit] = np.arange(len(order))

    def pulled(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns (slots each member sees, slots each (row) pulls from each other).

        Shapes int64 [m] and int32 [m, m].
        """
        reach = np.zeros(len(self.members), np.int64)
        np.maximum.at(reach, self.owner, self.needs)
        held = np.zeros((len(self._unit) + 1, len(self.members)), np.int32)
        held[np.arange(1, len(held)), self.owner[self._unit]] = 1
        pulled = held.cumsum(axis=0, dtype=np.int32)[reach]
        np.fill_diagonal(pulled, 0)
        return reach, pulled

    def swap(self, a: int, b: int) -> None:
        """Lets two units trade ranks."""
        self.owner[a], self.owner[b] = self.owner[b], self.owner[a]

    def fold(self, unit: int) -> None:
        """Makes both slots of a pair begin in its first run."""
        self._keep = self._first, self._unit
        first = self._first.copy()
        own = np.flatnonzero(self._unit == unit)
        first[own[1]] = first[own[0]] + 1
        self._first, self.folded[unit] = first, True
        self._sort()

    def unfold(self, unit: int) -> None:
        """Undoes the last `fold`."""
        self._first, self._unit = self._keep
        self.folded[unit] = False
        self._sort()

    def reorder(self, lead: np.ndarray) -> None:
        """Gives the outermost units to the members with the least lead, float64 [m]."""
        units = np.flatnonzero(self.trades)
        outer = units[np.argsort(-self.needs[units], kind="stable")]
        owner = self.owner[units]
        self.owner[outer] = owner[np.lexsort((owner, lead[owner]))]

    def folds(self, member: int, reach: np.ndarray) -> list[tuple[int, int]]:
        """Lists (slots more that the member sends, unit) of its pairs."""
        if not self._pairs:
            return []
        own = ((self.owner == member) & self.trades & ~self.folded).nonzero()[0].tolist()
        return [(int((reach <= self._last[unit]).sum()), unit) for unit in own]


class _Leveler:
    """The traffic of all ranks, kept up to date while units trade."""

    def __init__(self, segments: list[SharedSegment], num_ranks: int, limits: Limits | None):
        self.segments = segments
        self.pulled = np.zeros((num_ranks, num_ranks), np.int32)
        self.reaches, self.parts = map(
            list, zip(*(each.pulled() for each in segments), strict=True)
        )
        for segment, part in zip(segments, self.parts, strict=True):
            self.pulled[np.ix_(segment.members, segment.members)] += part
        self.received, self.sent = self.pulled.sum(1), self.pulled.sum(0)
        self.of_rank: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        for index, segment in enumerate(segments):
            if len(segment.owner) >= _FEWEST:
                for member, rank in enumerate(segment.members.tolist()):
                    self.of_rank[rank].append((index, member))
        self.work = 0
        self._reorder()
        self.allowed = None if limits is None else limits(self.pulled)
        self.widest = int(max(self.received.max(), self.sent.max()))

    @property
    def traffic(self) -> np.ndarray:
        return self.received + self.sent

    def _update(self, index: int, reach: np.ndarray, part: np.ndarray) -> None:
        members, old = self.segments[index].members, self.parts[index]
        self.pulled[np.ix_(members, members)] += part - old
        self.received[members] += part.sum(1) - old.sum(1)
        self.sent[members] += part.sum(0) - old.sum(0)
        self.reaches[index], self.parts[index] = reach, part

    def _reorder(self) -> None:
        """Gives the outermost units, which receive most, to ranks that send most."""
        for index, segment in enumerate(self.segments):
            members, part, owner = segment.members, self.parts[index], segment.owner.copy()
            received = self.received[members] - part.sum(1)
            sent = self.sent[members] - part.sum(0)
            segment.reorder(received - sent)
            reach, new = segment.pulled()
            before = self.received[members] ** 2 + self.sent[members] ** 2
            after = (received + new.sum(1)) ** 2 + (sent + new.sum(0)) ** 2
            if after.sum() < before.sum():
                self._update(index, reach, new)
            else:
                segment.owner = owner

    def accept(self, index: int, most: int, lowered: int = -1) -> bool:
        """Takes over a changed segment, if no rank gets more than `most` or needs a new round.

        With `lowered`, that rank must end below `most`, and fewer ranks reach it than before.
        """
        segment, old = self.segments[index], self.parts[index]
        members, (reach, new) = segment.members, segment.pulled()
        self.work += new.size + 1000
        received = self.received[members] + (new.sum(1) - old.sum(1))
        sent = self.sent[members] + (new.sum(0) - old.sum(0))
        traffic, before = received + sent, self.traffic[members]
        if traffic.max() > most or max(received.max(), sent.max()) > self.widest:
            return False
        if lowered >= 0:
            if (traffic == most).sum() >= (before == most).sum():
                return False
            if traffic[np.searchsorted(members, lowered)] >= most:
                return False
        elif traffic.sum() <= before.sum():
            return False
        if self.allowed is not None:
            square = np.ix_(members, members)
            if ((new > old) & (self.pulled[square] + (new - old) > self.allowed[square])).any():
                return False
        self._update(index, reach, new)
        return True

    def lower(self, rank: int) -> bool:
        """Gives the outermost unit of a rank for an inner one of a rank with less traffic."""
        traffic = self.traffic
        most = int(traffic[rank])
        for index, member in self.of_rank[rank]:
            segment = self.segments[index]
            own = np.flatnonzero((segment.owner == member) & segment.trades)
            if not len(own):
                continue
            mine = int(own[np.argmax(segment.needs[own])])
            theirs = traffic[segment.members[segment.owner]]
            inner = (segment.needs < segment.needs[mine]) & segment.trades
            others = np.flatnonzero(inner & (theirs < 0.95 * most))
            others = others[np.argsort(theirs[others], kind="stable")][:_TRIALS]
            for other in others.tolist():
                segment.swap(mine, other)
                if self.accept(index, most, rank):
                    return True
                segment.swap(mine, other)
        return False

    def lift(self, rank: int, most: int) -> bool:
        """Makes a rank send or receive more, by about what it lacks."""
        lacks = min(most - int(self.traffic[rank]), self.widest - int(self.received[rank]))
        options = []
        for index, member in self.of_rank[rank]:
            segment, reach = self.segments[index], self.reaches[index]
            more = segment.needs - reach[member]
            outer = (more > 0) & (more <= lacks) & segment.trades
            others = (outer & (segment.needs < reach[segment.owner])).nonzero()[0]
            if len(others):
                own = ((segment.owner == member) & segment.trades).nonzero()[0]
                if len(own):
                    other = int(others[more[others].argmax()])
                    mine = int(own[segment.needs[own].argmin()])
                    options.append((int(more[other]), index, mine, other))
        for _, index, mine, other in sorted(options, reverse=True)[:_TRIALS]:
            self.segments[index].swap(mine, other)
            if self.accept(index, most):
                return True
            self.segments[index].swap(mine, other)
        lacks = most - int(self.traffic[rank])
        folds = [
            (more, index, unit)
            for index, member in self.of_rank[rank]
            for more, unit in self.segments[index].folds(member, self.reaches[index])
            if 0 < more <= lacks
        ]
        for _, index, unit in sorted(folds, reverse=True)[:_TRIALS]:
            self.segments[index].fold(unit)
            if self.accept(index, most):
                return True
            self.segments[index].unfold(unit)
        return False


def level_traffic(
    segments: list[SharedSegment], num_ranks: int, aim: float, limits: Limits | None = None
) -> None:
    """Trades and folds units until the mean traffic of a rank is `aim` times the most, or no more.

    Args:
      segments: changed in place.
      num_ranks: ranks.
      aim: at most 1.
      limits: what keeps the number of rounds.
    """
    if not segments:
        return
    leveler = _Leveler(segments, num_ranks, limits)
    while leveler.lower(int(np.argmax(leveler.traffic))):
        pass
    most = int(leveler.traffic.max())
    stuck = np.zeros(num_ranks, bool)
    while leveler.work < _WORK and not stuck.all() and leveler.traffic.mean() < aim * most:
        rank = int(np.argmin(np.where(stuck, most + 1, leveler.traffic)))
        stuck[rank] = not leveler.lift(rank, most)
