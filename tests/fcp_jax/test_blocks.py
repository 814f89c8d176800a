"""Blocks: layout of fragments, and pairs and costs against counting single tokens."""

import numpy as np
import pytest

from fcp_jax.blocks import Blocks, block_pairs, pair_areas, query_costs
from fcp_jax.segments import Segments


def random_blocks(seed: int) -> tuple[Blocks, Segments]:
    """Segments of 1 to 12 tokens, cut at random and dealt to blocks of 8 rows first fit."""
    rng = np.random.default_rng(seed)
    segments = Segments.from_seqlens(rng.integers(1, 13, 7))
    room, fragments = [], []
    for segment, (start, length) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
        while length:
            part = int(rng.integers(1, min(length, 8) + 1))
            block = next((b for b, left in enumerate(room) if left >= part), len(room))
            room += [8] * (block == len(room))
            room[block] -= part
            fragments.append((block, start, part, segment))
            start, length = start + part, length - part
    return Blocks.from_fragments(8, *np.array(fragments).T), segments


def token_counts(blocks: Blocks, segments: Segments, causal: bool) -> np.ndarray:
    """Visible token pairs of every (query block, kv block), one token at a time."""
    counts = np.zeros((blocks.num_blocks, blocks.num_blocks), np.int64)
    tokens = [
        (int(start + i), int(block), int(segment))
        for block, start, length, segment in zip(
            blocks.block, blocks.start, blocks.length, blocks.segment, strict=True
        )
        for i in range(length)
    ]
    assert len(tokens) == segments.num_tokens
    for query, query_block, segment in tokens:
        for key, kv_block, other in tokens:
            if segment == other and (key <= query or not causal):
                counts[query_block, kv_block] += 1
    return counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_and_costs_count_every_token_pair(seed, causal):
    blocks, segments = random_blocks(seed)
    counts = token_counts(blocks, segments, causal)
    np.testing.assert_array_equal(np.nonzero(counts), block_pairs(blocks, causal))
    query, kv, area = pair_areas(blocks, causal)
    np.testing.assert_array_equal(np.nonzero(counts), (query, kv))
    np.testing.assert_array_equal(counts[query, kv], area)
    np.testing.assert_array_equal(counts.sum(axis=1), query_costs(blocks, segments, causal))


@pytest.mark.parametrize("seed", range(5))
def test_fragments_of_a_block_lie_end_to_end_in_the_order_given(seed):
    blocks, _ = random_blocks(seed)
    for block in range(blocks.num_blocks):
        inside = blocks.block == block
        ends = np.cumsum(blocks.length[inside])
        np.testing.assert_array_equal(blocks.offset[inside], ends - blocks.length[inside])
        assert ends[-1] <= blocks.block_size
        assert (np.diff(blocks.start[inside]) > 0).all()


def test_no_fragments():
    blocks = Blocks.from_fragments(64, *np.zeros((4, 0), np.int64))
    assert blocks.num_blocks == 0
    for arrays in (block_pairs(blocks, True), pair_areas(blocks, False)):
        assert all(len(array) == 0 for array in arrays)
