"""Contract of block attention: every implementation against a dense float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import all_pairs, dense, packed_mask, relative_error

from pallas_kernels import (
    TokenMask,
    WorkList,
    block_attention,
    block_attention_grad,
)

BLOCK = 64


CASES = {
    "one_segment": [256],
    "padding_tail": [70, 1, 100],
    "block_edges": [64, 65, 63, 64],
    "tiny": [1, 1, 1, 3],
    "nothing": [],
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
def test_against_dense(case, causal, heads):
    rng = np.random.default_rng(0)
    rows, dim = 256, 16
    lo, hi, index = packed_mask(CASES[case], rows, causal)
    q, dout = (rng.normal(size=(rows, heads[0], dim)).astype(np.float32) for _ in range(2))
    k, v = (rng.normal(size=(rows, heads[1], dim)).astype(np.float32) for _ in range(2))
    pairs = rng.permutation(all_pairs(lo, hi, index, BLOCK))
    padded = np.zeros((len(pairs) + 3, 2), np.int32)  # padding items must be ignored
    padded[: len(pairs)] = pairs
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (lo, hi, index)))
    visible = (lo[:, None] <= index) & (index <= hi[:, None])
    want_out, want_lse, want_dq, want_dk, want_dv = dense(q, k, v, dout, visible, 0.3)

    @jax.jit
    def run(q, k, v, dout, padded):
        options = dict(block_size=BLOCK, scale=0.3, implementation="xla")
        # Two calls that carry state, as two stages would.
        half, num_rows = len(pairs) // 2, rows // BLOCK
        stages = [
            WorkList.from_pairs(padded[:, 0], padded[:, 1], half, num_rows),
            WorkList.from_pairs(
                padded[half:, 0], padded[half:, 1], len(pairs) - half, rows // BLOCK
            ),
        ]
        state = None
        for work in stages:
            state = block_attention(q, k, v, mask, work, state, **options)
        delta = (state.out * dout).sum(-1).T
        dq, dk, dv = None, 0, 0
        for work in stages:
            operands = q, k, v, dout, state.lse, delta, mask, work
            dq, dk_part, dv_part = block_attention_grad(*operands, dq, **options)
            dk, dv = dk + dk_part, dv + dv_part
        return *state, dq, dk, dv

    out, lse, dq, dk, dv = run(q, k, v, dout, padded)
    assert relative_error(out, want_out) < 1e-6
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[seen], want_lse[seen], rtol=1e-5, atol=1e-5)
    for got, want in ((dq, want_dq), (dk, want_dk), (dv, want_dv)):
        assert relative_error(got, want) < 2e-6
        assert np.isfinite(got).all()
    hidden = ~visible.any(1)
    assert (np.asarray(out)[hidden] == 0).all() and (np.asarray(dq)[hidden] == 0).all()


def test_transpose_groups_the_same_pairs_by_column():
    rows = jnp.array([2, 0, 1, 2, 9], jnp.int32)
    columns = jnp.array([1, 1, 0, 0, 9], jnp.int32)
    work = WorkList.from_pairs(rows, columns, 4, num_rows=3)
    turned = work.transpose(num_columns=2)
    np.testing.assert_array_equal(work.row_starts, [0, 1, 2, 4])
    np.testing.assert_array_equal(turned.row_starts, [0, 2, 4])
    pairs = {(int(r), int(c)) for c, r in zip(turned.rows()[:4], turned.columns[:4], strict=True)}
    assert pairs == {(2, 1), (0, 1), (1, 0), (2, 0)}


def test_bad_arguments_are_named():
    x = jnp.zeros((64, 4, 8))
    index = jnp.zeros(64, jnp.int32)
    mask, work = TokenMask(index, index, index), WorkList.from_pairs(index[:1], index[:1], 0, 1)
    call = dict(block_size=64, scale=1.0)
    with pytest.raises(ValueError, match="num_kv_heads must divide"):
        block_attention(x, x[:, :3], x[:, :3], mask, work, **call)
    with pytest.raises(ValueError, match="share a dtype"):
        block_attention(x, x.astype(jnp.bfloat16), x, mask, work, **call)
    with pytest.raises(ValueError, match="block_size must divide"):
        block_attention(x, x, x, mask, work, block_size=48, scale=1.0)
    with pytest.raises(ValueError, match="implementation must be one of"):
        block_attention(x, x, x, mask, work, implementation="tpu", **call)
