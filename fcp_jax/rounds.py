"""From transfers to rounds: when each block travels, and through which permutation.

A round is a matching: every rank sends at most one payload and receives at most one. The rounds of
a stage, up to `coalesce` of them, are in flight together while the previous stage computes. Stages
that run the same permutations form a group, which is one loop body in the compiled program.
"""

import dataclasses

import numpy as np

from fcp_jax.edge_coloring import color_edges

Round = int | tuple[tuple[int, int], ...]
"""A shift s of the "xor" or "shift" family, the (src, dst) pairs of a static round, or the place
of a round in a "ragged" stage, which may be any matching. From num_ranks on, a "shift" round
num_ranks + s adds s digit by digit (see `window_sizes`), without carry."""


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The place of each transfer: round `position` of trip `turn` through group `group`.

    In a "ragged" stage each rank numbers what it sends and what it receives on its own.

    Attributes:
      group: int64 [num_transfers].
      turn: int64 [num_transfers].
      position: int64 [num_transfers], at the receiver.
      send_position: int64 [num_transfers], at the sender.
      groups: the rounds of each group.
      trips: int64 [num_groups], how often each group runs; always 1 for "static".
    """

    group: np.ndarray
    turn: np.ndarray
    position: np.ndarray
    send_position: np.ndarray
    groups: tuple[tuple[Round, ...], ...]
    trips: np.ndarray

    @property
    def num_rounds(self) -> int:
        """Permutes that run, empty ones included."""
        return sum(int(t) * len(g) for t, g in zip(self.trips, self.groups, strict=True))

    def stage(self, trips: np.ndarray) -> np.ndarray:
        """Returns the stage of each transfer when groups run `trips` times each."""
        return (np.cumsum(trips) - trips)[self.group] + self.turn


def max_degree(src: np.ndarray, dst: np.ndarray) -> int:
    """Returns the most transfers that one rank sends or receives (Delta of the multigraph)."""
    return int(max(np.bincount(src).max(), np.bincount(dst).max())) if len(src) else 0


def schedule(
    src: np.ndarray,
    dst: np.ndarray,
    num_ranks: int,
    transport: str,
    coalesce: int,
    by_distance: bool = False,
    work: np.ndarray | None = None,
) -> Schedule:
    """Assigns transfers to rounds.

    Args:
      src: int64 [num_transfers], sending rank.
      dst: int64 [num_transfers], receiving rank, never the sender.
      num_ranks: ranks.
      transport: "static" colors the edges of the bipartite multigraph, which takes exactly
        max-degree rounds (König 1916; paper: Communication Planner). "xor" and "shift" run the
        permutations i -> i ^ s and i -> i + s, each group of them as often as its busiest (rank, s)
        needs. "ragged" makes stages of `coalesce` colors each, in which a rank
        orders what it sends by destination and what it receives by source.
      coalesce: most rounds a stage.
      by_distance: see `shift_groups`; "shift" then adds digit by digit, so that the ranks of a
        window reach each other by the s below its size, as they do with "xor".
      work: float [num_transfers], what its receiver computes with each payload. Given, the stages
        of a rank get about equal work, as far as the rounds leave a choice: a rank that has more
        to do in some stage than others keeps all waiting that it exchanges payloads with.

    Returns:
      The schedule. Without `work`, transfers of one rank with the same s keep their order.
    """
    if not len(src):
        work = None
    if transport in ("static", "ragged"):
        color = color_edges(src, dst, num_ranks).astype(np.int64)
        if work is None:
            stage, within = np.divmod(color, coalesce)
        else:
            stage, within = _level_colors(color, dst, work, num_ranks, coalesce)
        if transport == "static":
            return _static(src, dst, stage, within)
        return _ragged(src, dst, stage, coalesce)
    groups = shift_groups(num_ranks, transport, coalesce, by_distance)
    group_of = np.zeros(num_ranks, np.int64)
    first, apart, times = (np.zeros(num_ranks, np.int64) for _ in range(3))
    for index, shifts in enumerate(groups):
        different = len(set(shifts))
        for position, shift in enumerate(s % num_ranks for s in shifts[:different]):
            group_of[shift], first[shift] = index, position
            apart[shift], times[shift] = different, len(shifts) // different
    shift = _shift(src, dst, num_ranks, transport, by_distance)
    lane, group = dst * num_ranks + shift, group_of[shift]
    turn, again = np.divmod(occurrence(lane), times[shift])
    trips = np.zeros(len(groups), np.int64)
    np.maximum.at(trips, group, turn + 1)
    if work is not None:
        cell = dst * len(groups) + group
        turn, again = _level_turns(cell, lane, trips[group], times[shift], work)
    position = first[shift] + again * apart[shift]
    return Schedule(group, turn, position, position, groups, trips)


def _level_colors(color, dst, work, num_ranks: int, coalesce: int):
    """Deals colors to stages of about equal size; returns (stage, place in it) of each transfer.

    Each color, the one with most work first, goes where it meets least work of the same ranks.
    """
    colors = int(color.max(initial=-1)) + 1
    stages = -(-colors // coalesce)
    brings = np.bincount(color * num_ranks + dst, work, colors * num_ranks)
    brings = brings.reshape(colors, num_ranks)
    load, count = np.zeros((stages, num_ranks)), np.zeros(stages, np.int64)
    stage, place = np.zeros(colors, np.int64), np.zeros(colors, np.int64)
    for c in np.argsort(-brings.sum(1), kind="stable"):
        met = np.where(count * stages < colors, load @ brings[c], np.inf)
        k = int(np.argmin(met))
        stage[c], place[c] = k, count[k]
        load[k] += brings[c]
        count[k] += 1
    return stage[color], place[color]


def _level_turns(cell, lane, trips, times, work):
    """Deals the transfers of each cell to its trips, heaviest first, where least work is so far.

    Args:
      cell: int64 [num_transfers], receiver and group of each.
      lane: int64 [num_transfers], receiver and shift.
      trips: int64 [num_transfers], of the transfer's group.
      times: int64 [num_transfers], how often a trip has the transfer's shift.
      work: float [num_transfers].

    Returns:
      (trip, how many of the same lane the trip had before), int64 [num_transfers] each.
    """
    cell, lane = (np.unique(x, return_inverse=True)[1] for x in (cell, lane))
    turn, again = np.zeros((2, len(cell)), np.int64)
    most = int(trips.max(initial=0))
    load = np.zeros((int(cell.max(initial=-1)) + 1, most))
    load[cell] = np.where(np.arange(most) < trips[:, None], 0.0, np.inf)
    used = np.zeros((int(lane.max(initial=-1)) + 1, most), np.int64)
    order = np.lexsort((-work, cell))
    nth = occurrence(cell[order])
    for chosen in np.split(order[np.argsort(nth, kind="stable")], np.cumsum(np.bincount(nth))[:-1]):
        room = used[lane[chosen]] < times[chosen, None]
        k = np.argmin(np.where(room, load[cell[chosen]], np.inf), axis=1)
        turn[chosen], again[chosen] = k, used[lane[chosen], k]
        load[cell[chosen], k] += work[chosen]
        used[lane[chosen], k] += 1
    return turn, again


def _static(src, dst, stage: np.ndarray, place: np.ndarray) -> Schedule:
    order = np.lexsort((src, place, stage))
    pairs = np.stack([src, dst], 1)[order]
    first = np.flatnonzero(np.diff(stage[order], prepend=-1) | np.diff(place[order], prepend=-1))
    rounds = [tuple(map(tuple, part.tolist())) for part in np.split(pairs, first[1:])]
    begins = np.flatnonzero(np.diff(stage[order][first], prepend=-1)).tolist()
    ends = [*begins[1:], len(first)]
    groups = tuple(tuple(rounds[a:b]) for a, b in zip(begins, ends, strict=False))
    once = np.ones(len(groups), np.int64)
    return Schedule(stage, np.zeros_like(stage), place, place, groups, once)


def _ragged(src, dst, turn: np.ndarray, coalesce: int) -> Schedule:
    trips = int(turn.max(initial=-1)) + 1

    def positions(own, peer):
        position, order = np.empty_like(turn), np.argsort(peer, kind="stable")
        position[order] = occurrence((own * trips + turn)[order])
        return position

    groups = (tuple(range(coalesce)),)
    received, sent = positions(dst, src), positions(src, dst)
    return Schedule(np.zeros_like(turn), turn, received, sent, groups, np.array([trips]))


def shift_groups(
    num_ranks: int, transport: str, coalesce: int, by_distance: bool
) -> tuple[tuple[int, ...], ...]:
    """Puts the shifts 1 to num_ranks - 1 of a family into groups of at most `coalesce` rounds.

    Args:
      num_ranks: ranks.
      transport: "xor" or "shift".
      coalesce: most rounds a group.
      by_distance: group shifts of about the same distance, as placement into windows uses those
        equally often: the s from one window size up to the next, added digit by digit. Short
        lists of near, often used shifts are repeated up to an eighth of `coalesce`, so that a
        stage brings several blocks. Else in ascending order.
    """
    shifts = range(1, num_ranks)
    if not by_distance:
        return tuple(
            tuple(shifts[i : i + coalesce]) for i in range(0, num_ranks - 1, max(coalesce, 1))
        )
    sizes = window_sizes(num_ranks)
    base = num_ranks if transport == "shift" else 0
    groups: list[tuple[int, ...]] = []
    for size, wider in zip(sizes[:-1], sizes[1:], strict=True):
        level = [base + shift for shift in range(size, wider)]
        chunks = -(-len(level) // coalesce)
        edges = [len(level) * i // chunks for i in range(chunks + 1)]
        repeats = max(coalesce // 8 // len(level), 1)
        groups += [tuple(level[a:b]) * repeats for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return tuple(groups)


def pulls_within_rounds(pulled: np.ndarray, transport: str, coalesce: int) -> np.ndarray:
    """Returns how much each rank may pull from each other before `schedule` needs more rounds.

    Args:
      pulled: integers [N, N], payloads that each rank (row) pulls from each other (column) now.
      transport: "xor" or "shift", with groups by distance.
      coalesce: most rounds a group.
    """
    num_ranks = len(pulled)
    to, source = np.indices(pulled.shape)
    shift = _shift(source, to, num_ranks, transport, by_distance=True)
    most = np.zeros(num_ranks, np.int64)
    np.maximum.at(most, shift, pulled)
    for shifts in shift_groups(num_ranks, transport, coalesce, by_distance=True):
        group = [shift % num_ranks for shift in shifts]
        times = len(group) // len(set(group))
        most[group] = -(-most[group].max() // times) * times
    return most[shift]


def window_sizes(num_ranks: int) -> list[int]:
    """Returns nested window sizes, 1 to num_ranks: each divides the next, by a prime.

    They are also the places of the digits in which ranks are written to add without carry.
    """
    sizes, left, factor = [1], num_ranks, 2
    while left > 1:
        while left % factor == 0:
            sizes.append(sizes[-1] * factor)
            left //= factor
        factor += 1
    return sizes


def _shift(src: np.ndarray, dst: np.ndarray, num_ranks: int, transport: str, by_distance: bool):
    """The s that leads from src to dst."""
    if transport == "xor":
        return src ^ dst
    if not by_distance:
        return (dst - src) % num_ranks
    return _add_digits(dst, src, num_ranks, -1)


def _add_digits(a, b, num_ranks: int, sign: int = 1):
    """Adds or subtracts digit by digit, without carry."""
    sizes = window_sizes(num_ranks)
    total = np.zeros_like(a)
    for size, wider in zip(sizes[:-1], sizes[1:], strict=True):
        total += (a // size + sign * (b // size)) % (wider // size) * size
    return total


def permutation(transport: str, round_: Round, num_ranks: int) -> list[tuple[int, int]]:
    """Returns the (src, dst) pairs that a round may use."""
    if isinstance(round_, tuple):
        return list(round_)
    if transport == "xor":
        return [(i, i ^ round_) for i in range(num_ranks)]
    if round_ >= num_ranks:
        ranks = np.arange(num_ranks)
        return list(enumerate(_add_digits(ranks, round_ - num_ranks, num_ranks).tolist()))
    return [(i, (i + round_) % num_ranks) for i in range(num_ranks)]


def occurrence(keys: np.ndarray) -> np.ndarray:
    """Returns how many equal keys stand before each one, int64 [len(keys)]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    counts = np.diff(firsts, append=len(keys))
    result = np.empty(len(keys), np.int64)
    result[order] = np.arange(len(keys)) - np.repeat(firsts, counts)
    return result
