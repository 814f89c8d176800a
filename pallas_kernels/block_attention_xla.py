"""Plain-JAX twin of the block attention kernels: runs anywhere, float32 arithmetic.

Every work item is a (query block, kv block) pair. It is visited in tiles, so that no score matrix
larger than 512 x 512 per head exists, and tiles whose token ranges cannot meet are skipped.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

_MAX_TILE = 512


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: TokenMask,
    work: WorkList,
    state: AttentionState | None,
    *,
    block_size: int,
    scale: float,
    out_dtype,
) -> AttentionState:
    """Plain-JAX `pallas_kernels.block_attention`."""
    group = q.shape[1] // k.shape[1]

    def tile(carry, q_at, kv_at, size, visible):
        out, lse = carry
        scores = scale * _dot("qhgd,khd->hgqk", _rows(q, q_at, size, group), _rows(k, kv_at, size))
        scores = jnp.where(visible, scores, -jnp.inf)
        top = _finite(scores.max(axis=-1))
        weights = jnp.exp(scores - top[..., None])
        part = _dot("hgqk,khd->qhgd", weights, _rows(v, kv_at, size))
        part_top = top.reshape(-1, size)
        part_lse = part_top + jnp.log(weights.sum(axis=-1)).reshape(-1, size)

        old_lse = lax.dynamic_slice_in_dim(lse, q_at, size, axis=1)
        new_lse = jnp.logaddexp(old_lse, part_lse)
        keep = jnp.exp(old_lse - _finite(new_lse)).T[..., None]
        gain = jnp.exp(part_top - _finite(new_lse)).T[..., None]
        new_out = keep * _rows(out, q_at, size) + gain * part.reshape(size, *out.shape[1:])
        return (
            lax.dynamic_update_slice_in_dim(out, new_out, q_at, axis=0),
            lax.dynamic_update_slice_in_dim(lse, new_lse, q_at, axis=1),
        )

    start = AttentionState.empty(*q.shape) if state is None else state
    out, lse = _visit(tile, tuple(start), mask, work, block_size)
    return AttentionState(out.astype(out_dtype), lse)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    mask: TokenMask,
    work: WorkList,
    dq: jax.Array | None,
    *,
    block_size: int,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plain-JAX `pallas_kernels.block_attention_grad`."""
    group = q.shape[1] // k.shape[1]

    def tile(carry, q_at, kv_at, size, visible):
        dq, dk, dv = carry
        operands = q, k, v, dout, lse, delta
        weights, dscores = _tile_gradients(*operands, q_at, kv_at, size, visible, scale)
        q_tile, dout_tile = _rows(q, q_at, size, group), _rows(dout, q_at, size, group)
        dq_part = _dot("hgqk,khd->qhgd", dscores, _rows(k, kv_at, size))
        return (
            _add_rows(dq, dq_part.reshape(size, *q.shape[1:]), q_at),
            _add_rows(dk, _dot("hgqk,qhgd->khd", dscores, q_tile), kv_at),
            _add_rows(dv, _dot("hgqk,qhgd->khd", weights, dout_tile), kv_at),
        )

    dq, dk, dv = (
        jnp.zeros(x.shape, jnp.float32) if start is None else start
        for x, start in ((q, dq), (k, None), (v, None))
    )
    return _visit(tile, (dq, dk, dv), mask, work, block_size)


def _tile_gradients(q, k, v, dout, lse, delta, q_at, kv_at, size, visible, scale):
    """Softmax weights and gradients of the scores of one tile, [kv head, group, q, kv]."""
    group = q.shape[1] // k.shape[1]
    by_head = (k.shape[1], group, size)
    lse_tile = lax.dynamic_slice_in_dim(lse, q_at, size, axis=1).reshape(by_head)
    delta_tile = lax.dynamic_slice_in_dim(delta, q_at, size, axis=1).reshape(by_head)
    scores = scale * _dot("qhgd,khd->hgqk", _rows(q, q_at, size, group), _rows(k, kv_at, size))
    weights = jnp.exp(jnp.where(visible, scores - _finite(lse_tile)[..., None], -jnp.inf))
    dweights = _dot("qhgd,khd->hgqk", _rows(dout, q_at, size, group), _rows(v, kv_at, size))
    return weights, scale * weights * (dweights - delta_tile[..., None])


def _visit(tile, carry, mask: TokenMask, work: WorkList, block_size: int):
    """Folds `tile(carry, q_at, kv_at, size, visible)` over every tile that can hold a pair."""
    size = math.gcd(block_size, _MAX_TILE)
    if block_size // size > 16:  # an awkward block: one tile a block beats hundreds of slivers
        size = block_size
    per_block = block_size // size
    rows = work.rows()

    def visit_item(item, carry):
        def visit_tile(t, carry):
            q_at = rows[item] * block_size + t // per_block * size
            kv_at = work.columns[item] * block_size + t % per_block * size
            lo = lax.dynamic_slice_in_dim(mask.query_lo, q_at, size)
            hi = lax.dynamic_slice_in_dim(mask.query_hi, q_at, size)
            index = lax.dynamic_slice_in_dim(mask.kv_index, kv_at, size)
            visible = (lo[:, None] <= index) & (index <= hi[:, None])
            return lax.cond(
                visible.any(),
                lambda carry: tile(carry, q_at, kv_at, size, visible),
                lambda carry: carry,
                carry,
            )

        return lax.fori_loop(0, per_block**2, visit_tile, carry)

    return lax.fori_loop(0, work.row_starts[-1], visit_item, carry)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)


def _finite(x: jax.Array) -> jax.Array:
    """Replaces -inf by 0, so that differences with a row that saw nothing are not NaN."""
    return jnp.where(jnp.isneginf(x), 0.0, x)


def _rows(x: jax.Array, at, size: int, group: int | None = None) -> jax.Array:
    """Slices float32 rows; with `group`, splits query heads into [kv head, group]."""
    x = lax.dynamic_slice_in_dim(x, at, size).astype(jnp.float32)
    return x if group is None else x.reshape(size, -1, group, x.shape[-1])


def _add_rows(total: jax.Array, part: jax.Array, at) -> jax.Array:
    old = lax.dynamic_slice_in_dim(total, at, part.shape[0])
    return lax.dynamic_update_slice_in_dim(total, old + part, at, axis=0)
