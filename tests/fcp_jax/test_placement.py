"""Placement: nothing lost, slots respected, pieces of a segment compute the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_jax.blocks import query_costs
from fcp_jax.placement import place_windows
from fcp_jax.ranks import token_pairs, zigzag_pairs, zigzag_slots
from fcp_jax.rounds import permutation, shift_groups, window_sizes
from fcp_jax.segments import Segments


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_token_has_one_place_and_slots_suffice(data):
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 6, 8, 16]))
    block_size, num_slots = 64, data.draw(st.integers(1, 6))
    capacity = num_ranks * num_slots * block_size
    lengths = data.draw(st.lists(st.integers(1, 200) | st.integers(1, capacity), max_size=40))
    lengths = [n for n, end in zip(lengths, np.cumsum(lengths), strict=True) if end <= capacity]
    segments = Segments.from_seqlens(np.array(lengths, np.int64))
    speeds = np.array(data.draw(st.lists(st.floats(0.5, 2), min_size=16, max_size=16)))[:num_ranks]
    placed = place_windows(
        segments,
        num_ranks,
        block_size,
        num_slots,
        data.draw(st.booleans()),
        speeds,
        even=data.draw(st.sampled_from([0.0, 1.0, 2.0])),
        only_roomy=data.draw(st.booleans()),
        tokens_per_rank=data.draw(st.sampled_from([None, num_slots * block_size])),
    )
    if data.draw(st.booleans()):
        placed.level(1.0, None)
    blocks, rank = placed.blocks()
    assert np.bincount(rank, minlength=num_ranks).max(initial=0) <= num_slots
    assert (blocks.offset + blocks.length <= block_size).all()
    held = np.zeros(segments.num_tokens, np.int64)
    for start, length, segment in zip(blocks.start, blocks.length, blocks.segment, strict=True):
        held[start : start + length] += 1
        assert segments.starts[segment] <= start
        assert start + length <= segments.ends[segment]
    assert (held == 1).all()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("cut", [zigzag_pairs, zigzag_slots])
def test_zigzag_units_compute_the_same(cut, count):
    length = 64 * count
    units = cut((100, length), count)
    costs = [
        sum(token_pairs(start - 100, n, length, True) for slot in unit for start, n in slot)
        / len(unit)
        for unit in units
    ]
    assert sum(n for unit in units for slot in unit for _, n in slot) == length
    assert max(costs) - min(costs) <= 0.01 * max(costs)
    assert all(sum(n for _, n in slot) <= 64 for unit in units for slot in unit)


@pytest.mark.parametrize("num_ranks", [1, 2, 6, 7, 24, 96, 256])
def test_windows_nest(num_ranks):
    sizes = window_sizes(num_ranks)
    assert (sizes[0], sizes[-1]) == (1, num_ranks)
    assert all(b % a == 0 and b > a for a, b in zip(sizes[:-1], sizes[1:], strict=True))


def test_work_follows_the_speed_of_ranks():
    segments = Segments.from_seqlens(np.array([512] * 16))
    speeds = np.array([1.0, 1.0, 2.0, 2.0])
    blocks, rank = place_windows(segments, 4, 128, 24, True, speeds).blocks()
    work = np.bincount(rank, weights=query_costs(blocks, segments, True), minlength=4)
    finish = work / speeds
    assert finish.max() <= 1.1 * work.sum() / speeds.sum()


def test_a_rank_holds_neighbors_of_the_zigzag_order():
    """32 blocks on 4 ranks: rank i holds blocks 4i..4i+3 and their mirror images, in some order."""
    segments = Segments.from_seqlens(np.array([32 * 64]))
    blocks, rank = place_windows(segments, 4, 64, 10, True, np.ones(4)).blocks()
    place = blocks.start // 64
    outer = np.minimum(place, 31 - place) // 4
    for one in range(4):
        assert len(np.unique(outer[rank[blocks.block] == one])) == 1


def test_short_segments_stay_where_the_caller_has_them():
    """16 equal segments, four on each rank's rows: nothing needs to move."""
    segments = Segments.from_seqlens(np.array([256] * 16))
    blocks, rank = place_windows(
        segments, 4, 128, 10, True, np.ones(4), tokens_per_rank=1024
    ).blocks()
    np.testing.assert_array_equal(rank[blocks.block], blocks.start // 1024)


@pytest.mark.parametrize("num_ranks", [3, 6, 12, 24, 36, 96])
def test_near_shifts_stay_in_their_window_and_reach_all_of_it(num_ranks):
    """Added digit by digit, the shifts below a window's size lead from each rank to all others."""
    rounds = [r for group in shift_groups(num_ranks, "shift", 16, True) for r in set(group)]
    assert sorted(r - num_ranks for r in rounds) == list(range(1, num_ranks))
    for size in window_sizes(num_ranks):
        reached = [set() for _ in range(num_ranks)]
        for round_ in range(num_ranks + 1, num_ranks + size):
            pairs = permutation("shift", round_, num_ranks)
            assert sorted(dst for _, dst in pairs) == list(range(num_ranks))
            for src, dst in pairs:
                reached[src].add(dst)
        for rank in range(num_ranks):
            window = set(range(rank // size * size, rank // size * size + size))
            assert reached[rank] == window - {rank}
