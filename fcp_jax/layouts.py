"""Where the blocks of one row lie and what travels; the best of several placements into windows."""

import dataclasses
import functools

import numpy as np

from fcp_jax.blocks import Blocks, block_pairs, query_costs
from fcp_jax.config import PlanConfig
from fcp_jax.placement import place_windows
from fcp_jax.ranks import Ranks
from fcp_jax.rounds import max_degree, occurrence, pulls_within_rounds, schedule
from fcp_jax.segments import Segments
from fcp_jax.stats import seconds_per_pair, transfer_stats

_COMPUTE_TOLERANCE = 0.05
"""Compute imbalance that a placement may have before anything else about it counts."""

_BANDWIDTH = 25.0
"""GB/s a rank may need before it counts against a placement: half of a 400 Gbit/s link."""

_HIDDEN = 10.0
"""Below this many GB/s traffic hides behind computation anyway, even or not."""

_UNEVEN = 0.05
"""Communication imbalance above which it counts against a placement."""

_TOO_UNEVEN = 1000.0
"""Penalty of computation out of tolerance, above all others."""

_WILL_DO = 16.0
"""Penalty below which more ranks than 128 look no further: what giants cost at best is below."""

_LEVEL = 0.96
"""Traffic is leveled until the mean is this part of the most: an imbalance of 0.042."""


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Cutting and placement of one row, and what follows for communication.

    Attributes:
      segments: of the row.
      blocks: their blocks.
      rank: int64 [num_blocks], the owner of each.
      pairs: (query block, kv block) of every pair that holds a visible token pair.
      transfer_block: int64 [num_transfers], the block that travels.
      transfer_dst: int64 [num_transfers], where to.
    """

    segments: Segments
    blocks: Blocks
    rank: np.ndarray
    pairs: tuple[np.ndarray, np.ndarray]
    transfer_block: np.ndarray
    transfer_dst: np.ndarray

    @functools.cached_property
    def slot(self) -> np.ndarray:
        """int64 [num_blocks], blocks of a rank in order."""
        return occurrence(self.rank)

    @functools.cached_property
    def transfer_of_pair(self) -> np.ndarray:
        """int64 [num_pairs], the transfer that brings a pair's keys; -1 where the rank has them."""
        query, kv = self.pairs
        ranks = 1 + max(int(x.max(initial=0)) for x in (self.rank, self.transfer_dst))
        key = self.transfer_block * ranks + self.transfer_dst
        by_key = np.argsort(key)
        remote = self.rank[query] != self.rank[kv]
        transfer = np.full(len(query), -1)
        wanted = kv[remote] * ranks + self.rank[query[remote]]
        transfer[remote] = by_key[np.searchsorted(key, wanted, sorter=by_key)]
        return transfer

    @functools.cached_property
    def pair_work(self) -> np.ndarray:
        """float64 [num_pairs], about the visible token pairs of each block pair.

        Exact for a block with itself under a causal mask and for blocks of one segment.
        """
        blocks, (query, kv) = self.blocks, self.pairs
        longest = np.zeros(blocks.num_blocks)
        np.maximum.at(longest, blocks.block, blocks.length)
        own = np.bincount(blocks.block, blocks.length * (blocks.length + 1) / 2, blocks.num_blocks)
        return np.where(query == kv, own[query], longest[query] * longest[kv])

    @functools.cached_property
    def transfer_work(self) -> np.ndarray:
        """float64 [num_transfers], the work of the block pairs that each transfer serves."""
        transfer = self.transfer_of_pair
        remote = transfer >= 0
        return np.bincount(
            transfer[remote], self.pair_work[remote], minlength=len(self.transfer_block)
        )


def pull_layout(blocks: Blocks, rank: np.ndarray, segments: Segments, config: PlanConfig) -> Layout:
    """Returns the layout in which every rank pulls what it needs and does not own, once."""
    ranks = config.num_ranks
    query, kv = pairs = block_pairs(blocks, config.causal)
    remote = rank[query] != rank[kv]
    keys = np.unique(kv[remote] * ranks + rank[query[remote]])
    return Layout(segments, blocks, rank, pairs, keys // ranks, keys % ranks)


def window_layout(
    segments: Segments,
    config: PlanConfig,
    block_size: int,
    num_slots: int,
    transport: str,
    coalesce: int,
) -> Layout:
    """Places segments into windows in several ways and returns the best layout.

    The best has computation within 5%, then little bandwidth, even traffic and few rounds. With
    more than 128 ranks the first that will do is taken, for the time it takes.
    """
    ranks = config.num_ranks
    speeds = np.ones(ranks) if config.rank_speeds is None else np.array(config.rank_speeds)
    best, lowest = None, np.inf
    for only_roomy, even in _choices(ranks):
        placed = place_windows(
            segments,
            ranks,
            block_size,
            num_slots,
            config.causal,
            speeds,
            even=even,
            only_roomy=only_roomy,
            tokens_per_rank=config.tokens_per_rank,
        )
        _level(placed, config, transport, coalesce)
        layout = pull_layout(*placed.blocks(), segments, config)
        penalty = _penalty(layout, config, transport, coalesce)
        if penalty < lowest:
            best, lowest = layout, penalty
        if ranks > 128 and penalty < _WILL_DO:
            break
    assert best is not None
    return best


def _choices(num_ranks: int) -> list[tuple[bool, float]]:
    """(only_roomy, even) of `place_windows` worth a try, fewer for many ranks.

    Beyond 128 ranks windows that even out traffic take more than 1.8 rounds per transfer of the
    busiest rank (docs/planner.md).
    """
    if num_ranks > 128:
        return [(True, 0.0), (False, 0.0), (False, 2.0)]
    widths = [2.0, 1.4, 3.0, 0.0, 1.0]
    if num_ranks > 32:
        widths = widths[: 3 if num_ranks <= 64 else 1]
    return [(only_roomy, even) for even in widths for only_roomy in (True, False)]


def _level(placed: Ranks, config: PlanConfig, transport: str, coalesce: int) -> None:
    """Evens out traffic, where there is enough of it to matter."""
    widest = max(int(placed.received.max()), int(placed.sent.max()))
    seconds = float(placed.load.max()) * seconds_per_pair(config)
    if widest * placed.block_size * config.kv_bytes_per_token <= 0.8e9 * _HIDDEN * seconds:
        return
    limits = None
    if transport in ("xor", "shift"):
        limits = functools.partial(pulls_within_rounds, transport=transport, coalesce=coalesce)
    placed.level(_LEVEL, limits)


def _penalty(layout: Layout, config: PlanConfig, transport: str, coalesce: int) -> float:
    """Weighs what a layout costs; less is better."""
    ranks = config.num_ranks
    src, dst = layout.rank[layout.transfer_block], layout.transfer_dst
    rounds = max_degree(src, dst)
    if transport in ("xor", "shift"):
        rounds = schedule(src, dst, ranks, transport, coalesce, True).num_rounds
    costs = query_costs(layout.blocks, layout.segments, config.causal)
    pairs = np.bincount(layout.rank, costs, ranks)
    stays = np.zeros((ranks, ranks), np.int64)
    stats = transfer_stats(
        config, layout.blocks.block_size, pairs, src, dst, stays, rounds, transport
    )
    penalty = np.log1p(rounds) + 10.0 * np.log(max(stats["bandwidth_needed"] / _BANDWIDTH, 1.0))
    if stats["bandwidth_needed"] > _HIDDEN:
        penalty += 10.0 * max(stats["comm_imbalance"] - _UNEVEN, 0.0)
    if stats["compute_imbalance"] > _COMPUTE_TOLERANCE:
        penalty += _TOO_UNEVEN * (1.0 + stats["compute_imbalance"])
    return round(float(penalty), 9)  # the logarithm's last bits are the machine's own
