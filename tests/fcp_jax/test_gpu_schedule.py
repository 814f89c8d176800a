"""Overlap, read off programs compiled for H200s: needs the CUDA plugin, but no GPU.

Run by `make check-gpu-schedule`. In the strings below S starts a transfer, D waits for it, P is a
synchronous one and W a loop: every kernel call is one here, as are small index searches.
"""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory import backward_bytes, forward_bytes

import fcp_jax as fcp
from fcp_jax import staged_attention
from fcp_jax.mesh import resolve_axes, table_specs
from fcp_jax.workloads import sample_seqlens

pytestmark = pytest.mark.gpu_schedule
TARGET = pathlib.Path(__file__).parents[1] / "helpers" / "h200.txtpb"
MARKS = {
    "collective-permute-start(": "S",
    "collective-permute-done(": "D",
    "collective-permute(": "P",
    "ragged-all-to-all-start(": "S",
    "ragged-all-to-all-done(": "D",
    "ragged-all-to-all(": "P",
    " while(": "W",
}
TOKENS = 4096


def mesh_of(num_ranks):
    hosts = max(num_ranks // 8, 1)
    topology = topologies.get_topology_desc(
        "",
        platform="cuda",
        target_config=TARGET.read_text(),
        topology=f"1x{hosts}x{num_ranks // hosts}",
    )
    return Mesh(np.array(topology.devices), ("cp",), axis_types=(AxisType.Auto,))


def placed_tables(plan, axes):
    def placed(table, spec):
        sharding = NamedSharding(axes.mesh, spec)
        return jax.ShapeDtypeStruct(table.shape, table.dtype, sharding=sharding)

    return jax.tree.map(placed, plan, table_specs(plan, axes))


def options(plan):
    return fcp.gpu_compiler_options(plan) | {"xla_gpu_autotune_level": 0}


def compile_for(num_ranks, **config):
    mesh = mesh_of(num_ranks)
    config = fcp.PlanConfig(num_ranks, TOKENS, block_size=512, **config)
    seqlens = sample_seqlens("lognormal", num_ranks=num_ranks, tokens_per_rank=TOKENS)
    plan = fcp.make_plan(seqlens, config)

    def placed(heads):
        sharding = NamedSharding(mesh, P("cp"))
        size = (num_ranks * TOKENS, heads, 128)
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding)

    q, k = placed(8), placed(2)
    tables = placed_tables(plan, resolve_axes(plan, mesh, "cp", "dp", "tp"))

    def step(q, k, v, dout, plan):
        out, pullback = jax.vjp(lambda *x: fcp.attention(*x, plan, mesh=mesh), q, k, v)
        return out, pullback(dout * out)  # as after a loss: backward cannot start before the end

    return plan, jax.jit(step).lower(q, k, k, q, tables).compile(compiler_options=options(plan))


def schedules(text):
    """The marks of every computation that has transfers; the entry comes last."""
    found = []
    for body in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .*\{)", text):
        lines = [line for line in body.splitlines()[1:] if "=" in line]
        marks = [next((m for key, m in MARKS.items() if key in line), "") for line in lines]
        if set(marks) & {"S", "P"}:
            found.append("".join(marks))
    return found


@pytest.mark.parametrize("num_ranks", [8, 32, 64])
def test_transfers_start_before_the_kernel_and_finish_after_it(num_ranks):
    plan, compiled = compile_for(num_ranks)
    *bodies, entry = schedules(compiled.as_text())
    # Branches of forward are for the next group; those of backward for the group before and the
    # next one, the same or two in a row, and for the first stage. XLA joins the rounds of a group
    # that share a permutation into one transfer.
    stages = [body for body in bodies if "W" in body]
    assert all(re.fullmatch(r"S+W+D+", body) for body in stages)
    widths = [len(set(rounds)) for rounds in plan.shape.groups]
    two_ways = [2 * n for n in widths] + [a + b for a, b in itertools.pairwise(widths)]
    assert sorted(body.count("S") for body in stages) == sorted(widths + two_ways + widths[:1])
    assert all(body.count("S") == body.count("D") for body in stages)
    assert len(re.findall(r"SW+D", entry)) == 2  # stage 0 of forward and of backward


def test_ragged_stages_overlap_too():
    _, compiled = compile_for(8, transport="ragged")
    *bodies, entry = schedules(compiled.as_text())
    assert "ragged-all-to-all-start" in compiled.as_text()
    assert "collective-permute" not in compiled.as_text()
    # Forward; the first stage of backward; pull and push: a transfer each, whatever they bring.
    stages = [body for body in bodies if "W" in body]
    assert all(re.fullmatch(r"S+W+D+", body) for body in stages)
    assert sorted(body.count("S") for body in stages) == [1, 1, 2]
    assert len(re.findall(r"SW+D", entry)) == 2


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_memory_of_one_of_64_ranks_is_within_the_formula(implementation):
    ranks, tokens, heads, kv_heads, dim = 64, 32768, 64, 8, 128
    mesh = mesh_of(ranks)
    config = fcp.PlanConfig(ranks, tokens)
    seqlens = sample_seqlens("lognormal", num_ranks=ranks, tokens_per_rank=tokens)
    plan = fcp.make_plan(seqlens, config)
    axes = resolve_axes(plan, mesh, "cp", "dp", "tp")
    call = staged_attention._Call(axes, 1.0, implementation, False)

    def placed(dtype, *features):
        sharding = NamedSharding(mesh, P(None, "cp"))
        rows = ranks * plan.shape.plan_rows_per_rank
        return jax.ShapeDtypeStruct((1, rows, *features), dtype, sharding=sharding)

    q, k = (placed(jnp.bfloat16, n, dim) for n in (heads, kv_heads))
    lse = placed(jnp.float32, heads)
    tables = placed_tables(plan, axes)
    forward = staged_attention._forward.lower(call, q, k, k, tables)
    backward = staged_attention._backward.lower(call, q, k, k, q, lse, q, plan=tables)
    sizes = plan.shape, plan.send_slot.shape[3], heads, kv_heads, dim, 2
    for program, formula in ((forward, forward_bytes), (backward, backward_bytes)):
        allowed = formula(*sizes, hopper=implementation == "mosaic_gpu")
        used = program.compile(compiler_options=options(plan)).memory_analysis()
        assert 0.6 * allowed < used.temp_size_in_bytes <= allowed


def test_a_program_for_256_ranks_holds_four_kernels():
    ranks, tokens = 256, 32768
    mesh = mesh_of(ranks)
    seqlens = sample_seqlens("lognormal", num_ranks=ranks, tokens_per_rank=tokens)
    plan = fcp.make_plan(seqlens, fcp.PlanConfig(ranks, tokens))
    kind = dict(mesh=mesh, layout="plan", implementation="mosaic_gpu")

    def step(q, k, v, dout, plan):
        return jax.vjp(lambda *x: fcp.attention(*x, plan, **kind), q, k, v)[1](dout)

    rows = ranks * plan.shape.plan_rows_per_rank
    sharding = NamedSharding(mesh, P("cp"))
    q, k = (
        jax.ShapeDtypeStruct((rows, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (64, 8)
    )
    tables = placed_tables(plan, resolve_axes(plan, mesh, "cp", "dp", "tp"))
    text = jax.jit(step).lower(q, k, k, q, tables).as_text()
    assert text.count("custom_call @mosaic_gpu_v2(") == 4
    # A branch for each group and for the last stage; in backward also for two groups in a row and
    # for the first stage; local work twice.
    calls = len(re.findall(r"call @block_attention\w*\(", text))
    assert calls == 3 * len(plan.shape.groups) + 4 < ranks / 6
