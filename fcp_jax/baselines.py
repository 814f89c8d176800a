"""Published ways to share packed attention, as plans: ByteScale, WLB-LLM, MagiAttention.

Each is described as far as placement goes. Kernel, transport and validator are those of FCP, so
that a comparison is one of placements and of nothing else.
"""

import heapq

import numpy as np

from fcp_jax.blocks import Blocks, query_costs
from fcp_jax.ranks import Ranks, zigzag_slots
from fcp_jax.ring import all_gather_blocks, ring_blocks
from fcp_jax.segments import Segments

_TILE = 128
"""Rows of keys or queries that an attention kernel handles at once; shorter runs are padded."""


def bytescale_blocks(
    segments: Segments, num_ranks: int, tokens_per_rank: int, block_size: int, num_slots: int
) -> tuple[Blocks, np.ndarray]:
    """Gives each segment a ring of as many ranks as its tokens fill (ByteScale, arXiv 2502.21231).

    A segment of L tokens is shared, in zigzag order, by ceil(L / tokens_per_rank) consecutive
    ranks; segments shorter than that stay whole and are packed where most room is left. Ranks are
    in proportion to tokens while computation grows with their square, so the ranks of the longest
    segments finish last. Rings are taken where there is most room, and widened where tokens would
    not fit.

    Args:
      segments: of at least one token each.
      num_ranks: ranks.
      tokens_per_rank: tokens that set the width of a ring.
      block_size: rows a slot.
      num_slots: slots a rank.

    Returns:
      (blocks, rank of each block, int64 [num_blocks]).
    """
    ranks = Ranks(num_ranks, block_size, num_slots, True, np.ones(num_ranks))
    for segment in np.argsort(-segments.lengths, kind="stable").tolist():
        run = int(segments.starts[segment]), int(segments.lengths[segment])
        ranks.begin(segment, run)
        ring = _roomy_ring(ranks.room, run[1], -(-run[1] // tokens_per_rank))
        if ring is None:
            ranks.pour(run)
        elif ring[1] == 1:
            ranks.share(ring[0], run)
        else:
            first, width = ring
            for rank, (parts,) in enumerate(zigzag_slots(run, width), first):
                for part in parts:
                    ranks.share(rank, part)
    return ranks.blocks()


def _roomy_ring(room: np.ndarray, length: int, width: int) -> tuple[int, int] | None:
    """Returns (first rank, ranks) of the ring with most room, of `width` or a multiple of it."""
    while width <= len(room):
        least = np.lib.stride_tricks.sliding_window_view(room, width).min(axis=1)
        first = int(np.argmax(least))
        if least[first] >= -(-length // width) + (width > 1):  # zigzag parts are rounded
            return first, width
        width *= 2
    return None


def wlb_blocks(
    segments: Segments, num_ranks: int, tokens_per_rank: int, block_size: int, causal: bool
) -> Blocks:
    """Picks the better of per-document and per-sequence sharding (WLB-LLM, arXiv 2503.17924).

    Per document, every segment is cut for all ranks: even, but short segments fall to pieces.
    Per sequence, the packed row is cut as if it were one segment: large pieces, but uneven. The
    paper predicts which is faster; here an oracle compares the busiest rank's token pairs with
    every piece padded to whole kernel tiles. Keys and values are gathered in both.
    """
    per_document = ring_blocks(segments, num_ranks, block_size)
    per_sequence = all_gather_blocks(segments, num_ranks, tokens_per_rank, block_size)
    choices = [per_document, per_sequence]
    return min(choices, key=lambda blocks: _padded_pairs(blocks, segments, causal))


def _padded_pairs(blocks: Blocks, segments: Segments, causal: bool) -> int:
    seen = segments.lengths[blocks.segment]
    if causal:
        seen = blocks.start - segments.starts[blocks.segment] + blocks.length
    queries, keys = (-(-x // _TILE) * _TILE for x in (blocks.length, seen))
    return int(np.bincount(blocks.block, queries * keys).max(initial=0))


def magi_blocks(
    segments: Segments, num_ranks: int, tokens_per_rank: int, block_size: int, causal: bool
) -> tuple[Blocks, np.ndarray]:
    """Deals equal chunks so that the largest area is small (MagiAttention, arXiv 2505.13211).

    The packed row is cut into equal chunks whatever segments they hold; largest mask area first,
    each goes to the rank with the least area that has fewer than its even share of chunks. Only
    keys and values that are needed travel.

    Returns:
      (blocks, rank of each block, int64 [num_blocks]).
    """
    per_rank = -(-tokens_per_rank // block_size)
    edges = np.arange(num_ranks * per_rank + 1) * tokens_per_rank // per_rank
    first = np.searchsorted(edges, segments.starts, side="right") - 1
    last = np.searchsorted(edges, segments.ends, side="left") - 1
    spans = last - first + 1
    segment = np.repeat(np.arange(len(segments)), spans)
    chunk = first[segment] + np.arange(len(segment)) - np.repeat(np.cumsum(spans) - spans, spans)
    begin = np.maximum(edges[chunk], segments.starts[segment])
    end = np.minimum(edges[chunk + 1], segments.ends[segment])
    block = np.unique(chunk, return_inverse=True)[1]  # chunks of padding only are no blocks
    blocks = Blocks.from_fragments(block_size, block, begin, end - begin, segment)

    areas = query_costs(blocks, segments, causal)
    rank = np.zeros(blocks.num_blocks, np.int64)
    heap = [(0, r) for r in range(num_ranks)]
    held = [0] * num_ranks
    for index in np.argsort(-areas, kind="stable").tolist():
        area, least = heapq.heappop(heap)
        rank[index] = least
        held[least] += 1
        if held[least] < per_rank:
            heapq.heappush(heap, (area + int(areas[index]), least))
    return blocks, rank
