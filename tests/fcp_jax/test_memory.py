"""The memory of one rank, from compiled programs, against the formula of docs/runtime.md."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from memory import backward_bytes, forward_bytes
from parity import cp_mesh

import fcp_jax as fcp
from fcp_jax import staged_attention
from fcp_jax.mesh import resolve_axes

HEADS, KV_HEADS, DIM = 4, 2, 128


@pytest.mark.parametrize("transport", ["xor", "static"])
def test_memory_is_within_the_formula_however_many_stages_run(transport):
    config = fcp.PlanConfig(8, 128, block_size=64, transport=transport, coalesce=4)
    plan, mesh = fcp.make_plan([1024], config), cp_mesh(8)
    rows = 8 * plan.shape.plan_rows_per_rank

    def placed(dtype, *features):
        sharding = NamedSharding(mesh, P(None, "cp"))
        return jax.ShapeDtypeStruct((1, rows, *features), dtype, sharding=sharding)

    q, k = (placed(jnp.float32, heads, DIM) for heads in (HEADS, KV_HEADS))
    lse = placed(jnp.float32, HEADS)
    call = staged_attention._Call(resolve_axes(plan, mesh, "cp", "dp", "tp"), 1.0, None, False)

    def used(lowered):
        return lowered.compile().memory_analysis().temp_size_in_bytes

    forward = used(staged_attention._forward.lower(call, q, k, k, plan))
    sizes = plan.shape, plan.send_slot.shape[3], HEADS, KV_HEADS, DIM, 4
    assert 0.6 * forward_bytes(*sizes) < forward <= forward_bytes(*sizes)
    backward = used(staged_attention._backward.lower(call, q, k, k, q, lse, q, plan=plan))
    assert 0.6 * backward_bytes(*sizes) < backward <= backward_bytes(*sizes)
    if transport != "static":
        many = fcp.pad_plan(plan, (0, 10 * plan.table_sizes[1], 0, 0, 0))
        assert used(staged_attention._forward.lower(call, q, k, k, many)) < forward + 16384
