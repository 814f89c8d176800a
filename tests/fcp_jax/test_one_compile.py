"""Batches of every workload share one program."""

import collections
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from packed_lm.model import Decoder, ModelConfig, next_token_loss
from parity import cp_mesh, operands
from reference import relative_error

import fcp_jax as fcp
from fcp_jax.workloads import WORKLOADS, sample_seqlens


def program(plan):
    """What jit compiles for: static parts and table shapes."""
    return jax.tree.structure(plan), tuple(leaf.shape for leaf in jax.tree.leaves(plan))


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("ranks", "batches", "ahead"), [(8, 100, 16), (256, 12, 8)])
def test_batches_of_a_workload_are_one_program(ranks, batches, ahead, workload):
    size = dict(num_ranks=ranks, tokens_per_rank=32768)
    config, buckets = fcp.PlanConfig(**size), fcp.PlanBuckets()

    def plan(seed):
        return fcp.make_plan(sample_seqlens(workload, seed=seed, **size), config)

    buckets.reserve(plan(1000 + seed) for seed in range(ahead))
    padded = [buckets.pad(plan(seed)) for seed in range(batches)]
    assert len({program(each) for each in padded}) == 1 + buckets.num_growths <= 2
    if ranks == 8:  # as many devices as there are
        mesh = jax.make_mesh((1, ranks), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
        counts, traces = programs(mesh, config.capacity)
        for each in padded:
            for trace in traces:
                trace(each)
        assert len(counts) == 4 and set(counts.values()) == {1 + buckets.num_growths}


def programs(mesh, num_tokens):
    """(trace counts, {name: trace with a plan}) of what a training run compiles."""
    counts = collections.Counter()
    model = ModelConfig(features=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
    with jax.set_mesh(mesh):
        decoder = nnx.eval_shape(lambda: Decoder(model, mesh, rngs=nnx.Rngs(0)))
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(decoder, optax.adamw(1e-3), wrt=nnx.Param))
    structure, state = nnx.split((decoder, optimizer))
    q, k = (jax.ShapeDtypeStruct((num_tokens, n, 16), np.float32) for n in (2, 1))
    names = {"tokens": np.int32, "targets": np.int32, "positions": np.int32}
    names |= {"segment_ids": np.int32, "weights": np.float32}
    batch = {n: jax.ShapeDtypeStruct((1, num_tokens), kind) for n, kind in names.items()}

    def attend(plan, q, k, v):
        return fcp.attention(q, k, v, plan, mesh=mesh)

    def backward(plan, q, k, v):
        return jax.grad(lambda q: attend(plan, q, k, v).sum())(q)

    def train_step(plan, state, batch):
        model, optimizer = nnx.merge(structure, state)
        loss_and_grad = nnx.value_and_grad(next_token_loss, has_aux=True)
        (loss, _), grads = loss_and_grad(model, batch, plan)
        optimizer.update(model, grads)
        return loss, nnx.state((model, optimizer))

    def counted(function, *operands):
        def body(plan, *operands):
            counts[function.__name__] += 1
            return function(plan, *operands)

        jitted = jax.jit(body)
        return lambda plan: jitted.trace(plan, *operands)

    def dispatch(plan, x):
        return fcp.undispatch(fcp.dispatch(x, plan, mesh=mesh), plan, mesh=mesh)

    return counts, [
        counted(attend, q, k, k),
        counted(backward, q, k, k),
        counted(dispatch, q),
        counted(train_step, state, batch),
    ]


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
