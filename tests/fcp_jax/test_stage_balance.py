"""Stages of about equal work: the same rounds, and less waiting for the rank with most to do."""

import numpy as np
import pytest

from fcp_jax import PlanConfig, make_plan, validate_plan
from fcp_jax.rounds import max_degree, permutation, schedule
from fcp_jax.simulate import of_intensity, simulate
from fcp_jax.tables import stage_areas, work_items
from fcp_jax.topology import fat_tree
from fcp_jax.workloads import sample_seqlens

TRANSPORTS = ["static", "ragged", "xor", "shift"]


def _demand(ranks: int, transfers: int, seed: int):
    rng = np.random.default_rng(seed)
    src = rng.integers(0, ranks, transfers)
    dst = (src + rng.integers(1, ranks, transfers)) % ranks
    return src, dst, rng.integers(0, 9, transfers)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("by_distance", [True, False])
def test_every_payload_has_a_round_of_its_own_that_leads_where_it_goes(transport, by_distance):
    for ranks, transfers, coalesce in [(8, 200, 4), (8, 1, 16), (2, 9, 2), (16, 333, 16)]:
        src, dst, work = _demand(ranks, transfers, seed=transfers)
        rounds = schedule(src, dst, ranks, transport, coalesce, by_distance, work)
        stage = rounds.stage(rounds.trips)
        for rank, place in ((dst, rounds.position), (src, rounds.send_position)):
            used = np.stack([rank, stage, place], 1)
            assert len(np.unique(used, axis=0)) == transfers
        plain = schedule(src, dst, ranks, transport, coalesce, by_distance)
        assert rounds.num_rounds == plain.num_rounds
        if transport == "static":
            assert rounds.num_rounds == max_degree(src, dst)
        if transport != "ragged":
            for s, d, group, place in zip(src, dst, rounds.group, rounds.position, strict=True):
                leads = permutation(transport, rounds.groups[group][place], ranks)
                assert (s, d) in [tuple(pair) for pair in leads]


@pytest.mark.parametrize(("transport", "less"), [("static", 0.9), ("xor", 0.8)])
def test_ranks_have_about_the_same_to_do_in_each_stage(monkeypatch, transport, less):
    seqlens = sample_seqlens("lognormal", num_ranks=64, tokens_per_rank=32768, seed=1)
    config = PlanConfig(64, 32768, 4096, transport=transport, coalesce=4)

    def slowest_ranks() -> float:
        """Time if all wait for the slowest of each stage, over that if none does."""
        areas = stage_areas(make_plan(seqlens, config))[:, 1:]
        return areas.max(0).sum() / areas.sum(1).mean()

    level = slowest_ranks()
    monkeypatch.setattr(
        "fcp_jax.planner.schedule", lambda *arguments: schedule(*arguments[:-1], work=None)
    )
    plain = slowest_ranks()
    assert level < less * plain


@pytest.mark.parametrize("transport", ["static", "xor"])
def test_own_blocks_wait_for_stages_that_bring_little(monkeypatch, transport):
    """Ranks that hold whole segments else keep those of a giant waiting."""
    seqlens = sample_seqlens("lognormal", num_ranks=256, tokens_per_rank=32768, seed=0)
    config = PlanConfig(256, 32768, transport=transport)

    def makespan() -> float:
        plan = make_plan(seqlens, config)
        validate_plan(plan)
        return simulate(plan, fat_tree(256), of_intensity(2500)).makespan

    spread = makespan()
    monkeypatch.setattr("fcp_jax.planner._spread_own", lambda lay, when, *_: when[when < 0])
    assert spread < 0.97 * makespan()


def test_small_plans_have_own_blocks_in_stages_too():
    plan = make_plan([8000, 192], PlanConfig(8, 1024, 128))
    items = work_items(plan)
    own = items.kv_block // plan.shape.num_slots == items.rank
    assert (own & (items.stage >= 0)).any() and (own & (items.stage < 0)).any()
