"""Mixture of experts over tp, ep and dp; latent attention. Against dense float64 or one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flashcomm_jax import (
    FlashCommMLAAttention,
    FlashCommMoE,
    ParallelConfig,
    gather_tokens,
    hlo,
    load_checkpoint,
    moe,
    shard_tokens,
)

HIDDEN, FEATURES, EXPERTS, TOP = 16, 24, 8, 3


def dense_moe(state, x):
    """Every expert on every token, then the weighted sum of the chosen ones; float64."""
    x = x.astype(np.float64)
    router, gate, up, down = (
        np.asarray(state[name], np.float64) for name in ("router", "gate", "up", "down")
    )
    logits = x @ router
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    order = np.argsort(-probabilities, -1)[..., :TOP]
    weights = np.take_along_axis(probabilities, order, -1)
    weights /= weights.sum(-1, keepdims=True)
    a = np.einsum("...h,ehf->...ef", x, gate)
    hidden = a / (1 + np.exp(-a)) * np.einsum("...h,ehf->...ef", x, up)
    outs = np.einsum("...ef,efh->...eh", hidden, down)
    chosen = np.take_along_axis(outs, order[..., None], -2)
    return (weights[..., None] * chosen).sum(-2)


MESHES = [
    ({"tp": 4}, ("ep",)),
    ({"tp": 4}, ("tp",)),
    ({"tp": 4, "ep": 2}, ("ep",)),
    ({"dp": 2, "tp": 2, "ep": 2}, ("ep",)),
    ({"dp": 2, "tp": 4}, ("dp", "tp")),
]


@pytest.mark.parametrize(
    ("axes", "ep_axes", "rows", "name"),
    [(*mesh, 4, name) for mesh in MESHES for name in ("off", "fc1")]
    + [(*mesh, 1, "fc1") for mesh in MESHES[2:]],
)
def test_moe_against_dense(helpers, axes, ep_axes, rows, name):
    mesh = helpers.make_mesh(axes)
    parallel = ParallelConfig(mesh, ep_axes=ep_axes)
    context = helpers.context_for(mesh, 11, helpers.CONFIGS[name], ep_axes=ep_axes)
    layer = FlashCommMoE(HIDDEN, FEATURES, EXPERTS, TOP, parallel=parallel, rngs=nnx.Rngs(0))
    state = {name: np.asarray(getattr(layer, name)[...]) for name in ("gate", "up", "down")}
    state["router"] = np.asarray(layer.router.kernel[...])
    x = np.random.default_rng(rows).normal(size=(rows, 11, HIDDEN)).astype(np.float32)

    run = nnx.jit(lambda m, x: gather_tokens(m(shard_tokens(x, context), context), context))
    assert helpers.relative_error(run(layer, x), dense_moe(state, x)) < 2e-6
    if context.active:
        text = run.lower(layer, x).compile().as_text()
        kinds = {c.kind for c in hlo.collectives(text)}
        assert "all-reduce" not in kinds and "reduce-scatter" in kinds


def test_moe_gradients(helpers):
    mesh = helpers.make_mesh({"dp": 2, "tp": 2, "ep": 2})
    context = helpers.context_for(mesh, 7, helpers.FC1)
    rngs = nnx.Rngs(0)
    single = FlashCommMoE(HIDDEN, FEATURES, EXPERTS, TOP, rngs=rngs)
    spread = FlashCommMoE(
        HIDDEN, FEATURES, EXPERTS, TOP, parallel=context.parallel, rngs=nnx.Rngs(1)
    )
    load_checkpoint(spread, nnx.state(single))
    x = np.random.default_rng(0).normal(size=(4, 7, HIDDEN)).astype(np.float32)

    def loss(layer, x, context):
        y = layer(x if context is None else shard_tokens(x, context), context)
        return (gather_tokens(y, context) if context else y)[..., :5].sum() ** 2

    want = nnx.jit(nnx.grad(lambda m, x: loss(m, x, None), argnums=(0, 1)))(single, x)
    got = nnx.jit(nnx.grad(lambda m, x: loss(m, x, context), argnums=(0, 1)))(spread, x)
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for ours, theirs in leaves:
        assert helpers.relative_error(ours, theirs) < 1e-5


def test_padding_reaches_no_expert(helpers, monkeypatch):
    mesh = helpers.make_mesh({"tp": 4})
    context = helpers.context_for(mesh, 5, helpers.FC1)
    assert context.pad_size == 3
    module = FlashCommMoE(4, 8, 4, 2, parallel=context.parallel, rngs=nnx.Rngs(0))

    def count(x, experts, weights, gate, up, down):
        return jnp.full_like(x, (experts < gate.shape[0]).sum())

    monkeypatch.setattr(moe, "expert_outputs", count)
    y = module(shard_tokens(jnp.ones((5, 4)), context), context)
    # 5 tokens with 2 experts each, seen by all 4 ranks (each has a part of every expert).
    np.testing.assert_array_equal(y, np.full((8, 4), 5 * 2 * 4))


def test_moe_bad_arguments_are_named(helpers):
    parallel = ParallelConfig(helpers.make_mesh({"tp": 2, "ep": 4}))
    options = dict(parallel=parallel, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_experts=6 must be a multiple of the 4 ranks"):
        FlashCommMoE(8, 8, 6, 2, **options)
    with pytest.raises(ValueError, match="experts_per_token=9"):
        FlashCommMoE(8, 8, 8, 9, **options)
    with pytest.raises(ValueError, match="intermediate_size=7"):
        FlashCommMoE(8, 7, 8, 2, **options)


MLA = dict(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)


@pytest.mark.parametrize(
    ("name", "gather_latents", "explicit"),
    [("off", False, False), ("fc1", False, False), ("fc1", True, False), ("fc1", True, True)],
)
def test_mla(helpers, name, gather_latents, explicit):
    mesh = helpers.make_mesh({"dp": 2, "tp": 4}, explicit=explicit)
    single = FlashCommMLAAttention(HIDDEN, 8, **MLA, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 9, HIDDEN)).astype(np.float32)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    want, _ = nnx.jit(lambda m, x: m(x, None, positions))(single, x)
    with jax.set_mesh(mesh):
        context = helpers.context_for(mesh, 9, helpers.CONFIGS[name])
        mla = FlashCommMLAAttention(
            HIDDEN,
            8,
            **MLA,
            gather_latents=gather_latents,
            parallel=context.parallel,
            rngs=nnx.Rngs(1),
        )
        load_checkpoint(mla, nnx.state(single))

        @nnx.jit
        def run(mla, x):
            y, _ = mla(shard_tokens(x, context), context, positions)
            return gather_tokens(y, context)

        assert helpers.relative_error(run(mla, x), want) < 2e-6
        # Prefill 6 tokens, decode 3, from a cache of latents.
        first = helpers.context_for(mesh, 6, helpers.CONFIGS[name])

        @nnx.jit
        def prefill(mla, x, cache):
            y, cache = mla(shard_tokens(x, first), first, positions[:, :6], cache)
            return gather_tokens(y, first), cache

        decode = nnx.jit(lambda mla, x, cache: mla(x, None, cache.positions(1), cache))
        y, cache = prefill(mla, x[:, :6], mla.init_cache(2, 9))
        ys = [y]
        for i in range(6, 9):
            y, cache = decode(mla, x[:, i : i + 1], cache)
            ys.append(y)
        assert helpers.relative_error(jnp.concatenate(ys, 1), want) < 2e-6


def test_gathering_latents_moves_fewer_bytes(helpers):
    mesh = helpers.make_mesh({"tp": 4})
    context = helpers.context_for(mesh, 16, helpers.FC1)
    gathered = {}
    for latents in (False, True):
        mla = FlashCommMLAAttention(
            64,
            8,
            **MLA,
            gather_latents=latents,
            parallel=context.parallel,
            rngs=nnx.Rngs(0),
        )
        run = nnx.jit(lambda m, x: m(x, context, jnp.arange(16)[None])[0])
        text = run.lower(mla, jnp.ones((16, 64))).compile().as_text()
        collectives = hlo.collectives(text)
        assert all(c.kind in ("all-gather", "reduce-scatter") for c in collectives)
        gathered[latents] = sum(c.buffer_bytes for c in collectives if c.kind == "all-gather")
    assert gathered[False] == 16 * 64 * 4
    assert gathered[True] == 16 * (12 + 10 + 4) * 4
