"""Leveling: trades change who pulls what, and nothing that was settled before."""

import functools

import numpy as np
import pytest

import fcp_jax as fcp
from fcp_jax.blocks import query_costs
from fcp_jax.layouts import pull_layout
from fcp_jax.leveling import SharedSegment, level_traffic
from fcp_jax.placement import place_windows
from fcp_jax.ranks import zigzag_pairs
from fcp_jax.rounds import pulls_within_rounds, schedule
from fcp_jax.segments import Segments
from fcp_jax.workloads import sample_seqlens

COALESCE = 16


def figures(ranks, layout, transport):
    """(token pairs, sent, received) by rank, and rounds."""
    costs = query_costs(layout.blocks, layout.segments, True)
    src, dst = layout.rank[layout.transfer_block], layout.transfer_dst
    work = np.bincount(layout.rank, costs, ranks)
    sent, received = np.bincount(src, minlength=ranks), np.bincount(dst, minlength=ranks)
    rounds = schedule(src, dst, ranks, transport, COALESCE, True).num_rounds
    return work, sent, received, rounds


@pytest.mark.parametrize("workload", ["lognormal", "bimodal"])
@pytest.mark.parametrize(("ranks", "transport"), [(16, "xor"), (24, "shift"), (64, "xor")])
@pytest.mark.parametrize("even", [0.0, 2.0])
def test_leveling_evens_out_traffic_and_costs_nothing_else(workload, ranks, transport, even):
    config = fcp.PlanConfig(ranks, 32768)
    seqlens = sample_seqlens(workload, num_ranks=ranks, tokens_per_rank=32768, seed=1)
    segments = Segments.from_seqlens(seqlens)
    placed = place_windows(segments, ranks, 2048, 20, True, np.ones(ranks), even=even)
    blocks, rank = placed.blocks()
    work, sent, received, rounds = figures(
        ranks, pull_layout(blocks, rank, segments, config), transport
    )
    limits = functools.partial(pulls_within_rounds, transport=transport, coalesce=COALESCE)
    placed.level(0.96, limits)
    blocks_after, rank_after = placed.blocks()
    layout = pull_layout(blocks_after, rank_after, segments, config)
    work_after, sent_after, received_after, rounds_after = figures(ranks, layout, transport)

    np.testing.assert_allclose(work_after, work, rtol=2e-3)
    np.testing.assert_array_equal(
        np.bincount(rank_after, minlength=ranks), np.bincount(rank, minlength=ranks)
    )
    before, after = sent + received, sent_after + received_after
    assert after.max() / after.mean() < before.max() / before.mean()
    # What was there before leveling also gains from giving outer units to those who receive less.
    assert max(sent_after.max(), received_after.max()) <= 1.1 * max(sent.max(), received.max())
    assert rounds_after <= 1.1 * rounds


def test_a_segment_counts_its_transfers_as_the_layout_does():
    """Eight pairs on four ranks, one folded: the pulls that follow from blocks and owners."""
    units = zigzag_pairs((0, 16 * 64), 16)
    ranks = [0, 1, 2, 3, 0, 1, 2, 3]
    segment = SharedSegment(ranks, units)
    reach, pulled = segment.pulled()
    # The last block of rank r is 15 - r: it sees 16 - r blocks, four of them its own.
    np.testing.assert_array_equal(reach, [16, 15, 14, 13])
    np.testing.assert_array_equal(pulled.sum(1), [12, 11, 10, 9])
    segment.fold(0)  # blocks 0 and 15: now rank 1 to 3, which see half of 0, pull both
    reach, pulled = segment.pulled()
    np.testing.assert_array_equal(pulled[1:, 0], [4, 4, 4])
    np.testing.assert_array_equal(pulled.sum(1), [12, 12, 11, 10])
    segment.unfold(0)
    np.testing.assert_array_equal(segment.pulled()[1].sum(1), [12, 11, 10, 9])


def test_a_rank_with_little_traffic_takes_an_outer_unit():
    """Neighbors on four ranks, and a second segment that only ranks 0 and 1 share."""
    first = SharedSegment([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, zigzag_pairs((0, 32 * 64), 32))
    second = SharedSegment([0, 1], zigzag_pairs((2048, 4 * 64), 4))
    before = first.pulled()[1]
    traffic = before.sum(0) + before.sum(1) + np.array([3, 3, 0, 0])
    level_traffic([first, second], 4, 1.0)
    after, other = first.pulled()[1], second.pulled()[1]
    raised = after.sum(0) + after.sum(1)
    raised[:2] += other.sum(0) + other.sum(1)
    assert raised.max() <= traffic.max()
    assert raised.min() > traffic.min()
    np.testing.assert_array_equal(np.bincount(first.owner), [4, 4, 4, 4])


@pytest.mark.parametrize(("transport", "ranks"), [("xor", 16), ("shift", 12), ("shift", 18)])
def test_pulls_within_rounds_add_no_round_and_one_more_does(transport, ranks):
    rng = np.random.default_rng(0)
    pulled = rng.integers(0, 5, (ranks, ranks))
    np.fill_diagonal(pulled, 0)

    def rounds(pulled):
        dst, src = np.nonzero(pulled)
        times = pulled[dst, src]
        src, dst = np.repeat(src, times), np.repeat(dst, times)
        return schedule(src, dst, ranks, transport, COALESCE, True).num_rounds

    allowed = pulls_within_rounds(pulled, transport, COALESCE)
    np.fill_diagonal(allowed, 0)
    assert (allowed >= pulled).all()
    assert rounds(allowed) == rounds(pulled)
    for dst, src in [(0, 1), (3, 9), (11, 0)]:
        more = allowed.copy()
        more[dst, src] += 1
        assert rounds(more) > rounds(pulled)
