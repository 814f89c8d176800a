"""How good plans are: bounds that the planner keeps today, on a few seeds of every workload."""

import dataclasses

import numpy as np
import pytest

import fcp_jax as fcp
from fcp_jax.workloads import WORKLOADS, sample_seqlens


def stats_of(workload: str, ranks: int, seed: int, **changes) -> fcp.PlanStats:
    seqlens = sample_seqlens(workload, num_ranks=ranks, tokens_per_rank=32768, seed=seed)
    stats = fcp.make_plan(seqlens, fcp.PlanConfig(ranks, 32768, **changes)).stats
    assert stats is not None
    return stats


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("ranks", [16, 64, 256])
def test_computation_is_even_and_memory_bounded(workload, ranks):
    for seed in range(3):
        stats = stats_of(workload, ranks, seed)
        assert stats.compute_imbalance <= 0.05
        assert stats.memory_tokens_max <= 1.25 * 32768


@pytest.mark.parametrize("ranks", [3, 16, 64])
def test_static_rounds_are_the_max_degree(ranks):
    stats = stats_of("lognormal", ranks, 0, transport="static")
    assert stats.num_rounds == stats.max_degree > 0


@pytest.mark.parametrize("seed", range(3))
def test_windows_put_less_on_the_wire_than_equal_chunks(seed):
    fcp_stats = stats_of("lognormal", 64, seed, transport="xor")
    magi_stats = stats_of("lognormal", 64, seed, method="magi", transport="xor")
    assert fcp_stats.wire_bytes_max < 0.6 * magi_stats.wire_bytes_max


def test_node_bytes_add_up_to_all_transfers():
    stats = stats_of("lognormal", 32, 0, ranks_per_node=2)
    config = fcp.PlanConfig(32, 32768)
    block_bytes = stats.block_size * config.kv_bytes_per_token
    assert stats.intra_node_bytes + stats.inter_node_bytes == stats.num_transfers * block_bytes
    assert stats.intra_node_bytes > 0 and stats.inter_node_bytes > 0
    one_node = stats_of("lognormal", 32, 0, ranks_per_node=32)
    assert one_node.inter_node_bytes == 0
    rank_a_node = stats_of("lognormal", 32, 0, ranks_per_node=1)
    assert rank_a_node.intra_node_bytes == 0
    assert rank_a_node.inter_node_bytes == one_node.intra_node_bytes


def test_ring_bytes_between_nodes_follow_from_counting_pairs():
    stats = stats_of("lognormal", 16, 0, method="ring")
    pairs_inside = 2 * 8 * 7
    assert stats.intra_node_bytes * (16 * 15 - pairs_inside) == (
        stats.inter_node_bytes * pairs_inside
    )


def test_same_request_same_plan():
    seqlens = sample_seqlens("bimodal", num_ranks=24, tokens_per_rank=32768, seed=7)
    first, second = (fcp.make_plan(seqlens, fcp.PlanConfig(24, 32768)) for _ in range(2))
    for field in dataclasses.fields(first):
        if isinstance(getattr(first, field.name), np.ndarray):
            np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))
