"""Linear layers on token shards against one float32 device, forward and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from flashcomm_jax import (
    ColumnParallelLinear,
    FlashCommConfig,
    ParallelConfig,
    RowParallelLinear,
    column_parallel,
    gather_tokens,
    quantize_w8a8,
    shard_tokens,
    take_tokens,
    unpad_tokens,
)
from flashcomm_jax.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from flashcomm_jax.products import multiply, quantize, quantize_kernel

IN, MIDDLE, OUT = 8, 16, 12


class Block(nnx.Module):
    """Two column-parallel layers behind one gather, then a row-parallel one. Biases everywhere."""

    def __init__(self, parallel, rngs):
        bias = nnx.initializers.normal(1.0)
        options = dict(parallel=parallel, rngs=rngs, bias_init=bias)
        self.a = ColumnParallelLinear(IN, MIDDLE, **options)
        self.b = ColumnParallelLinear(IN, MIDDLE, **options)
        self.down = RowParallelLinear(MIDDLE, OUT, **options)

    def __call__(self, x, context):
        a, b = column_parallel([self.a, self.b], x, context)
        return self.down(jnp.tanh(a) * b, context)


def reference(state, x):
    a = x @ state["a"]["kernel"] + state["a"]["bias"]
    b = x @ state["b"]["kernel"] + state["b"]["bias"]
    return (jnp.tanh(a) * b) @ state["down"]["kernel"] + state["down"]["bias"]


def pure(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(tree))


# 0 is below every threshold: see test_no_tokens.
CASES = [(*case, "fc1") for case in [(1, 5), (2, 1), (2, 31), (4, 3), (8, 1), (8, 127), (8, 97)]]
CASES += [
    (*case, name)
    for case in [(2, 33), (4, 37), (8, 7), (8, 129)]
    for name in ("fc1", "aiv", "ring")
]


@pytest.mark.parametrize(("tp", "tokens", "name"), CASES)
def test_forward_and_gradients(helpers, name, tp, tokens):
    mesh = helpers.make_mesh({"tp": tp})
    context = helpers.context_for(mesh, tokens, helpers.CONFIGS[name])
    assert context.active == (tp > 1)
    block = Block(context.parallel, nnx.Rngs(1))
    x, dy = (
        np.random.default_rng(i).normal(size=(tokens, size)).astype(np.float32)
        for i, size in enumerate((IN, OUT))
    )
    graph, state = nnx.split(block)

    @jax.jit
    def run(state, x):
        def loss(state, x):
            h = shard_tokens(x, context)
            shards = nnx.merge(graph, state)(h, context)
            y = gather_tokens(shards, context)
            return (y * dy).sum(), (y, shards)

        (_, outs), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
        return *outs, *grads

    y, shards, dstate, dx = run(state, x)
    plain = pure(state)
    want = reference(plain, x)
    assert helpers.relative_error(y, want) < 2e-6
    want_dstate, want_dx = jax.grad(lambda s, x: (reference(s, x) * dy).sum(), (0, 1))(plain, x)
    assert helpers.relative_error(dx, want_dx) < 5e-6
    for got, expected in zip(
        jax.tree.leaves(pure(dstate)), jax.tree.leaves(want_dstate), strict=True
    ):
        assert helpers.relative_error(got, expected) < 5e-6
    if context.active:  # rank r holds rows r * local ..., bias on every one of them
        local = context.padded_local_num_tokens
        for shard in shards.addressable_shards:
            rank = list(mesh.devices.flat).index(shard.device)
            rows = want[rank * local : (rank + 1) * local]
            np.testing.assert_allclose(shard.data[: len(rows)], rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ["off", "fc1", "aiv", "ring"])
def test_rows_over_dp_and_permuted_devices(helpers, name, explicit):
    mesh = helpers.make_mesh(
        {"dp": 2, "tp": 4}, explicit=explicit, permutation=[3, 0, 6, 1, 7, 2, 5, 4]
    )
    context = helpers.context_for(mesh, 9, helpers.CONFIGS[name])
    x = np.random.default_rng(0).normal(size=(2, 9, IN)).astype(np.float32)
    with jax.set_mesh(mesh):
        block = Block(context.parallel, nnx.Rngs(1))
        graph, state = nnx.split(block)

        @jax.jit
        def run(state, x):
            h = shard_tokens(x, context)
            return gather_tokens(nnx.merge(graph, state)(h, context), context)

        y = run(state, x)
    assert helpers.relative_error(y, reference(pure(state), x)) < 2e-6


def test_no_tokens(helpers):
    mesh = helpers.make_mesh({"tp": 4})
    context = helpers.context_for(mesh, 0, helpers.AIV)
    assert not context.active
    block = Block(context.parallel, nnx.Rngs(0))
    y = jax.jit(lambda x: block(shard_tokens(x, context), context))(jnp.zeros((0, IN)))
    assert y.shape == (0, OUT)


def test_zero_rows_stay_zero_without_bias(helpers):
    mesh = helpers.make_mesh({"tp": 4})
    context = helpers.context_for(mesh, 10, helpers.AIV)
    layer = RowParallelLinear(
        MIDDLE, OUT, use_bias=False, parallel=context.parallel, rngs=nnx.Rngs(0)
    )
    quantized = RowParallelLinear(
        MIDDLE, OUT, use_bias=False, parallel=context.parallel, rngs=nnx.Rngs(0)
    )
    quantized.quantize()
    for module in (layer, quantized):
        y = jax.jit(lambda x, module=module: module(x, context))(jnp.zeros((10, MIDDLE)))
        assert (np.asarray(y) == 0).all()


@pytest.mark.parametrize("name", ["off", "fc1", "aiv", "ring"])
@pytest.mark.parametrize("tp", [2, 8])
def test_int8_within_one_percent(helpers, tp, name):
    mesh = helpers.make_mesh({"tp": tp})
    context = helpers.context_for(mesh, 33, helpers.CONFIGS[name])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(33, 64)).astype(np.float32)
    x[5] = 0
    for layer_type in (RowParallelLinear, ColumnParallelLinear):
        layer = layer_type(64, 96, parallel=context.parallel, rngs=nnx.Rngs(0))
        want = x @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
        quantize_w8a8(layer)
        assert layer.kernel.dtype == jnp.int8
        y = unpad_tokens(jax.jit(lambda x, layer=layer: layer(x, context))(x), context)
        assert helpers.relative_error(y, want) < 0.01


def test_int8_ranks_with_very_different_scales(helpers):
    """Summing integers before scaling, or sharing a scale, is off by tens of percent here."""
    mesh = helpers.make_mesh({"tp": 4})
    context = helpers.context_for(mesh, 16, helpers.AIV)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    x *= np.repeat([8.0, 1.0, 3.0, 0.2], 16).astype(np.float32)
    layer = RowParallelLinear(64, 32, use_bias=False, parallel=context.parallel, rngs=nnx.Rngs(0))
    want = x @ np.asarray(layer.kernel[...])
    quantize_w8a8(layer)
    assert helpers.relative_error(jax.jit(lambda x: layer(x, context))(x), want) < 0.01


@pytest.mark.parametrize("backend", ["none", "pallas", "ring"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_collective_products_sum_and_keep_order(helpers, ranks, backend):
    mesh = helpers.make_mesh({"tp": ranks})
    rng = np.random.default_rng(ranks)
    for rows in (1, 2, 5):
        x = rng.normal(size=(ranks * rows, 3 * ranks)).astype(np.float32)
        w = rng.normal(size=(3 * ranks, 2 * ranks)).astype(np.float32)

        def both(x_columns, w_rows, x_rows, w_columns):
            options = dict(backend=backend, out_dtype=jnp.float32)
            down = matmul_reduce_scatter(x_columns, w_rows, "tp", ranks, **options)
            return down, *all_gather_matmul(x_rows, [w_columns] * 2, "tp", ranks, **options)

        rows_spec, columns_spec = P("tp", None), P(None, "tp")
        outs = jax.jit(
            jax.shard_map(
                both,
                mesh=mesh,
                in_specs=(columns_spec, rows_spec, rows_spec, columns_spec),
                out_specs=(rows_spec, columns_spec, columns_spec),
                check_vma=False,
            )
        )(x, w, x, w)
        for out in outs:
            assert helpers.relative_error(out, x.astype(np.float64) @ w) < 1e-6


def test_float32_sums_are_more_accurate(helpers):
    mesh = helpers.make_mesh({"tp": 8})
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 256)), jnp.bfloat16)
    errors = {}
    for name, config in dict(ring=helpers.RING, float32=helpers.FLOAT32_SUMS).items():
        context = helpers.context_for(mesh, 16, config)
        layer = RowParallelLinear(
            256, 32, parallel=context.parallel, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
        y = jax.jit(lambda x, c=context, layer=layer: layer(x, c))(x)
        assert y.dtype == jnp.bfloat16
        kernel = np.asarray(layer.kernel[...].astype(jnp.bfloat16), np.float64)
        want = np.asarray(x, np.float64) @ kernel
        errors[name] = helpers.relative_error(y, want)
    assert errors["float32"] < 0.0025 < errors["ring"] < 0.01


def test_take_tokens(helpers):
    mesh = helpers.make_mesh({"dp": 2, "tp": 4})
    context = helpers.context_for(mesh, 10, helpers.FC1)
    x = np.random.default_rng(0).normal(size=(2, 10, 3)).astype(np.float32)
    index = np.array([[9, 0, 3], [5, 5, 8]], np.int32)
    got = take_tokens(shard_tokens(x, context), jnp.asarray(index), context)
    np.testing.assert_array_equal(got, np.take_along_axis(x, index[..., None], 1))


def test_quantize_bounds_error_and_survives_zeros():
    x = np.random.default_rng(0).normal(size=(7, 50)).astype(np.float32)
    x[3] = 0
    values, scale = quantize(jnp.asarray(x))
    assert values.dtype == jnp.int8 and scale.shape == (7, 1)
    assert (np.abs(np.asarray(values * scale) - x) <= np.asarray(scale) * 0.5001).all()
    assert (np.asarray(values[3]) == 0).all()
    kernel = np.random.default_rng(1).normal(size=(50, 9)).astype(np.float32)
    out = multiply(jnp.asarray(x), quantize_kernel(jnp.asarray(kernel)), jnp.float32)
    np.testing.assert_allclose(out, x @ kernel, atol=0.3)


def test_bad_arguments_are_named(helpers):
    parallel = ParallelConfig(helpers.make_mesh({"tp": 4}))
    with pytest.raises(ValueError, match="in_features=6 must be a multiple of tp=4"):
        RowParallelLinear(6, 8, parallel=parallel, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="out_features=6 must be a multiple of tp=4"):
        ColumnParallelLinear(8, 6, parallel=parallel, rngs=nnx.Rngs(0))
    layer = RowParallelLinear(8, 8, parallel=parallel, rngs=nnx.Rngs(0))
    context = helpers.context_for(parallel.mesh, 10, FlashCommConfig(True, False, 1))
    with pytest.raises(ValueError, match="original_num_tokens=10 or padded_num_tokens=12"):
        layer(jnp.zeros((11, 8)), context)
    column = ColumnParallelLinear(8, 8, parallel=parallel, rngs=nnx.Rngs(0))
    other = ColumnParallelLinear(8, 8, parallel=parallel, rngs=nnx.Rngs(0))
    other.quantize()
    with pytest.raises(ValueError, match="all be quantized"):
        column_parallel([column, other], jnp.zeros((12, 8)), context)
