"""What `fcp.explain` says."""

import jax
import jax.numpy as jnp
import pytest

import fcp_jax as fcp


def test_it_names_kernel_and_transport_with_reasons():
    plan = fcp.make_plan([1000], fcp.PlanConfig(8, 128, block_size=128))
    q, k = (jax.ShapeDtypeStruct((1024, heads, 64), jnp.bfloat16) for heads in (4, 2))
    kernel, transport = fcp.explain(q, k, plan).splitlines()
    assert kernel.startswith("kernel xla: mosaic_gpu is not used, as it needs a GPU")
    assert transport.startswith("transport xor: ") and plan.stats.transport_reason in transport
    assert fcp.explain(q, k, plan, implementation="xla").startswith("kernel xla: asked for\n")
    with pytest.raises(ValueError, match="'mosaic_gpu' cannot be used: it needs bfloat16"):
        fcp.explain(
            jax.ShapeDtypeStruct(q.shape, jnp.float32), k, plan, implementation="mosaic_gpu"
        )
