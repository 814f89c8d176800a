"""The simulation against closed forms, and what it says of FCP beside other methods."""

import json
import time

import numpy as np
import pytest

from benchmarks.calibrate import fit, measured
from fcp_jax import PlanConfig, make_plan
from fcp_jax.__main__ import main
from fcp_jax.fair_sharing import Flows, max_min_rates, run
from fcp_jax.simulate import H200, Hardware, KernelModel, of_intensity, simulate, trace
from fcp_jax.topology import (
    TOPOLOGIES,
    Topology,
    fat_tree,
    nvswitch,
    rail_optimized,
    torus,
    torus_shape,
)
from fcp_jax.workloads import sample_seqlens

TOKENS = 32768


def _arrivals(topology: Topology, src, dst, size) -> np.ndarray:
    """When transfers end that all start at once, with nothing to compute."""
    flows = Flows.make(src, dst, size, -1, 1)
    work = np.zeros((topology.num_ranks, 1))
    course = run(work, flows, *topology.route(flows.src, flows.dst), topology.capacity)
    return course.flow_end


def test_rates_of_a_textbook_case():
    # Links of 10, 4 and 5: flow 0 over all, 1 over the first, 2 over the second, 3 over the third.
    flow, link = np.array([0, 0, 0, 1, 2, 3]), np.array([0, 1, 2, 0, 1, 2])
    rates = max_min_rates(flow, link, 5, np.array([10.0, 4.0, 5.0]))
    np.testing.assert_allclose(rates, [2, 8, 2, 3, np.inf])


def test_one_flow_and_two_on_a_link():
    switch = nvswitch(4, bandwidth=10.0)
    np.testing.assert_allclose(_arrivals(switch, [0], [1], 50.0), [5])
    # Both leave rank 0 at half speed; the second is alone from then on.
    np.testing.assert_allclose(_arrivals(switch, [0, 0], [1, 2], [10.0, 30.0]), [2, 4])
    np.testing.assert_allclose(_arrivals(switch, [0, 2], [1, 3], 50.0), [5, 5])
    np.testing.assert_allclose(_arrivals(switch, [0], [0], 50.0), [0])


def test_ring_on_a_ring_takes_one_link_each():
    ranks = np.arange(6)
    ring = torus((6,), bandwidth=10.0)
    np.testing.assert_allclose(_arrivals(ring, ranks, (ranks + 1) % 6, 50.0), np.full(6, 5.0))
    # Two ranks on: each link carries two transfers.
    np.testing.assert_allclose(_arrivals(ring, ranks, (ranks + 2) % 6, 50.0), np.full(6, 10.0))


def test_fat_tree_is_as_slow_as_its_oversubscribed_leaves():
    src, dst = np.arange(32), np.arange(32) + 32
    even = _arrivals(fat_tree(64), src, dst, 50e9)
    np.testing.assert_allclose(even, np.ones(32))
    np.testing.assert_allclose(
        _arrivals(fat_tree(64, oversubscription=4), src, dst, 50e9), 4 * even
    )
    inside = fat_tree(64, oversubscription=4)
    np.testing.assert_allclose(_arrivals(inside, [0], [1], 450e9), [1])
    np.testing.assert_allclose(_arrivals(inside, [0], [8], 50e9), [1])


def test_rails_are_reached_through_the_node():
    rails = rail_optimized(16)
    assert len(rails.route(np.array([0]), np.array([8]))[1]) == 2  # the same rail: NICs only
    assert len(rails.route(np.array([0]), np.array([9]))[1]) == 4  # another: NVLink, then NICs
    # Ranks 0 and 1 both send to rail 1: its NIC is shared, which it is not in a fat tree.
    np.testing.assert_allclose(_arrivals(rails, [0, 1], [9, 9], 50e9), [2, 2])
    np.testing.assert_allclose(_arrivals(rails, [0, 1], [8, 9], 50e9), [1, 1])


@pytest.mark.parametrize("shape", [(5,), (4, 4), (3, 4), (2, 3, 4)])
def test_torus_takes_the_shorter_way_in_each_dimension(shape):
    ranks = int(np.prod(shape))
    src, dst = (x.ravel() for x in np.indices((ranks, ranks)))
    apart = np.abs(np.array(np.unravel_index(src, shape)) - np.array(np.unravel_index(dst, shape)))
    shortest = np.minimum(apart, np.array(shape)[:, None] - apart).sum(0)
    flow, _ = torus(shape).route(src, dst)
    np.testing.assert_array_equal(np.bincount(flow, minlength=len(src)), shortest)


def test_torus_shapes():
    assert torus_shape(64, 2) == (8, 8)
    assert torus_shape(64, 3) == (4, 4, 4)
    assert sorted(torus_shape(128, 2)) == [8, 16]


def test_slowed_rank_slows_its_own_links_only():
    slow = fat_tree(16).slowed(3, 0.5)
    times = _arrivals(slow, [3, 8, 8, 0], [8, 3, 9, 1], [50e9, 50e9, 50e9, 450e9])
    np.testing.assert_allclose(times[[0, 1, 3]], [2, 2, 1])


def test_steps_wait_for_their_flows():
    # Rank 0 computes 3 s, then 1 s once 20 bytes have come at 10 a second: hidden. Rank 1 sends.
    flows = Flows.make([1], [0], 20.0, 0, 1)
    switch = nvswitch(2, bandwidth=10.0)
    course = run(
        np.array([[3.0, 1.0], [0.0, 1.0]]),
        flows,
        *switch.route(flows.src, flows.dst),
        switch.capacity,
    )
    np.testing.assert_allclose(course.begin, [[0, 3, 4], [0, 2, 3]])
    # Not before step 0 has ended: exposed, on both sides.
    late = Flows.make([1], [0], 20.0, 1, 1)
    course = run(
        np.array([[3.0, 1.0], [0.0, 1.0]]), late, *switch.route(late.src, late.dst), switch.capacity
    )
    np.testing.assert_allclose(course.begin, [[0, 5, 6], [0, 5, 6]])
    with pytest.raises(RuntimeError, match="never|waits"):
        run(
            np.ones((2, 1)),
            Flows.make([1], [0], 20.0, 1, 0),
            *switch.route(late.src, late.dst),
            switch.capacity,
        )


def test_ring_plan_against_its_closed_form():
    """Equal segments in zigzag: every stage is alike, and takes what is longer, pull or compute."""
    ranks, length = 4, 8 * 4096
    plan = make_plan([length] * ranks, PlanConfig(ranks, length, 4096, method="ring"))
    kernel = KernelModel(100.0, 0.0, 0.0)
    hardware = Hardware("plain", 100.0, kernel, kernel, launch_seconds=0.0, reserved=0.0)
    config = plan.config
    pairs = ranks * length * (length + 1) / 2 / ranks
    local = ranks * (2 * (length // (2 * ranks)) ** 2 + length // (2 * ranks))
    per_pair = 4 * config.num_q_heads * config.head_dim / 100e12
    stage = (pairs - local) / (ranks - 1) * per_pair
    pull = length * config.kv_bytes_per_token / 10e9
    assert pull < stage
    done = simulate(plan, nvswitch(ranks, 10e9), hardware)
    first = max(local * per_pair, pull)
    assert done.makespan == pytest.approx(first + (ranks - 1) * stage, rel=2e-3)
    apart = simulate(plan, nvswitch(ranks, 10e9), hardware, overlap=False)
    serial = local * per_pair + (ranks - 1) * (stage + pull)
    assert apart.makespan == pytest.approx(serial, rel=2e-3)
    assert done.kernel_share == pytest.approx(pairs * per_pair / done.makespan)
    slow = simulate(plan, nvswitch(ranks, 1e9), hardware)
    assert slow.makespan == pytest.approx(10 * pull * (ranks - 1) + stage, rel=2e-3)


def test_kernel_models_are_the_fit_of_what_was_measured():
    for benchmark, model in (
        ("attention_forward", H200.forward),
        ("attention_backward", H200.backward),
    ):
        got = fit(measured(benchmark))
        assert (model.tflops, model.row, model.diagonal) == (
            round(got.tflops), round(got.row), round(got.diagonal),
        )  # fmt: skip


@pytest.mark.parametrize("ranks", [32, 64])
def test_fcp_is_ahead_of_every_baseline_from_32_ranks(ranks):
    hardware, topology = of_intensity(5920), fat_tree(ranks)
    seqlens = sample_seqlens("lognormal", num_ranks=ranks, tokens_per_rank=TOKENS, seed=0)
    for backward in (False, True):
        mfu = {}
        for method in ("fcp", "ring", "bytescale", "wlb", "magi"):
            config = PlanConfig(ranks, TOKENS, 4096, method=method, transport="static")
            moves = "hidden" if method in ("fcp", "magi") else "none"
            plan = make_plan(seqlens, config)
            done = simulate(plan, topology, hardware, backward=backward, reshuffle=moves)
            mfu[method] = done.mfu
        assert max(mfu, key=lambda method: mfu[method]) == "fcp", mfu


def test_each_part_of_fcp_helps():
    hardware, topology = of_intensity(5920), fat_tree(64)
    seqlens = sample_seqlens("lognormal", num_ranks=64, tokens_per_rank=TOKENS, seed=0)
    one, stages = (
        make_plan(seqlens, PlanConfig(64, TOKENS, 4096, transport="static", coalesce=rounds))
        for rounds in (1, 16)
    )
    ladder = [
        (one, dict(overlap=False, matched=False, reshuffle="exposed")),
        (one, dict(matched=False, reshuffle="exposed")),
        (one, dict(reshuffle="exposed")),
        (stages, dict(reshuffle="exposed")),
        (stages, dict(reshuffle="hidden")),
    ]
    mfu = [simulate(plan, topology, hardware, **options).mfu for plan, options in ladder]
    assert mfu == sorted(mfu), mfu


def test_256_ranks_take_seconds():
    seqlens = sample_seqlens("lognormal", num_ranks=256, tokens_per_rank=TOKENS, seed=1)
    plan = make_plan(seqlens, PlanConfig(256, TOKENS, 4096))
    started = time.perf_counter()
    simulate(plan, fat_tree(256))
    assert time.perf_counter() - started < 20  # 1 to 2 s on an idle core


def test_trace_and_links_hold_what_was_sent():
    seqlens = sample_seqlens("lognormal", num_ranks=16, tokens_per_rank=TOKENS, seed=0)
    plan = make_plan(seqlens, PlanConfig(16, TOKENS, 4096, transport="static"))
    done = simulate(plan, nvswitch(16), reshuffle="hidden")
    sent = np.bincount(done.flows.src, done.flows.size, 16)
    np.testing.assert_allclose(done.link_bytes[:16], sent)
    assert (done.link_use <= 1 + 1e-9).all()
    events = [e for e in trace(done)["traceEvents"] if e["ph"] == "X"]
    computing = sum(e["dur"] for e in events if e["tid"] == 0) / 1e6
    spent = (done.course.end - done.course.begin[:, :-1]).sum()
    assert computing == pytest.approx(spent)
    assert {e["pid"] for e in events} == set(range(16))


def test_what_does_not_fit_together_is_refused():
    plan = make_plan([4096] * 8, PlanConfig(8, 4096, 512))
    with pytest.raises(ValueError, match="topology joins 16 ranks, plan has 8"):
        simulate(plan, fat_tree(16))
    with pytest.raises(ValueError, match="reshuffle must be one of"):
        simulate(plan, fat_tree(8), reshuffle="later")
    with pytest.raises(ValueError, match="rank_speeds must be 8 positive numbers"):
        simulate(plan, fat_tree(8), rank_speeds=np.zeros(8))
    with pytest.raises(ValueError, match="multiple of ranks_per_node"):
        fat_tree(12)


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_command_line(topology, tmp_path, capsys):
    arguments = (
        "simulate --workload lognormal --num-ranks 8,16 --methods fcp,ring --json --topology"
    )
    plot, events = tmp_path / "gantt.png", tmp_path / "trace.json"
    assert main([*arguments.split(), topology, "--plot", str(plot), "--trace", str(events)]) == 0
    records = json.loads(capsys.readouterr().out)["simulations"]
    assert [(r["method"], r["num_ranks"]) for r in records] == [
        (method, ranks) for ranks in (8, 16) for method in ("fcp", "ring")
    ]
    assert all(0 < r["mfu_forward"] < 0.65 and r["busiest_link"] <= 1 for r in records)
    assert plot.stat().st_size > 10_000 and json.loads(events.read_text())["traceEvents"]
