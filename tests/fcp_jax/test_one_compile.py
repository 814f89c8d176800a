"""Batches of every workload share one program."""

import functools

import jax
import numpy as np
import pytest
from parity import cp_mesh, operands
from reference import relative_error

import fcp_jax as fcp
from fcp_jax.workloads import WORKLOADS, sample_seqlens


def program(plan):
    """What jit compiles for: static parts and table shapes."""
    return jax.tree.structure(plan), tuple(leaf.shape for leaf in jax.tree.leaves(plan))


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("ranks", "batches"), [(8, 100), (256, 30)])
def test_batches_of_a_workload_are_one_program(ranks, batches, workload):
    size = dict(num_ranks=ranks, tokens_per_rank=32768)
    config, buckets = fcp.PlanConfig(**size), fcp.PlanBuckets()

    def plan(seed):
        return fcp.make_plan(sample_seqlens(workload, seed=seed, **size), config)

    buckets.reserve(plan(1000 + seed) for seed in range(16))
    programs = {program(buckets.pad(plan(seed))) for seed in range(batches)}
    assert len(programs) == 1 + buckets.num_growths <= 2


def test_forward_backward_and_dispatch_are_traced_once_and_equal_static():
    ranks, tokens = 8, 128
    size = dict(num_ranks=ranks, tokens_per_rank=tokens)
    mesh = cp_mesh(ranks)
    traces = {"step": 0, "dispatch": 0}

    def step(q, k, v, dout, plan):
        traces["step"] += 1
        out, pullback = jax.vjp(lambda *x: fcp.attention(*x, plan, mesh=mesh), q, k, v)
        return out, *pullback(dout)

    def dispatch(x, plan):
        traces["dispatch"] += 1
        return fcp.dispatch(x, plan, mesh=mesh)

    run, move = jax.jit(step), jax.jit(dispatch)
    args = operands(np.random.default_rng(0), ranks * tokens, (2, 1), 8)
    config = fcp.PlanConfig(**size, block_size=64, coalesce=4)
    buckets = fcp.PlanBuckets()
    batches = [
        np.minimum(sample_seqlens(name, seed=seed, **size), ranks * tokens)
        for seed in range(6)
        for name in ("uniform", "lognormal")
    ] + [np.diff(np.linspace(0, ranks * tokens, n + 1).astype(int)) for n in (1, 9, 77, 300)]
    make = functools.partial(fcp.make_plan, config=config)
    buckets.reserve(map(make, batches))
    for i, seqlens in enumerate(batches):
        plan = buckets.pad(make(seqlens))
        got = run(*args, plan)
        back = fcp.undispatch(move(args[0], plan), plan, mesh=mesh)
        np.testing.assert_array_equal(back, args[0])  # these batches have no padding
        if i in (0, len(batches) - 2):
            static = fcp.PlanConfig(**size, block_size=64, coalesce=4, transport="static")
            want = jax.jit(functools.partial(step))(*args, fcp.make_plan(seqlens, static))
            traces["step"] -= 1
            for x, y in zip(got, want, strict=True):
                assert relative_error(x, y) < 1e-6
    assert traces == {"step": 1, "dispatch": 1}
