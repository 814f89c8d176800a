"""The flax layers: parity with one device and with flax's own attention, and one trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import positions_of, relative_error, segment_ids_of

import fcp_jax as fcp

CONFIG = fcp.PlanConfig(2, 100, block_size=64)
ROWS = [[120, 70], [5] * 30]
WIDE = (64, 8, 8, 12, 8)


def batch(features=16):
    x = np.random.default_rng(0).normal(size=(2, 200, features)).astype(np.float32)
    ids = np.stack([segment_ids_of(fcp.Segments.from_seqlens(row), 200) for row in ROWS])
    return x, ids, np.stack([positions_of(row) for row in ids])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transport", ["auto", "static"])
def test_layer_on_a_mesh_equals_one_device(transport, kind):
    mesh = jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), axis_types=(kind,) * 3)
    plan = fcp.make_batch_plan(ROWS, dataclasses.replace(CONFIG, transport=transport))
    x, ids, positions = batch()

    @nnx.jit
    def loss_and_grads(layer, x, plan):
        def loss(layer):
            out = layer(x, plan, positions=positions, segment_ids=ids)
            return (out * jnp.cos(out)).sum()

        return nnx.value_and_grad(loss)(layer)

    want, want_grads = loss_and_grads(fcp.FCPAttention(16, 4, 2, rngs=nnx.Rngs(0)), x, plan)
    with jax.set_mesh(mesh):
        layer = fcp.FCPAttention(16, 4, 2, mesh=mesh, rngs=nnx.Rngs(0))
        assert layer.query.kernel.get_value().sharding.spec == P(None, "tp", None)
        placed = jax.device_put(x, NamedSharding(mesh, P("dp", "cp")))
        got, grads = loss_and_grads(layer, placed, plan)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    got_leaves, want_leaves = (
        jax.tree.leaves(nnx.to_pure_dict(tree)) for tree in (grads, want_grads)
    )
    assert len(got_leaves) == 4
    for a, b in zip(got_leaves, want_leaves, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("transport", ["auto", "static"])
def test_attention_fn_equals_flax_attention_with_one_trace(transport):
    mesh = jax.make_mesh((2, 2), ("dp", "cp"), devices=jax.devices()[:4])
    traces = 0

    def make(attention_fn):
        return nnx.MultiHeadAttention(
            num_heads=4,
            in_features=16,
            num_kv_heads=2,
            attention_fn=attention_fn,
            decode=False,
            rngs=nnx.Rngs(0),
        )

    @nnx.jit
    def step(layer, x, plan):
        nonlocal traces
        traces += 1
        with layer.attention_fn.using(plan):
            return layer(x, is_causal=True)

    with jax.set_mesh(mesh):  # parameters made elsewhere move at the first step: one more trace
        layer = make(fcp.FCPAttentionFn(mesh=mesh))
    plain = make(nnx.dot_product_attention)
    x, *_ = batch()
    rng = np.random.default_rng(0)
    for _ in range(10 if transport == "auto" else 3):
        rows = [rng.multinomial(190, [0.5, 0.3, 0.2]) for _ in range(2)]
        config = dataclasses.replace(CONFIG, transport=transport)
        plan = fcp.pad_plan(fcp.make_batch_plan(rows, config), WIDE)
        with jax.set_mesh(mesh):
            got = step(layer, x, plan)
        ids = np.stack([segment_ids_of(fcp.Segments.from_seqlens(row), 200) for row in rows])
        mask = (ids[:, None, :, None] == ids[:, None, None]) & np.tri(200, dtype=bool)
        want = plain(x, mask=jnp.asarray(mask))
        real = ids > 0
        assert relative_error(np.asarray(got)[real], np.asarray(want)[real]) < 1e-5
    assert traces == 1 if transport == "auto" else 1 < traces <= 3


def test_attention_fn_refuses_by_name():
    fn = fcp.FCPAttentionFn()
    x = jnp.zeros((1, 200, 2, 8))
    with pytest.raises(ValueError, match="plan is not set"):
        fn(x, x, x)
    full = fcp.make_plan([10], dataclasses.replace(CONFIG, causal=False))
    refused = {
        "mask": dict(mask=x),
        "bias": dict(bias=x),
        "dropout_rate": dict(dropout_rate=0.1, deterministic=False),
        "is_causal=True": dict(is_causal=True),
        "precision": dict(precision="highest"),
        "sow_weights": dict(module=fn),
    }
    for name, argument in refused.items():
        with pytest.raises(ValueError, match=name), fn.using(full):
            fn(x, x, x, **argument)
    with fn.using(full):
        assert fn(x, x, x, dropout_rate=0.1).shape == x.shape


def test_rope_depends_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(6, 1, 8)), jnp.float32) for _ in range(2))
    at = jnp.arange(6)
    scores = [
        jnp.einsum("qhd,khd->qk", *(fcp.apply_rope(x, at + shift) for x in (q, k)))
        for shift in (0, 1000)
    ]
    np.testing.assert_allclose(*scores, atol=1e-3)
    moved = jnp.einsum("qhd,khd->qk", fcp.apply_rope(q, at + 3), fcp.apply_rope(k, at))
    assert relative_error(moved, scores[0]) > 0.1
    np.testing.assert_allclose(fcp.apply_rope(q, at)[0], q[0], rtol=1e-6)
