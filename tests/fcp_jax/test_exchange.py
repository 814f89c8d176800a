"""The pipeline of stages: what runs, in which order, and what may overlap."""

import dataclasses
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import assert_close, cp_mesh, operands, value_and_grads
from reference import dense_attention, segment_ids_of

import fcp_jax as fcp
from fcp_jax import exchange, mesh, staged_attention
from fcp_jax.exchange import run_pipeline

TRIPS = [[1, 0, 0], [1, 1, 1], [2, 0, 3], [1, 4, 0], [1, 0, 1], [3, 2, 2], [2, 2, 0]]


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

    def compute(index, rounds, back, arrivals, log):
        if back:
            log = finish(index - 1, back, log)
        return jnp.int32(sum(rounds)), logged(log, jnp.int32(index), arrivals, jnp.int32(0))

    def pull(index, rounds, _):
        return jnp.int32(sum(rounds))

    def finish(index, back, log):
        return logged(log, jnp.int32(index), jnp.int32(0), jnp.int32(sum(back)))

    @jax.jit
    def run(trips):
        return run_pipeline(groups, trips, shape, local, compute, (pull, finish))

    log = np.asarray(run(jnp.array(trips, jnp.int32)))
    log = log[1 : log[0, 0] + 1].tolist()
    computed, sent = ([x for x in log if (x[i] == 0)] for i in (2, 1))
    assert computed == [[i, sum(r), 0] for i, r in enumerate(stages)]
    assert sent == [[i, 0, sum(r)] for i, r in enumerate(stages)]
    assert log.index(computed[-1]) < log.index(sent[-1])


def test_a_batch_runs_only_the_permutes_that_its_plan_counts(monkeypatch):
    counts, lock = {"pull": 0, "push": 0}, threading.Lock()
    transfer = staged_attention.transfer

    def counted(payloads, rounds, *args, back=False):
        def count():
            with lock:
                counts["push" if back else "pull"] += len(rounds)

        jax.debug.callback(count)
        return transfer(payloads, rounds, *args, back=back)

    monkeypatch.setattr(staged_attention, "transfer", counted)
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
    first = widths[0]
    if (
        transport == "static"
    ):  # pulls of both directions, and in backward what the stage before sends
        pulls, pushes = [*widths, 0], [0, 0, *widths[:-1]]
        want = widths + [a + b for a, b in zip(pulls, pushes, strict=True)]
    else:  # a branch for the next group in forward, and for the groups on both sides in backward
        in_a_row = [a + b for a, b in itertools.pairwise(widths)]
        want = [first, *widths] + [first, *(2 * w for w in widths), *in_a_row, first]
    assert sorted(n for n, _ in found) == sorted(x for x in want if x)


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What `lax.ragged_all_to_all` documents, from all_gather; NaN where ranks disagree."""
    rank = jax.lax.axis_index(axis_name)
    tables = operand, input_offsets, send_sizes, output_offsets
    operands, begins, sizes, lands = (jax.lax.all_gather(x, axis_name) for x in tables)
    row = jnp.arange(len(operand))
    for source in range(len(operands)):
        at = jnp.where(row < sizes[source, rank], lands[source, rank] + row, len(output))
        rows = operands[source, jnp.minimum(begins[source, rank] + row, len(operand) - 1)]
        output = output.at[at].set(rows, mode="drop")
    if not jnp.issubdtype(output.dtype, jnp.floating):
        return output
    return jnp.where(jnp.all(sizes[:, rank] == recv_sizes), output, jnp.nan)


@pytest.fixture
def emulated_ragged(monkeypatch):
    monkeypatch.setattr(exchange, "_ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(mesh, "_RAGGED_PLATFORMS", ("cpu",))


def test_ragged_equals_dense_and_dispatches_like_one_device(emulated_ragged):
    config = fcp.PlanConfig(8, 104, block_size=64, coalesce=3, transport="ragged")
    args = operands(np.random.default_rng(1), config.capacity)
    for lengths in ([832], [333, 1, 64, 65, 0, 128, 5, 20], [100] * 7, [7] * 100, []):
        plan = fcp.make_plan(lengths, config)
        fcp.validate_plan(plan)
        assert plan.stats.num_rounds == plan.stats.max_degree
        assert plan.stats.wire_bytes_max == plan.stats.payload_bytes_max
        plan = fcp.pad_plan(plan, (128, 6, 8, 12, 4))
        moved = fcp.dispatch(args[0], plan, mesh=cp_mesh(8))
        np.testing.assert_array_equal(moved, fcp.dispatch(args[0], plan))
        ids = segment_ids_of(fcp.Segments.from_seqlens(lengths), config.capacity)
        assert_close(value_and_grads(*args, plan, cp_mesh(8)), dense_attention(*args, ids, True))


def test_ragged_over_rows_of_very_unequal_work(emulated_ragged):
    mesh = jax.make_mesh((2, 4), ("dp", "cp"))
    config = fcp.PlanConfig(4, 100, block_size=64, coalesce=2, transport="ragged")
    rows = [[397], [5] * 20]
    plan = fcp.make_batch_plan(rows, config)
    fcp.validate_plan(plan)
    args = [operands(np.random.default_rng(i), config.capacity) for i in range(2)]
    got = value_and_grads(*(np.stack(x) for x in zip(*args, strict=True)), plan, mesh)
    for i, (own, row) in enumerate(zip(args, rows, strict=True)):
        ids = segment_ids_of(fcp.Segments.from_seqlens(row), config.capacity)
        assert_close([np.asarray(x)[i] for x in got], dense_attention(*own, ids, True))


def test_ragged_needs_gpus():
    config = fcp.PlanConfig(2, 64, block_size=64, transport="ragged")
    plan = fcp.make_plan([100], config)
    x = jnp.zeros((128, 2, 8))
    for call in (
        lambda: fcp.attention(x, x, x, plan, mesh=cp_mesh(2)),
        lambda: fcp.dispatch(x, plan, mesh=cp_mesh(2)),
    ):
        with pytest.raises(ValueError, match='"ragged" runs on GPUs only.*platform .cpu.'):
            call()


def test_a_ragged_plan_with_a_wrong_order_is_found():
    plan = fcp.make_plan([1000], fcp.PlanConfig(8, 128, block_size=64, transport="ragged"))
    for name in ("recv_block", "send_slot", "dispatch_recv", "dispatch_send"):
        table = getattr(plan, name).copy()
        stage = table[0, 0, 0]
        first, second = np.unique(stage, axis=0, return_index=True)[1][-2:]
        stage[[first, second]] = stage[[second, first]]
        with pytest.raises(fcp.InvalidPlanError):
            fcp.validate_plan(dataclasses.replace(plan, **{name: table}))
