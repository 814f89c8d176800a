"""Whole model against the plain one: meshes, prefill and decode, gradients, checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flashcomm_jax import (
    FallbackReason,
    FlashCommAttention,
    FlashCommLlama,
    KVCache,
    ParallelConfig,
    fallback_counts,
    gather_tokens,
    load_checkpoint,
    quantize_w8a8,
    shard_tokens,
)
from flashcomm_jax.attention import attend, causal_attention, rotary

MESHES = {
    "tp1": dict(axes={"tp": 1}),
    "tp2": dict(axes={"tp": 2}),
    "tp8_permuted": dict(axes={"tp": 8}, permutation=[5, 2, 7, 0, 3, 6, 1, 4]),
    "dp2_tp4": dict(axes={"dp": 2, "tp": 4}),
    "dp2_tp4_explicit": dict(axes={"dp": 2, "tp": 4}, explicit=True),
}


def loaded(helpers, mesh, state, seed=9):
    with jax.set_mesh(mesh):
        model = FlashCommLlama(helpers.TINY, parallel=ParallelConfig(mesh), rngs=nnx.Rngs(seed))
        return load_checkpoint(model, state)


@pytest.mark.parametrize(
    ("mesh_name", "name"),
    [("tp1", "fc1"), ("tp2", "ring"), ("dp2_tp4", "off"), ("dp2_tp4", "aiv")]
    + [("tp8_permuted", name) for name in ("off", "fc1", "aiv", "ring")]
    + [("dp2_tp4_explicit", name) for name in ("off", "fc1", "ring")],
)
def test_logits_match_the_plain_model(helpers, plain, mesh_name, name):
    _, state, tokens, want = plain
    mesh = helpers.make_mesh(**MESHES[mesh_name])
    model = loaded(helpers, mesh, state)
    context = model.build_context(*tokens.shape, helpers.CONFIGS[name], "prefill")
    assert context.active == (name != "off" and mesh.shape["tp"] > 1)
    with jax.set_mesh(mesh):
        got, caches = nnx.jit(lambda m, t: m(t, context))(model, tokens)
    assert caches is None
    assert helpers.relative_error(got, want) < 2e-6


@pytest.mark.parametrize("name", ["fc1", "ring"])
def test_gradients_match_the_plain_model(helpers, plain, name):
    plain_model, state, tokens, _ = plain
    mesh = helpers.make_mesh({"dp": 2, "tp": 4})
    model = loaded(helpers, mesh, state)
    context = model.build_context(*tokens.shape, helpers.CONFIGS[name], "prefill")

    def loss(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    want = nnx.jit(nnx.grad(lambda m: loss(m(tokens))))(plain_model)
    got = nnx.jit(nnx.grad(lambda m: loss(m(tokens, context)[0])))(model)
    want, got = dict(nnx.to_flat_state(want)), dict(nnx.to_flat_state(got))
    assert want.keys() == got.keys()
    for path, expected in want.items():
        assert helpers.relative_error(got[path][...], expected[...]) < 2e-5, path


def greedy(model, contexts, tokens, lengths, steps):
    """Tokens and logits of a prefill and `steps` decode steps; contexts = (prefill, decode)."""
    caches = model.init_caches(tokens.shape[0], tokens.shape[1] + steps)
    graph, state = nnx.split(model)

    @jax.jit
    def prefill(state, tokens, caches):
        return nnx.merge(graph, state)(tokens, contexts[0], caches, lengths, logits="last")

    @jax.jit
    def decode(state, tokens, caches):
        return nnx.merge(graph, state)(tokens, contexts[1], caches, logits="last")

    logits, caches = prefill(state, tokens, caches)
    all_logits, chosen = [logits], []
    for _ in range(steps):
        chosen.append(jnp.argmax(logits, -1).astype(jnp.int32))
        logits, caches = decode(state, chosen[-1], caches)
        all_logits.append(logits)
    return jnp.concatenate(chosen, 1), jnp.concatenate(all_logits, 1), caches


@pytest.mark.parametrize("mesh_name", ["tp8_permuted", "dp2_tp4"])
def test_prefill_then_decode_of_ragged_prompts(helpers, plain, mesh_name):
    plain_model, state, tokens, _ = plain
    lengths = jnp.array([13, 1, 7, 12], jnp.int32)
    mesh = helpers.make_mesh(**MESHES[mesh_name])
    model = loaded(helpers, mesh, state)
    contexts = [
        model.build_context(4, n, helpers.AIV, stage)
        for n, stage in ((13, "prefill"), (1, "decode"))
    ]
    assert contexts[0].active and contexts[1].reason is FallbackReason.DECODE
    chosen, logits, caches = greedy(model, contexts, tokens, lengths, 3)
    complete = np.zeros((4, 16), np.int32)
    for b, length in enumerate(np.asarray(lengths)):
        complete[b, :length] = tokens[b, :length]
        complete[b, length : length + 3] = chosen[b]
    want = nnx.jit(lambda m, t: m(t))(plain_model, jnp.asarray(complete))
    for b, length in enumerate(np.asarray(lengths)):
        expected = want[b, length - 1 : length + 3]
        assert helpers.relative_error(logits[b], expected) < 5e-6
        np.testing.assert_array_equal(chosen[b], np.argmax(expected, -1)[:3])
    # Padding of neither kind ever reached a cache.
    for cache in caches:
        np.testing.assert_array_equal(cache.lengths, lengths + 3)
        unused = np.arange(cache.max_len) >= np.asarray(cache.lengths)[:, None]
        assert (np.asarray(cache.k)[unused] == 0).all()
        assert (np.asarray(cache.v)[unused] == 0).all()


def test_chunked_prefill_equals_one_prefill(helpers, plain):
    _, state, tokens, want = plain
    mesh = helpers.make_mesh({"tp": 4})
    model = loaded(helpers, mesh, state)
    caches = model.init_caches(4, 13)
    got = []
    for start, stop in ((0, 6), (6, 11), (11, 13)):
        context = model.build_context(4, stop - start, helpers.FC1, "prefill")
        logits, caches = nnx.jit(lambda m, t, c, ctx=context: m(t, ctx, c))(
            model, tokens[:, start:stop], caches
        )
        got.append(logits)
    assert helpers.relative_error(jnp.concatenate(got, 1), want) < 2e-6


def test_mixed_batches_and_context_parallel_run_the_original_program(helpers, plain):
    _, state, tokens, want = plain
    mesh = helpers.make_mesh({"cp": 2, "tp": 4})
    model = loaded(helpers, mesh, state)
    for stage, reason in (("prefill", "CONTEXT_PARALLEL"), ("mixed", "MIXED_BATCH")):
        context = model.build_context(*tokens.shape, helpers.AIV, stage)
        assert context.reason is FallbackReason[reason]
        got, _ = nnx.jit(lambda m, t, c=context: m(t, c))(model, tokens)
        assert helpers.relative_error(got, want) < 2e-6


def test_bfloat16_prefill(helpers, plain):
    _, state, tokens, want = plain
    mesh = helpers.make_mesh({"tp": 4})
    config = dataclasses.replace(helpers.TINY, dtype=jnp.bfloat16)
    model = FlashCommLlama(config, parallel=ParallelConfig(mesh), rngs=nnx.Rngs(0))
    load_checkpoint(model, state)
    for name in ("off", "aiv"):
        context = model.build_context(*tokens.shape, helpers.CONFIGS[name], "prefill")
        got, _ = nnx.jit(lambda m, t, c=context: m(t, c))(model, tokens)
        assert helpers.relative_error(got, want) < 0.02


def test_int8_model(helpers, plain):
    _, state, tokens, want = plain
    mesh = helpers.make_mesh({"tp": 4})
    model = quantize_w8a8(loaded(helpers, mesh, state))
    outs = {}
    for name in ("off", "aiv", "ring"):
        context = model.build_context(*tokens.shape, helpers.CONFIGS[name], "prefill")
        outs[name], _ = nnx.jit(lambda m, t, c=context: m(t, c))(model, tokens)
        assert helpers.relative_error(outs[name], want) < 0.03  # 14 quantized products deep
        assert helpers.relative_error(outs[name], outs["off"]) < 0.01


def test_int8_layer_within_one_percent(helpers, plain):
    """Four quantized products and the residual stream of a few layers' depth."""
    config = dataclasses.replace(helpers.TINY, hidden_size=128, head_dim=16, intermediate_size=256)
    reference = helpers.PlainLayer(config, nnx.Rngs(0), use_bias=False)
    mesh = helpers.make_mesh({"tp": 4})
    parallel = ParallelConfig(mesh)
    one = dataclasses.replace(config, num_layers=1)
    layer = FlashCommLlama(one, parallel=parallel, rngs=nnx.Rngs(1)).layers[0]
    load_checkpoint(layer, nnx.state(reference))
    quantize_w8a8(layer)
    x = 2 * np.random.default_rng(0).normal(size=(1, 30, 128)).astype(np.float32)
    positions = jnp.arange(30)[None]
    want = nnx.jit(lambda m, x: m(x, positions))(reference, x)
    for name in ("off", "aiv"):
        context = helpers.context_for(mesh, 30, helpers.CONFIGS[name])

        @nnx.jit
        def run(layer, x, context=context):
            y, _ = layer(shard_tokens(x, context), context, positions)
            return gather_tokens(y, context)

        assert helpers.relative_error(run(layer, x), want) < 0.01


def test_no_ambient_state_under_jit(helpers, plain):
    """One function, contexts as static arguments, a draft model beside the model."""
    _, state, tokens, want = plain
    mesh = helpers.make_mesh({"tp": 4})
    model, draft = (loaded(helpers, mesh, state, seed) for seed in (1, 2))
    graph, weights = nnx.split(model)
    traces = []

    @jax.jit(static_argnums=0)
    def both(contexts, weights, tokens):
        traces.append(contexts)
        outs = [nnx.merge(graph, weights)(tokens, context)[0] for context in contexts]
        return outs

    active = model.build_context(4, 13, helpers.FC1, "prefill")
    inactive = draft.build_context(4, 13, helpers.OFF, "prefill")
    for contexts in ((active, inactive), (inactive, active), (inactive, inactive)) * 2:
        for out in both(contexts, weights, tokens):
            assert helpers.relative_error(out, want) < 2e-6
    assert len(traces) == 3
    texts = {
        contexts: both.lower(contexts, weights, tokens).as_text()
        for contexts in ((active, inactive), (inactive, inactive))
    }
    layers = len(model.layers)
    # The draft model beside an active one scatters nothing.
    assert texts[active, inactive].count("reduce_scatter") == 2 * layers + 1
    assert texts[inactive, inactive].count("reduce_scatter") == 0


def test_checkpoint_of_the_plain_model_loads_unchanged(helpers, plain):
    plain_model, state, *_ = plain
    mesh = helpers.make_mesh({"tp": 4})
    model = loaded(helpers, mesh, state)
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(m))) for m in (model, plain_model))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path][...], value[...])
    # Shardings and annotations survive.
    specs = {
        ("self_attn", "q_proj"): P(None, "tp"),
        ("self_attn", "o_proj"): P("tp", None),
        ("mlp", "down_proj"): P("tp", None),
    }
    named = dict(nnx.to_flat_state(nnx.get_named_sharding(nnx.state(model), mesh)))
    for (part, layer), spec in specs.items():
        path = ("layers", 0, part, layer, "kernel")
        assert ours[path][...].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert named[path].get_raw_value().spec == spec
    with pytest.raises(ValueError, match="missing"):
        load_checkpoint(model, nnx.state(plain_model.layers[0]))
    wrong = nnx.clone(plain_model)
    wrong.norm.scale = nnx.Param(jnp.ones(3))
    with pytest.raises(ValueError, match="norm"):
        load_checkpoint(model, nnx.state(wrong))


def test_annotations_without_a_mesh(helpers):
    layer = FlashCommAttention(32, 8, 8, rngs=nnx.Rngs(0))
    assert layer.o_proj.kernel.get_metadata()["out_sharding"] == ("tp", None)
    x = jnp.ones((5, 32))
    out, _ = layer(x, None, jnp.arange(5)[None])
    assert out.shape == x.shape
    assert not fallback_counts()


def test_full_cache_answers_nan_not_a_guess(helpers, plain):
    _, state, tokens, _ = plain
    model = loaded(helpers, helpers.make_mesh({"tp": 2}), state)
    caches = model.init_caches(4, 13)
    lengths = jnp.array([13, 12, 3, 13])
    step = nnx.jit(lambda m, t, c, n: m(t, None, c, n, logits="last"))
    logits, caches = step(model, tokens, caches, lengths)
    assert np.isfinite(logits).all()
    logits, _ = step(model, tokens[:, :1], caches, jnp.ones(4, jnp.int32))
    np.testing.assert_array_equal(np.isnan(logits[:, 0]).any(-1), [True, False, False, True])


def test_rotary_and_causal_attention_against_numpy():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 7, h, 8)) for h in (4, 2, 2))
    positions = np.array([np.arange(7), np.arange(7) + 5])
    angle = positions[..., None] * 100.0 ** (-np.arange(4) / 4)
    rotation = np.exp(1j * angle)[:, :, None]

    def turn(x):
        z = (x[..., :4] + 1j * x[..., 4:]) * rotation
        return np.concatenate([z.real, z.imag], -1)

    for x in (q, k):
        got = rotary(jnp.asarray(x, jnp.float32), jnp.asarray(positions), 100.0)
        np.testing.assert_allclose(got, turn(x), atol=1e-5)
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, 2, 2)) / np.sqrt(8)
    weights = np.exp(np.where(np.tril(np.ones((7, 7))), scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(v, 2, 2))
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    np.testing.assert_allclose(causal_attention(*arrays), want, atol=1e-5)
    # The same, token by token through a cache.
    cache = KVCache.empty(2, 9, 2, 8)
    outs = []
    for i in range(7):
        piece = [x[:, i : i + 1] for x in arrays]
        out, cache = attend(*piece, cache.positions(1), cache, jnp.ones(2, jnp.int32))
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), want, atol=1e-5)


def test_bad_arguments_are_named(helpers, plain):
    mesh = helpers.make_mesh({"tp": 8})
    parallel = ParallelConfig(mesh)
    with pytest.raises(ValueError, match="num_kv_heads=4 must be a multiple of tp=8"):
        FlashCommAttention(32, 8, 4, parallel=parallel, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="must divide num_heads=9"):
        FlashCommAttention(36, 9, 8, parallel=parallel, rngs=nnx.Rngs(0))
    model = loaded(helpers, mesh, plain[1])
    tokens = jnp.zeros((2, 5), jnp.int32)
    with pytest.raises(ValueError, match="logits must be"):
        model(tokens, None, logits="some")
    with pytest.raises(ValueError, match="cache holds 3 sequences, the batch has 2"):
        model(tokens, None, model.init_caches(3, 8))
    with pytest.raises(ValueError, match="5 new tokens do not fit"):
        model(tokens, None, model.init_caches(2, 4))
    context = model.build_context(2, 6, helpers.FC1, "prefill")
    with pytest.raises(ValueError, match="original_num_tokens=12"):
        model(tokens, context)
    layer = FlashCommAttention(32, 8, 8, parallel=parallel, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="positions must be"):
        layer(jnp.zeros((5, 32)), None, jnp.zeros((1, 4), jnp.int32))
