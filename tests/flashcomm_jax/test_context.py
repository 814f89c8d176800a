"""The decision: static, explicit, the same everywhere; every reason counted, logged, tested."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from flashcomm_jax import (
    ColumnParallelLinear,
    FallbackReason,
    FlashCommConfig,
    FlashCommContext,
    FlashCommFallbackError,
    ParallelConfig,
    RowParallelLinear,
    fallback_counts,
    gate,
    reset_fallback_counts,
)

TP4 = AbstractMesh((4,), ("tp",))
ON = FlashCommConfig(enable_flashcomm1=True, flashcomm1_min_prefill_tokens=8)


def test_documented_defaults():
    config = FlashCommConfig()
    assert config == FlashCommConfig(
        enable_flashcomm1=False,
        enable_mmrs_fusion=False,
        flashcomm1_min_prefill_tokens=8192,
        mmrs_comm_mode="aiv",
    )
    backends = {"aiv": "pallas", "ai_cpu": "ring", "none": "none", "pallas": "pallas"}
    for mode, backend in backends.items():
        assert FlashCommConfig(mmrs_comm_mode=mode).backend == backend


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flashcomm1_min_prefill_tokens", -1),
        ("flashcomm1_min_prefill_tokens", 1.5),
        ("flashcomm1_min_prefill_tokens", True),
        ("mmrs_comm_mode", "nccl"),
        ("enable_flashcomm1", 1),
        ("enable_mmrs_fusion", None),
        ("strict", "yes"),
    ],
)
def test_bad_config_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        FlashCommConfig(**{field: value})


@pytest.mark.parametrize("tokens", [8, 9, 11, 12, 63, 64, 65, 97])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_padding(tokens, tp):
    context = FlashCommContext.build(tokens, AbstractMesh((tp,), ("tp",)), ON, "prefill")
    assert context.active and context.reason is None
    assert context.original_num_tokens == tokens
    assert context.padded_num_tokens == tokens + context.pad_size
    assert context.padded_num_tokens == context.padded_local_num_tokens * tp
    assert 0 <= context.pad_size < tp


@pytest.mark.parametrize(("tokens", "active"), [(7, False), (8, True), (9, True)])
def test_threshold(tokens, active):
    context = FlashCommContext.build(tokens, TP4, ON, "prefill")
    assert context.active is active
    if not active:
        assert context.reason is FallbackReason.BELOW_THRESHOLD
        assert context.padded_num_tokens == context.padded_local_num_tokens == tokens
        assert context.pad_size == 0


def test_context_is_static_and_decided_from_host_values():
    a = FlashCommContext.build(np.int64(9), TP4, ON, "prefill")
    b = FlashCommContext.build(9, ParallelConfig(TP4), ON, "prefill")
    assert a == b and hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.pad_size = 0
    with pytest.raises(ValueError, match="host integer"):
        jax.jit(lambda n: FlashCommContext.build(n, TP4, ON, "prefill"))(3)
    for bad in (dict(num_tokens=-1), dict(num_tokens=1.5), dict(stage="train"), dict(config=None)):
        arguments = dict(num_tokens=9, parallel=TP4, config=ON, stage="prefill") | bad
        with pytest.raises(ValueError, match=next(iter(bad))):
            FlashCommContext.build(**arguments)
    with pytest.raises(ValueError, match="parallel"):
        FlashCommContext.build(9, 8, ON, "prefill")


MMRS = dataclasses.replace(ON, enable_mmrs_fusion=True)


def build(num_tokens=16, mesh=TP4, config=MMRS, stage="prefill", **changes):
    FlashCommContext.build(num_tokens, mesh, dataclasses.replace(config, **changes), stage)


def row_layer(helpers, tokens=16, out=8, edit=None, dtype=jnp.float32, **changes):
    mesh = helpers.make_mesh({"tp": 4})
    context = FlashCommContext.build(tokens, mesh, dataclasses.replace(MMRS, **changes), "prefill")
    layer = RowParallelLinear(8, out, parallel=context.parallel, rngs=nnx.Rngs(0))
    if edit:
        edit(layer)
    y = jax.jit(lambda x: layer(x, context))(jnp.ones((tokens, 8), dtype))
    want = np.ones((tokens, 8)) @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    assert y.dtype == dtype and y.shape == (context.padded_num_tokens, out)
    np.testing.assert_allclose(np.asarray(y)[:tokens], want, rtol=1e-5)


def two_dimensional_bias(layer):
    layer.bias = nnx.Param(jnp.ones((1, 8)))


def custom_dot(layer):
    def dot_general(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    layer.dot_general = dot_general


def missing_context(helpers):
    mesh = helpers.make_mesh({"tp": 4})
    layer = ColumnParallelLinear(8, 8, parallel=ParallelConfig(mesh), rngs=nnx.Rngs(0))
    layer(jnp.ones((4, 8)))


def slower(helpers, **changes):
    original = gate._table
    entry = dict(device="cpu", dtype="float32", row_parallel=True, backend="pallas")
    entry |= dict(tokens=16, in_features=2, out_features=8, stages=4)
    entry |= dict(whole_ms=1.0, parts_ms=2.0, wire_bytes=10**6, link_gigabytes_per_second=1.0)
    gate._table = lambda: [entry]
    try:
        row_layer(helpers, **changes)
    finally:
        gate._table = original


def double_precision(helpers, **changes):
    with jax.enable_x64(True):
        row_layer(helpers, dtype=jnp.float64, **changes)


R = FallbackReason
CP2 = AbstractMesh((2, 4), ("cp", "tp"))
TRIGGERS = {
    R.DISABLED: lambda h, **c: build(enable_flashcomm1=False, **c),
    R.EMPTY: lambda h, **c: build(num_tokens=0, **c),
    R.DECODE: lambda h, **c: build(stage="decode", **c),
    R.MIXED_BATCH: lambda h, **c: build(stage="mixed", **c),
    R.SINGLE_RANK: lambda h, **c: build(mesh=None, **c),
    R.CONTEXT_PARALLEL: lambda h, **c: build(mesh=CP2, **c),
    R.BELOW_THRESHOLD: lambda h, **c: build(num_tokens=7, **c),
    R.NO_CONTEXT: missing_context,
    R.FUSION_DISABLED: lambda h, **c: row_layer(h, enable_mmrs_fusion=False, **c),
    R.COMM_MODE_NONE: lambda h, **c: row_layer(h, mmrs_comm_mode="none", **c),
    R.UNSUPPORTED_DTYPE: double_precision,
    R.UNSUPPORTED_SHAPE: lambda h, **c: row_layer(h, out=7, **c),
    R.UNSUPPORTED_BIAS: lambda h, **c: row_layer(h, edit=two_dimensional_bias, **c),
    R.CUSTOM_DOT_GENERAL: lambda h, **c: row_layer(h, edit=custom_dot, **c),
    R.SLOWER_THAN_UNFUSED: slower,
}


def test_every_reason_has_a_trigger():
    assert TRIGGERS.keys() == set(FallbackReason)


@pytest.mark.parametrize("reason", FallbackReason)
def test_reason_is_counted_and_logged(helpers, caplog, reason):
    with caplog.at_level(logging.INFO, "flashcomm_jax"):
        TRIGGERS[reason](helpers)
    assert fallback_counts() == {reason: 1}
    lines = [r.getMessage() for r in caplog.records if r.name == "flashcomm_jax"]
    assert len(lines) == 1
    assert lines[0].startswith(f"FC1 MMRS skipped: {reason.value} (")


def test_success_is_silent(helpers, caplog):
    with caplog.at_level(logging.DEBUG, "flashcomm_jax"):
        row_layer(helpers)
        row_layer(helpers, tokens=17, mmrs_comm_mode="ai_cpu")
    assert not fallback_counts() and not caplog.records


# Fusion left off is not a fallback, and no context means no config that could be strict.
@pytest.mark.parametrize("reason", sorted(set(R) - {R.FUSION_DISABLED, R.NO_CONTEXT}))
def test_strict_raises_instead(helpers, reason):
    with pytest.raises(FlashCommFallbackError, match=f"FC1 MMRS skipped: {reason.value}") as error:
        TRIGGERS[reason](helpers, strict=True)
    assert error.value.reason is reason


def test_strict_accepts_fusion_that_was_not_asked_for(helpers):
    row_layer(helpers, enable_mmrs_fusion=False, strict=True)


def test_no_capped_counts_or_logs(caplog):
    with caplog.at_level(logging.WARNING, "flashcomm_jax"):
        for _ in range(40):
            build(stage="decode")
    assert fallback_counts() == {R.DECODE: 40}
    assert len(caplog.records) == 40
    reset_fallback_counts()
    assert not fallback_counts()
