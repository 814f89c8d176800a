"""From transfers to rounds: when each block travels, and through which permutation.

A round is a matching: every rank sends at most one payload and receives at most one. The rounds of
a stage, up to `coalesce` of them, are in flight together while the previous stage computes. Stages
that run the same permutations form a group, which is one loop body in the compiled program.
"""

import dataclasses

import numpy as np

from fcp_jax.edge_coloring import color_edges

Round = int | tuple[tuple[int, int], ...]
"""A shift s of the "xor" or "shift" family, or the (src, dst) pairs of a static round."""


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The place of each transfer: round `position` of trip `turn` through group `group`.

    Attributes:
      group: int64 [num_transfers].
      turn: int64 [num_transfers].
      position: int64 [num_transfers].
      groups: the rounds of each group.
      trips: int64 [num_groups], how often each group runs; always 1 for "static".
    """

    group: np.ndarray
    turn: np.ndarray
    position: np.ndarray
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
    src: np.ndarray, dst: np.ndarray, num_ranks: int, transport: str, coalesce: int
) -> Schedule:
    """Assigns transfers to rounds.

    Args:
      src: int64 [num_transfers], sending rank.
      dst: int64 [num_transfers], receiving rank, never the sender.
      num_ranks: ranks.
      transport: "static" colors the edges of the bipartite multigraph, which takes exactly
        max-degree rounds (König 1916; paper: Communication Planner). "xor" and "shift" run the
        permutations i -> i ^ s and i -> (i + s) mod num_ranks, in groups of `coalesce` different
        s, each group as often as its busiest (rank, s) needs.
      coalesce: most rounds a stage.

    Returns:
      The schedule. Transfers of one rank with the same s keep their order.
    """
    if transport == "static":
        color = color_edges(src, dst, num_ranks).astype(np.int64)
        num_rounds = int(color.max(initial=-1)) + 1
        by_color = np.lexsort((src, color))
        pairs = np.split(
            np.stack([src, dst], 1)[by_color],
            np.searchsorted(color[by_color], np.arange(1, num_rounds)),
        )
        rounds = [tuple(map(tuple, pair.tolist())) for pair in pairs[:num_rounds]]
        groups = tuple(tuple(rounds[i : i + coalesce]) for i in range(0, num_rounds, coalesce))
        group, position = np.divmod(color, coalesce)
        return Schedule(
            group, np.zeros_like(group), position, groups, np.ones(len(groups), np.int64)
        )
    shifts = range(1, num_ranks)
    groups = tuple(tuple(shifts[i : i + coalesce]) for i in range(0, num_ranks - 1, coalesce))
    shift = src ^ dst if transport == "xor" else (dst - src) % num_ranks
    group, position = np.divmod(shift - 1, coalesce)
    turn = occurrence(src * num_ranks + shift)
    trips = np.zeros(len(groups), np.int64)
    np.maximum.at(trips, group, turn + 1)
    return Schedule(group, turn, position, groups, trips)


def permutation(transport: str, round_: Round, num_ranks: int) -> list[tuple[int, int]]:
    """Returns the (src, dst) pairs that a round may use."""
    if isinstance(round_, tuple):
        return list(round_)
    if transport == "xor":
        return [(i, i ^ round_) for i in range(num_ranks)]
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
