"""Common table sizes over the batches of a run."""

import logging

import jax
import numpy as np
import pytest

import fcp_jax as fcp
from fcp_jax.buckets import PlanBuckets
from fcp_jax.plan import TABLES

CONFIG = fcp.PlanConfig(4, 128, block_size=64)


def random_plans(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lengths = rng.lognormal(3.5, 1.2, 40).astype(int) + 1
        yield fcp.make_plan(lengths[np.cumsum(lengths) <= CONFIG.capacity], CONFIG)


def program(plan):
    """What jit compiles for: static parts and table shapes."""
    return jax.tree.structure(plan), tuple(leaf.shape for leaf in jax.tree.leaves(plan))


def test_a_hundred_batches_share_one_program():
    buckets = PlanBuckets()
    buckets.reserve(random_plans(16, seed=1))
    unpadded = list(random_plans(100))
    padded = [buckets.pad(plan) for plan in unpadded]
    assert len({program(plan) for plan in padded}) == 1
    assert buckets.num_growths == 0
    assert len({program(plan) for plan in unpadded}) >= 5
    for plan in padded[:5]:
        fcp.validate_plan(plan)


def test_a_batch_beyond_its_bucket_is_padded_to_the_next_counted_and_logged(caplog):
    buckets = PlanBuckets(headroom=1.0)
    small, large = fcp.make_plan([200], CONFIG), fcp.make_plan([5] * 100, CONFIG)
    buckets.pad(small)
    assert buckets.num_growths == 0
    with caplog.at_level(logging.INFO, logger="fcp_jax.buckets"):
        grown = buckets.pad(large)
    assert buckets.num_growths == 1
    assert "compiles again" in caplog.text
    assert all(have >= need for have, need in zip(buckets.sizes, large.table_sizes, strict=True))
    fcp.validate_plan(grown)
    assert program(buckets.pad(small)) == program(grown)
    assert buckets.num_growths == 1


def test_headroom_and_reserve():
    plan = fcp.make_plan([5] * 16, CONFIG)
    fragments = plan.table_sizes[0]
    assert fragments == 16
    assert PlanBuckets().sizes is None
    for headroom in (1.0, 3.0):
        buckets = PlanBuckets(headroom)
        buckets.reserve([plan])
        assert buckets.sizes[0] == fcp.bucket_size(int(headroom * fragments))
        padded = buckets.pad(plan)
        assert padded.table_sizes == buckets.sizes
        assert padded.stats is plan.stats
        assert all(getattr(padded, name).dtype == np.int32 for name in TABLES)


@pytest.mark.parametrize("headroom", [0.5, float("nan"), float("inf")])
def test_bad_headroom(headroom):
    with pytest.raises(ValueError, match="headroom must be a finite number of at least 1"):
        PlanBuckets(headroom)
