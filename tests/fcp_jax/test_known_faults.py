"""What broke other libraries: each case against the dense reference."""

import numpy as np
import pytest
from parity import assert_close, cp_mesh, operands, value_and_grads
from reference import dense_attention, segment_ids_of

import fcp_jax as fcp


def compare(segments, ranks, tokens, *, heads=(2, 1), dim=4, block_size=64, limits=(), **config):
    """Attention and its gradients on `ranks` devices against float64."""
    config = fcp.PlanConfig(ranks, tokens, block_size=block_size, **config)
    if not isinstance(segments, fcp.Segments):
        segments = fcp.Segments.from_seqlens(segments)
    plan = fcp.make_plan(segments, config)
    fcp.validate_plan(plan)
    args = operands(np.random.default_rng(0), config.capacity, heads, dim)
    ids = segment_ids_of(segments, config.capacity)
    got = value_and_grads(*args, plan, cp_mesh(ranks))
    assert_close(got, dense_attention(*args, ids, config.causal), *limits)
    return ids


def test_seven_tokens_of_ten_on_two_ranks_keep_the_last():
    assert (compare([4, 3], 2, 5) > 0).sum() == 7


def test_empty_segments_first_and_last_with_head_dim_256():
    compare(fcp.Segments.from_cu_seqlens([0, 0, 208, 348, 348]), 2, 256, dim=256)


def test_tail_rows_beyond_the_last_segment_are_zero():
    ids = compare(fcp.Segments.from_cu_seqlens([0, 144, 432, 944]), 2, 473)
    assert (ids[-2:] == 0).all()


@pytest.mark.parametrize(
    ("lengths", "ranks", "tokens"),
    [
        ([512, 1], 2, 320),
        ([128, 1024], 4, 320),
        ([1, 3, 5, 7], 8, 64),
        ([8 * 70], 8, 70),
        ([1] * 300, 4, 128),
    ],
)
def test_extreme_mixes(lengths, ranks, tokens):
    compare(lengths, ranks, tokens)


def test_five_tokens_on_thirty_two_ranks_is_a_valid_plan():
    plan = fcp.make_plan([5], fcp.PlanConfig(32, 64, block_size=64))
    fcp.validate_plan(plan)
    assert plan.stats.num_transfers == 0
    args = operands(np.random.default_rng(0), 32 * 64, (2, 1), 4)
    ids = segment_ids_of(fcp.Segments.from_seqlens([5]), 32 * 64)
    assert_close(value_and_grads(*args, plan, None), dense_attention(*args, ids, True))


def test_padding_between_segments():
    ids = np.repeat([0, 3, 0, 8, 2, 0], [5, 90, 10, 40, 41, 14]).astype(np.int32)
    segments = fcp.Segments.from_segment_ids(ids)
    got = compare(segments, 2, 100)
    np.testing.assert_array_equal(got > 0, ids > 0)


@pytest.mark.parametrize("length", [127, 128, 129])
@pytest.mark.parametrize("block_size", [128, 512])
def test_a_segment_of_one_block_give_or_take_a_token(length, block_size):
    compare([length, 1], 2, 512, block_size=block_size)


def test_nothing_at_all():
    compare([], 4, 64)
    compare([0, 0], 4, 64, causal=False)
