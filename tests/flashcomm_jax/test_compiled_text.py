"""What the compiler made of it: no all-reduce if active, the original program if not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flashcomm_jax import (
    FlashCommAttention,
    FlashCommDecoderLayer,
    FlashCommLlama,
    FlashCommMLP,
    ParallelConfig,
    hlo,
    load_checkpoint,
    quantize_w8a8,
)

TOKENS = 64


def decoder_layer(helpers, parallel):
    config = helpers.TINY
    options = dict(parallel=parallel, rngs=nnx.Rngs(0))
    attention = FlashCommAttention(
        config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, **options
    )
    mlp = FlashCommMLP(config.hidden_size, config.intermediate_size, **options)
    return FlashCommDecoderLayer(attention, mlp, config.hidden_size, **options)


def lowered(layer, mesh, context, call):
    graph, state = nnx.split(layer)
    spec = P(None, "tp") if context is not None and context.active else P()
    x = jax.ShapeDtypeStruct((1, TOKENS, 32), jnp.float32, sharding=NamedSharding(mesh, spec))
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]

    def step(state, x):
        return call(nnx.merge(graph, state), x, positions)

    return jax.jit(step).lower(state, x)


def layer_text(helpers, config, quantized=False):
    mesh = helpers.make_mesh({"tp": 8})
    context = helpers.context_for(mesh, TOKENS, config)
    layer = decoder_layer(helpers, context.parallel)
    if quantized:
        quantize_w8a8(layer)
    program = lowered(layer, mesh, context, lambda m, x, p: m(x, context, p)[0])
    return program.compile().as_text()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["fc1", "aiv", "ring"])
def test_active_layer_has_no_all_reduce(helpers, name, quantized):
    text = layer_text(helpers, helpers.CONFIGS[name], quantized)
    assert "all-reduce" not in text
    kinds = {c.kind for c in hlo.collectives(text)}
    want = {"collective-permute"} if name == "ring" else {"all-gather", "reduce-scatter"}
    assert kinds == want


def test_active_model_has_no_all_reduce(helpers):
    mesh = helpers.make_mesh({"dp": 2, "tp": 4})
    model = FlashCommLlama(helpers.TINY, parallel=ParallelConfig(mesh), rngs=nnx.Rngs(0))
    context = model.build_context(2, 10, helpers.FC1, "prefill")
    caches = model.init_caches(2, 12)
    run = nnx.jit(lambda m, t, c: m(t, context, c, logits="last"))
    text = run.lower(model, jnp.zeros((2, 10), jnp.int32), caches).compile().as_text()
    assert "all-reduce" not in text
    found = hlo.collectives(text)
    # Embedding and two a layer; two gathers a layer, one of last tokens.
    assert sum(c.kind == "reduce-scatter" for c in found) == 1 + 2 * 2
    gathers = [c for c in found if c.kind == "all-gather"]
    assert len(gathers) == 2 * 2 + 1
    assert min(c.buffer_bytes for c in gathers) == 4 * 32 * 4  # a candidate row per rank


def test_inactive_layer_is_the_original_program(helpers):
    """StableHLO equal after removing module name and locations."""
    mesh = helpers.make_mesh({"tp": 8})
    plain = helpers.PlainLayer(helpers.TINY, nnx.Rngs(0), use_bias=False)
    parallel = ParallelConfig(mesh)
    layer = load_checkpoint(decoder_layer(helpers, parallel), nnx.state(plain))
    # The original gets the same shardings, as any tensor-parallel nnx model would.
    ours = dict(nnx.to_flat_state(nnx.state(layer)))
    theirs = dict(nnx.to_flat_state(nnx.state(plain)))
    for path, value in theirs.items():
        value[...] = jax.device_put(value[...], ours[path][...].sharding)
    nnx.update(plain, nnx.from_flat_state(theirs))
    original = lowered(plain, mesh, None, lambda m, x, p: m(x, p))

    def text(program):
        lines = str(program.compiler_ir("stablehlo")).splitlines()
        body = [re.sub(r"\s*loc\(.*\)$", "", line) for line in lines if "#loc" not in line]
        return re.sub(r"module @\w+", "module @m", "\n".join(body))

    inactive = [helpers.OFF, helpers.AIV]
    for config, stage in zip(inactive, ("prefill", "decode"), strict=True):
        context = helpers.context_for(mesh, TOKENS, config, stage)
        assert not context.active
        program = lowered(layer, mesh, context, lambda m, x, p, c=context: m(x, c, p)[0])
        assert text(program) == text(original)
    active = helpers.context_for(mesh, TOKENS, helpers.FC1)
    program = lowered(layer, mesh, active, lambda m, x, p: m(x, active, p)[0])
    assert text(program) != text(original)


def test_bytes_on_the_wire(helpers):
    """Counted from the text: FC1 moves what all-reduce did; int8 gathers halve (here quarter)."""
    hidden = TOKENS * 32 * 4
    share = 7 / 8
    wire = {
        name: sum(c.wire_bytes for c in hlo.collectives(layer_text(helpers, config, quantized)))
        for name, config, quantized in (
            ("off", helpers.OFF, False),
            ("fc1", helpers.FC1, False),
            ("aiv", helpers.AIV, False),
            ("ring", helpers.RING, False),
            ("int8", helpers.FC1, True),
        )
    }
    assert wire["off"] == 2 * 2 * share * hidden
    assert wire["fc1"] == wire["aiv"] == wire["ring"] == wire["off"]
    gathers = 2 * share * (hidden / 4 + TOKENS * 4)
    assert wire["int8"] == 2 * share * hidden + gathers


GPU_TEXT = """
HloModule jit_f
ENTRY %main (p: bf16[8,4]) -> bf16[1,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %ag-start = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8]
  %gemm.1 = bf16[8,4]{1,0} fusion(%p), kind=kCustom, calls=%gemm_fusion_dot.1
  %ag-done = bf16[64,4]{1,0} all-gather-done(%ag-start)
  %rs = ((bf16[64,4]), bf16[8,4]) reduce-scatter-start(%x), replica_groups=mesh['tp'=8] {'tp'}
  %k = (bf16[8,4]{1,0}, s8[4]{0}) custom-call(%p, %gemm.1), custom_call_target="__cublas$gemm"
  %rs-done = bf16[8,4]{1,0} reduce-scatter-done(%rs)
  %cp = (bf16[8,4], bf16[8,4], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}
  %cp-done = bf16[8,4]{1,0} collective-permute-done(%cp)
  ROOT %ar = bf16[8,4]{1,0} all-reduce(%gemm.1), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
"""


def test_reader_on_gpu_text():
    found = hlo.collectives(GPU_TEXT)
    row = 8 * 4 * 2
    assert [(c.kind, c.group_size, c.buffer_bytes) for c in found] == [
        ("all-gather", 8, 8 * row),
        ("reduce-scatter", 8, 8 * row),
        ("collective-permute", 2, row),
        ("all-reduce", 4, row),
    ]
    assert [c.wire_bytes for c in found] == [7 * row, 7 * row, row, 1.5 * row]
    assert hlo.schedule(GPU_TEXT) == "SKDSKDSDC"
    with pytest.raises(ValueError, match="element type"):
        hlo.collectives(GPU_TEXT.replace("bf16", "f6"))
    np.testing.assert_equal(hlo.collectives("HloModule empty"), [])
