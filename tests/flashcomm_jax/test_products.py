"""What picks a product of one rank, and what fused products ask of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flashcomm_jax import FlashCommConfig, collective_matmul
from flashcomm_jax.products import multiply, quantize, quantize_kernel


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_range_of_columns_is_that_part_of_the_product(quantized, implementation):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((6, 8), (8, 10)))
    operand = quantize_kernel(kernel) if quantized else kernel
    options = dict(implementation=implementation)
    part = multiply(x, operand, jnp.float32, columns=(3, 8), **options)
    whole = multiply(quantize(x) if quantized else x, operand, jnp.float32, **options)
    np.testing.assert_allclose(part, whole[:, 3:8], rtol=1e-6)
    np.testing.assert_allclose(whole, x @ kernel, atol=0.2 if quantized else 1e-5)


@pytest.mark.parametrize("side", ["row", "column"])
def test_products_beside_a_transfer_leave_multiprocessors(helpers, monkeypatch, side):
    reserved = []

    def recorded(*operands, reserve_sms=0, **options):
        reserved.append((reserve_sms, options["implementation"]))
        return multiply(*operands, **options)

    monkeypatch.setattr(collective_matmul, "multiply", recorded)
    mesh = helpers.make_mesh({"tp": 4})
    x, kernel = jnp.ones((16, 16)), jnp.ones((16, 16))
    specs = P(None, "tp"), P("tp", None), P("tp", None)
    if side == "column":
        specs = P("tp", None), P(None, "tp"), P(None, "tp")

    def local(x, kernel):
        options = dict(backend="pallas", out_dtype=x.dtype, reserve_sms=16)
        if side == "column":
            return collective_matmul.all_gather_matmul(x, [kernel], "tp", 4, **options)[0]
        return collective_matmul.matmul_reduce_scatter(x, kernel, "tp", 4, **options)

    out = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs[:2], out_specs=specs[2], check_vma=False)
    )(x, kernel)
    np.testing.assert_array_equal(out, 16.0)
    # The first piece of a reduction and the last of a gather have no transfer beside them.
    expected = [0, 16, 16, 16] if side == "row" else [16, 16, 16, 0]
    assert reserved == [(sms, None) for sms in expected]


def test_reserved_multiprocessors_must_be_a_count():
    with pytest.raises(ValueError, match="mmrs_reserve_sms must be an integer >= 0, got -1"):
        FlashCommConfig(mmrs_reserve_sms=-1)
