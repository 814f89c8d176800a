"""The published methods place tokens as their papers say, and their plans are valid."""

import json

import numpy as np
import pytest
from parity import assert_close, cp_mesh, operands, value_and_grads
from reference import dense_attention, segment_ids_of

import fcp_jax as fcp
from fcp_jax.__main__ import main
from fcp_jax.baselines import bytescale_blocks, magi_blocks, wlb_blocks
from fcp_jax.config import METHODS
from fcp_jax.ring import all_gather_blocks, ring_blocks
from fcp_jax.segments import as_segments
from fcp_jax.workloads import sample_seqlens

TOKENS, SIZE = 4096, 512


def batch(workload="lognormal", ranks=16, seed=0):
    return sample_seqlens(workload, num_ranks=ranks, tokens_per_rank=TOKENS, seed=seed)


@pytest.mark.parametrize("method", ["bytescale", "wlb", "magi"])
@pytest.mark.parametrize("ranks", [1, 6, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_plans_are_valid(method, ranks, causal):
    config = fcp.PlanConfig(ranks, TOKENS, block_size=SIZE, causal=causal, method=method)
    for seqlens in (batch(ranks=ranks), [ranks * TOKENS], [1] * ranks, []):
        fcp.validate_plan(fcp.make_plan(seqlens, config))


def test_bytescale_gives_ranks_by_tokens_not_by_work():
    seqlens = np.array([4 * TOKENS, TOKENS, TOKENS // 2, TOKENS // 2, 2 * TOKENS])
    blocks, rank = bytescale_blocks(as_segments(seqlens), 8, TOKENS, SIZE, 10)
    ranks_of = [set(rank[blocks.block[blocks.segment == s]].tolist()) for s in range(5)]
    assert [len(ranks) for ranks in ranks_of] == [4, 1, 1, 1, 2]
    tokens = np.bincount(rank[blocks.block], blocks.length, 8)
    assert tokens.tolist() == [TOKENS] * 8
    # Zigzag: every rank of a ring computes the same number of token pairs.
    ring = blocks.segment == 0
    before, length = blocks.start[ring], blocks.length[ring]
    pairs = np.bincount(rank[blocks.block[ring]], length * before + length * (length + 1) // 2, 8)
    assert np.ptp(pairs[pairs > 0]) == 0


def test_bytescale_widens_a_ring_that_would_not_fit():
    seqlens = np.full(7, TOKENS * 8 // 7)  # two ranks each would be 14 of 8 ranks
    blocks, rank = bytescale_blocks(as_segments(seqlens), 8, TOKENS, SIZE, 10)
    assert np.bincount(rank, minlength=8).max() <= 10
    assert blocks.length.sum() == seqlens.sum()


def test_wlb_switches_to_the_faster_sharding():
    ranks = 16
    long = as_segments(np.array([ranks * TOKENS // 2 + 999, ranks * TOKENS // 2 - 999]))
    short = as_segments(np.full(ranks * TOKENS // 64, 64))
    args = ranks, TOKENS, TOKENS, True
    np.testing.assert_array_equal(
        wlb_blocks(long, *args).start, ring_blocks(long, ranks, TOKENS).start
    )
    np.testing.assert_array_equal(
        wlb_blocks(short, *args).start, all_gather_blocks(short, ranks, TOKENS, TOKENS).start
    )


@pytest.mark.parametrize("workload", ["lognormal", "uniform"])
def test_magi_deals_equal_numbers_of_equal_chunks(workload):
    segments = as_segments(batch(workload))
    blocks, rank = magi_blocks(segments, 16, TOKENS, SIZE, True)
    assert (np.bincount(rank, minlength=16) == TOKENS // SIZE).all()
    assert (np.bincount(blocks.block, blocks.length) == SIZE).all()


def test_fcp_is_even_and_its_busiest_rank_moves_least():
    seqlens, stats = batch(ranks=32, seed=1), {}
    for method in METHODS:
        stats[method] = fcp.make_plan(
            seqlens, fcp.PlanConfig(32, TOKENS, SIZE, method=method)
        ).stats
        assert stats[method] is not None
    assert stats["fcp"].compute_imbalance < 0.05
    for method in ("all_gather", "bytescale"):
        assert stats[method].compute_imbalance > 0.3
    for method in ("ring", "all_gather", "wlb", "magi"):
        assert stats[method].payload_bytes_max > 1.5 * stats["fcp"].payload_bytes_max


def test_compare_prints_every_method(tmp_path, capsys):
    plot = tmp_path / "compare.png"
    arguments = ["compare", "--workload", "lognormal", "--num-ranks", "8", "--json"]
    assert main([*arguments, "--methods", "all", "--plot", str(plot)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["methods"]) == set(METHODS) and figures["num_tokens"] == 8 * 32768
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments[:-1], "--methods", "fcp,ring"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "fcp", "ring"]
    assert main([*arguments, "--methods", "fcp,rings"]) == 2
    assert "method must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["bytescale", "wlb", "magi"])
def test_they_run(method):
    config = fcp.PlanConfig(8, 100, block_size=64, coalesce=3, method=method)
    segments = fcp.Segments.from_seqlens([333, 1, 64, 65, 63, 0, 128, 5, 20])
    plan = fcp.make_plan(segments, config)
    ids = segment_ids_of(segments, config.capacity)
    args = operands(np.random.default_rng(0), config.capacity)
    assert_close(value_and_grads(*args, plan, cp_mesh(8)), dense_attention(*args, ids, True))
