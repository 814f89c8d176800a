"""Cutting segments into blocks: the unit that is placed on a rank and sent to another.

A block holds up to `block_size` tokens as fragments, each a run of one segment.
"""

import dataclasses

import numpy as np

from fcp_jax.segments import Segments


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Fragments grouped into blocks, ordered by (block, offset).

    Attributes:
      block_size: rows a block has room for.
      num_blocks: number of blocks.
      block: int64 [num_fragments], the block that holds each fragment.
      offset: int64 [num_fragments], its first row inside the block.
      start: int64 [num_fragments], its first row in the caller's layout.
      length: int64 [num_fragments], its tokens, at least 1.
      segment: int64 [num_fragments], its segment.
    """

    block_size: int
    num_blocks: int
    block: np.ndarray
    offset: np.ndarray
    start: np.ndarray
    length: np.ndarray
    segment: np.ndarray

    @classmethod
    def from_fragments(cls, block_size: int, block, start, length, segment) -> "Blocks":
        """Lays fragments out inside their blocks in the order given."""
        order = np.argsort(block, kind="stable")
        block, start, length, segment = (
            np.asarray(x, np.int64)[order] for x in (block, start, length, segment)
        )
        ends = np.cumsum(length)
        firsts = np.flatnonzero(np.diff(block, prepend=-1))
        base = np.repeat((ends - length)[firsts], np.diff(firsts, append=len(block)))
        num_blocks = int(block[-1]) + 1 if len(block) else 0
        return cls(block_size, num_blocks, block, ends - length - base, start, length, segment)


def query_costs(blocks: Blocks, segments: Segments, causal: bool) -> np.ndarray:
    """Returns the token pairs each block's queries take part in, int64 [num_blocks]."""
    before = blocks.start - segments.starts[blocks.segment]
    length = blocks.length
    if causal:
        pairs = length * before + length * (length + 1) // 2
    else:
        pairs = length * segments.lengths[blocks.segment]
    return np.bincount(blocks.block, weights=pairs, minlength=blocks.num_blocks).astype(np.int64)


def block_pairs(blocks: Blocks, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Lists every (query block, kv block) that holds a visible token pair, once, sorted.

    Returns:
      (query_block, kv_block), int64 [num_pairs] each.
    """
    keys = np.zeros(0, np.int64)
    for query, kv in _fragment_pairs(blocks, causal):
        keys = np.union1d(keys, blocks.block[query] * blocks.num_blocks + blocks.block[kv])
        if len(keys) == blocks.num_blocks**2:  # ring: the first long segment names all pairs
            break
    return keys // blocks.num_blocks, keys % blocks.num_blocks


def pair_areas(blocks: Blocks, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts the visible token pairs of every block pair that holds any.

    Returns:
      (query_block, kv_block, area), int64 [num_pairs] each, sorted.
    """
    keys, areas = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for query, kv in _fragment_pairs(blocks, causal):
        length = blocks.length[query]
        area = length * blocks.length[kv]
        if causal:
            area = np.where(query == kv, length * (length + 1) // 2, area)
        keys = np.append(keys, blocks.block[query] * blocks.num_blocks + blocks.block[kv])
        keys, inverse = np.unique(keys, return_inverse=True)
        areas = np.bincount(inverse, np.append(areas, area)).astype(np.int64)
    return keys // blocks.num_blocks, keys % blocks.num_blocks, areas


_PAIRS_AT_ONCE = 4_000_000


def _fragment_pairs(blocks: Blocks, causal: bool):
    """Yields (query fragment, kv fragment) arrays of all visible pairs, long segments first."""
    order = np.lexsort((blocks.start, blocks.segment))
    if not len(order):
        return
    firsts = np.flatnonzero(np.diff(blocks.segment[order], prepend=-1))
    counts = np.diff(firsts, append=len(order))
    by_count = np.argsort(-counts, kind="stable")
    batch = np.cumsum(counts[by_count] ** 2) // _PAIRS_AT_ONCE
    for members in np.split(by_count, np.flatnonzero(np.diff(batch)) + 1):
        count = counts[members]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        first = np.repeat(firsts[members], count)
        seen = within + 1 if causal else np.repeat(count, count)
        kv = np.arange(int(seen.sum())) - np.repeat(np.cumsum(seen) - seen, seen)
        yield order[np.repeat(first + within, seen)], order[np.repeat(first, seen) + kv]
