"""The Hopper kernels in the Pallas interpreter against dense float64, and their lowering."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import all_pairs, dense, packed_mask, relative_error

from pallas_kernels import (
    AttentionState,
    TokenMask,
    WorkList,
    block_attention,
    block_attention_grad,
    block_attention_mgpu,
    explain,
)

BLOCK, SCALE = 128, 0.3
BF16 = jnp.bfloat16


def problem(lengths, rows, causal, heads, dim, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    lo, hi, index = packed_mask(lengths, rows, causal)
    q, dout = (rng.normal(size=(rows, heads[0], dim)) for _ in range(2))
    k, v = (rng.normal(size=(rows, heads[1], dim)) for _ in range(2))
    q, k, v, dout = (jnp.asarray(x, BF16) for x in (spread * q, spread * k, v, dout))
    visible = (lo[:, None] <= index) & (index <= hi[:, None])
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (lo, hi, index)))
    return (q, k, v, dout), mask, all_pairs(lo, hi, index, BLOCK), visible


def work_of(pairs, rows):
    padded = np.zeros((len(pairs) + 2, 2), np.int32)  # padding items must be ignored
    padded[: len(pairs)] = pairs
    return WorkList.from_pairs(padded[:, 0], padded[:, 1], len(pairs), rows // BLOCK)


CASES = {
    "causal_gqa": dict(lengths=[100, 1, 90], rows=256, causal=True, heads=(4, 2), dim=64),
    "full_mha": dict(lengths=[256], rows=256, causal=False, heads=(2, 2), dim=64),
    "full_segments_mqa": dict(lengths=[127, 60], rows=256, causal=False, heads=(2, 1), dim=64),
    "odd_group": dict(lengths=[130], rows=256, causal=True, heads=(3, 1), dim=64),
    "head_dim_128": dict(lengths=[128, 64], rows=256, causal=True, heads=(2, 1), dim=128),
    "head_dim_256_causal_gqa": dict(
        lengths=[100, 1, 90], rows=256, causal=True, heads=(2, 1), dim=256
    ),
    "head_dim_256_full_mha": dict(lengths=[256], rows=256, causal=False, heads=(1, 1), dim=256),
    "head_dim_256_full_segments": dict(
        lengths=[127, 60], rows=256, causal=False, heads=(2, 1), dim=256
    ),
    "nothing": dict(lengths=[], rows=128, causal=True, heads=(2, 1), dim=64),
    # Log-sum-exps of several hundred, far beyond the range of exp.
    "large_logits": dict(lengths=[200], rows=256, causal=True, heads=(2, 1), dim=64, spread=12.0),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name):
    case = CASES[name]
    (q, k, v, dout), mask, pairs, visible = problem(**case)
    want_out, want_lse, *want_grads = dense(q, k, v, dout, visible, SCALE)
    delta = jnp.asarray((want_out * np.asarray(dout, np.float64)).sum(-1).T, jnp.float32)
    work, options = (
        work_of(pairs, case["rows"]),
        dict(block_size=BLOCK, scale=SCALE, interpret=True),
    )

    @jax.jit
    def run(q, k, v, dout):
        forward = functools.partial(block_attention_mgpu.forward, out_dtype=q.dtype, **options)
        out, lse = forward(q, k, v, mask, work, None)
        operands = q, k, v, dout, lse, delta, mask, work, None
        return out, lse, block_attention_mgpu.backward(*operands, **options)

    out, lse, grads = run(q, k, v, dout)
    hidden = ~visible.any(1)
    assert relative_error(out, want_out) < 3e-3
    assert (np.asarray(out)[hidden] == 0).all() and np.isneginf(np.asarray(lse)[:, hidden]).all()
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[seen], want_lse[seen], rtol=1e-5, atol=1e-4)
    check_gradients(grads, want_grads, hidden)


def check_gradients(grads, want_grads, hidden):
    for got, want in zip(grads, want_grads, strict=True):
        assert np.isfinite(got).all()
        assert relative_error(got, want) < 5e-3 or not want.any()
    assert (np.asarray(grads[0])[hidden] == 0).all()


@pytest.mark.parametrize("kind", ["causal", "full", "nothing"])
def test_backward_without_a_warpgroup_for_dq(kind):
    lengths = [] if kind == "nothing" else [150, 60]
    case = dict(lengths=lengths, rows=256, causal=kind == "causal", heads=(2, 1), dim=128)
    (q, k, v, dout), mask, pairs, visible = problem(**case)
    want_out, want_lse, *want_grads = dense(q, k, v, dout, visible, SCALE)
    delta = jnp.asarray((want_out * np.asarray(dout, np.float64)).sum(-1).T, jnp.float32)
    backward = functools.partial(
        block_attention_mgpu.backward,
        **dict(mask=mask, work=work_of(pairs, case["rows"]), dq=None),
        **dict(block_size=BLOCK, scale=SCALE, interpret=True),
        config=block_attention_mgpu.BackwardConfig(dq_warpgroup=False),
    )
    grads = jax.jit(backward)(q, k, v, dout, jnp.asarray(want_lse, jnp.float32), delta)
    check_gradients(grads, want_grads, ~visible.any(1))


@pytest.mark.parametrize("piece", [16, 32, 64])
def test_tiles_gathered_from_pieces(piece):
    case = dict(lengths=[40, 30, 70, 5, 60], rows=256, causal=True, heads=(2, 1), dim=64)
    (q, k, v, dout), mask, pairs, visible = problem(**case)
    want_out, want_lse, *_ = dense(q, k, v, dout, visible, SCALE)
    forward = functools.partial(
        block_attention_mgpu.forward,
        **dict(mask=mask, work=work_of(pairs, case["rows"]), state=None),
        **dict(block_size=BLOCK, scale=SCALE, interpret=True),
        config=block_attention_mgpu.ForwardConfig(kv_piece=piece),
    )
    out, lse = jax.jit(forward)(q, k, v)
    assert relative_error(out, want_out) < 3e-3
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[seen], want_lse[seen], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 256])
def test_stages_continue_state_and_gradient(dim):
    case = CASES["causal_gqa"] | dict(dim=dim, heads=(4, 2) if dim == 64 else (2, 1))
    (q, k, v, dout), mask, pairs, visible = problem(**case)
    want_out, want_lse, want_dq, *_ = dense(q, k, v, dout, visible, SCALE)
    options = dict(block_size=BLOCK, scale=SCALE, interpret=True)
    half = len(pairs) // 2
    stages = [work_of(part, case["rows"]) for part in (pairs[:half], pairs[half:])]
    delta = jnp.asarray((want_out * np.asarray(dout, np.float64)).sum(-1).T, jnp.float32)

    @jax.jit
    def run(q, k, v, dout):
        state, dq = AttentionState.empty(*q.shape), None
        for work in stages:
            state = block_attention_mgpu.forward(q, k, v, mask, work, state, **options)
        for work in stages:
            dq, *_ = block_attention_mgpu.backward(
                q, k, v, dout, state.lse, delta, mask, work, dq, **options
            )
        return state, dq

    (out, lse), dq = run(q, k, v, dout)
    assert relative_error(out, want_out) < 3e-3 and out.dtype == jnp.float32
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[seen], want_lse[seen], rtol=1e-5, atol=1e-4)
    assert relative_error(dq, want_dq) < 5e-3


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 1), (3, 3)])
def test_lowers_for_cuda_without_a_gpu(dim, heads):
    rows = 512
    q, k = (jax.ShapeDtypeStruct((rows, n, dim), BF16) for n in heads)
    row_values = jax.ShapeDtypeStruct((heads[0], rows), jnp.float32)
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (rows, rows, rows, 3, 4)]

    def both(q, k, v, dout, lse, delta, lo, hi, index, starts, columns):
        mask, work = TokenMask(lo, hi, index), WorkList(starts, columns)
        options = dict(block_size=256, scale=0.1, implementation="mosaic_gpu")
        state = block_attention(q, k, v, mask, work, out_dtype=q.dtype, **options)
        state2 = block_attention(
            q, k, v, mask, work, AttentionState(state.out.astype(jnp.float32), state.lse), **options
        )
        return state2, block_attention_grad(q, k, v, dout, lse, delta, mask, work, **options)

    traced = jax.jit(both).trace(q, k, k, q, row_values, row_values, *ints)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


def test_kernels_that_never_ran_on_a_gpu_are_opt_in(monkeypatch):
    monkeypatch.setattr("pallas_kernels.implementations.no_device", lambda: None)
    for dim, chosen in ((128, "mosaic_gpu: the Hopper"), (256, "xla: mosaic_gpu is not used, as")):
        x = jnp.zeros((128, 1, dim), BF16)
        assert explain(x, x, block_size=128).startswith(chosen)
        asked = explain(x, x, block_size=128, implementation="mosaic_gpu")
        assert asked == "mosaic_gpu: asked for"


def test_named_implementation_is_refused_with_a_reason():
    x = jnp.zeros((256, 4, 64), BF16)
    index = jnp.zeros(256, jnp.int32)
    mask, work = TokenMask(index, index, index), WorkList(jnp.zeros(3, jnp.int32), index[:1])
    call = dict(scale=1.0, implementation="mosaic_gpu")
    for y, size, reason in (
        (x.astype(jnp.float32), 128, "bfloat16 or float16 operands, got float32"),
        (x[..., :32], 128, "head_dim 64, 128 or 256, got 32"),
        (x, 64, "block_size that is a multiple of 128, got 64"),
    ):
        few = WorkList(jnp.zeros(256 // size + 1, jnp.int32), work.columns)
        with pytest.raises(ValueError, match=reason):
            block_attention(y, y, y, mask, few, block_size=size, **call)
        assert "needs a GPU" in explain(y, y, block_size=size)
    assert explain(x, x, block_size=128) == (
        "xla: mosaic_gpu is not used, as it needs a GPU, and the default device is of platform "
        "'cpu'"
    )
    assert explain(x, x, block_size=128, implementation="xla") == "xla: asked for"
    values = jnp.zeros((4, 256))
    with pytest.raises(ValueError, match="head_dim 64, 128 or 256, got 32"):
        y = x[..., :32]
        block_attention_grad(y, y, y, y, values, values, mask, work, block_size=128, **call)
    with pytest.raises(ValueError, match="'cudnn' is not offered: cuDNN's attention takes"):
        block_attention(x, x, x, mask, work, block_size=128, scale=1.0, implementation="cudnn")
    with pytest.raises(ValueError, match="reserve_sms must not be negative, got -1"):
        block_attention(x, x, x, mask, work, block_size=128, scale=1.0, reserve_sms=-1)
    with pytest.raises(ValueError, match="scale must be positive"):
        block_attention(x, x, x, mask, work, block_size=128, scale=0.0)
