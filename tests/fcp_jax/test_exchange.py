"""The pipeline of stages: what runs, in which order, and what may overlap."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import assert_close, cp_mesh, operands, value_and_grads
from reference import dense_attention, segment_ids_of

import fcp_jax as fcp
from fcp_jax import staged_attention
from fcp_jax.exchange import run_pipeline

TRIPS = [[1, 0, 0], [1, 1, 1], [2, 0, 3], [1, 4, 0], [1, 0, 1]]


@pytest.mark.parametrize("trips", TRIPS, ids=str)
def test_every_stage_runs_once_with_its_own_rounds_and_groups_without_trips_do_not(trips):
    groups = ((1,), (2, 3), (4, 5, 6))
    stages = [rounds for rounds, times in zip(groups, trips, strict=True) for _ in range(times)]
    shape = fcp.make_plan([5], fcp.PlanConfig(8, 64, block_size=64)).shape

    def logged(log, *entry):
        return (
            jax.lax.dynamic_update_index_in_dim(log, jnp.stack(entry), log[0, 0] + 1, 0)
            .at[0, 0]
            .add(1)
        )

    def local(rounds):
        return jnp.int32(sum(rounds)), jnp.zeros((32, 3), jnp.int32)

    def pull(index, rounds, arrivals, log):
        return jnp.int32(sum(rounds)), logged(log, jnp.int32(index), arrivals, jnp.int32(0))

    def push(index, rounds, arrivals, log):
        return logged(log, jnp.int32(index), arrivals, jnp.int32(sum(rounds)))

    @jax.jit
    def run(trips):
        return run_pipeline(groups, trips, shape, local, pull, push)

    log = np.asarray(run(jnp.array(trips, jnp.int32)))
    want = [[i, sum(r), back] for i, r in enumerate(stages) for back in (0, sum(r))]
    assert log[1 : log[0, 0] + 1].tolist() == want


def test_a_batch_runs_only_the_permutes_that_its_plan_counts(monkeypatch):
    counts, lock = {"pull": 0, "push": 0}, threading.Lock()
    send = staged_attention.send

    def count(way):
        with lock:
            counts[way] += 1

    def counted(payload, round_, shape, axes, *, back=False):
        jax.debug.callback(count, "push" if back else "pull")
        return send(payload, round_, shape, axes, back=back)

    monkeypatch.setattr(staged_attention, "send", counted)
    tokens = 96  # of no other test: programs are cached
    config = fcp.PlanConfig(8, tokens, block_size=64, coalesce=2, transport="xor")
    args = operands(np.random.default_rng(0), config.capacity)
    ran = []
    for lengths in ([100] * 7, [8 * tokens]):
        plan = fcp.pad_plan(fcp.make_plan(lengths, config), (16, 32, 16, 32, 16))
        counts.update(pull=0, push=0)
        got = jax.block_until_ready(value_and_grads(*args, plan, cp_mesh(8)))
        jax.effects_barrier()
        assert counts["push"] == 8 * plan.stats.num_rounds
        assert counts["pull"] == 2 * counts["push"]  # forward and backward
        ids = segment_ids_of(fcp.Segments.from_seqlens(lengths), config.capacity)
        assert_close(got, dense_attention(*args, ids, True))
        ran.append((plan.stats.num_rounds, (plan.trips == 0).any()))
    (few, skips), (many, _) = ran
    assert skips and few < many


def overlaps(jaxpr):
    """(transfers, kernel loops) that each branch or body joins in one optimization barrier."""
    found = []
    for eqn in jaxpr.eqns:
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += overlaps(inner)
    moved, worked = {}, {}  # variable -> number of transfers, loops it depends on
    for eqn in jaxpr.eqns:
        variables = [v for v in eqn.invars if not hasattr(v, "val")]
        before = [frozenset().union(*(of.get(v, ()) for v in variables)) for of in (moved, worked)]
        name = eqn.primitive.name
        if name == "ppermute":
            before[0] |= {id(eqn)}
        elif name == "while" or (name in ("jit", "pjit") and "while" in str(eqn.params["jaxpr"])):
            before[1] |= {id(eqn)}
            assert not before[0], "a kernel waits for a transfer that it could hide"
        elif name == "optimization_barrier":
            found.append((len(before[0]), len(before[1])))
            continue
        for v in eqn.outvars:
            moved[v], worked[v] = before
    return found


@pytest.mark.parametrize("transport", ["xor", "static"])
def test_each_stage_joins_the_next_transfers_with_its_own_kernel(transport):
    config = fcp.PlanConfig(8, 128, block_size=64, coalesce=2, transport=transport)
    plan = fcp.make_plan([1000], config)
    args = operands(np.random.default_rng(0), config.capacity)
    mesh = cp_mesh(8)

    def step(q, k, v, dout):
        out, pullback = jax.vjp(
            lambda *x: fcp.attention(*x, plan, mesh=mesh, layout="plan"), q, k, v
        )
        return out, pullback(dout)

    rows = [np.resize(x, (8 * plan.shape.plan_rows_per_rank, *x.shape[1:])) for x in args]
    found = [x for x in overlaps(jax.make_jaxpr(step)(*rows).jaxpr) if x[0]]
    widths = [len(rounds) for rounds in plan.shape.groups]
    assert all(kernels for _, kernels in found)
    # Pulls of forward and backward, the first one with local work, and pushes.
    first = [] if transport == "static" else [widths[0]]
    assert sorted(n for n, _ in found) == sorted(2 * (first + widths) + widths)
