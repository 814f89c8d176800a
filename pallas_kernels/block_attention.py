"""Attention over a work list of blocks: the entry points that every implementation serves.

    out, lse = block_attention(q, k, v, mask, work, state, block_size=..., scale=...)

continues `state` with the block pairs of `work`. One call may be a whole attention, or one stage
of a context-parallel one whose keys and values have just arrived.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention_xla
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

IMPLEMENTATIONS = {"xla": block_attention_xla}


def block_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: TokenMask,
    work: WorkList,
    state: AttentionState | None = None,
    *,
    block_size: int,
    scale: float,
    implementation: str | None = None,
) -> AttentionState:
    """Softmax attention of query blocks over the kv blocks that a work list names.

    Args:
      q: [query_rows, num_q_heads, head_dim], float32, bfloat16 or float16.
      k: [kv_rows, num_kv_heads, head_dim], same dtype; num_kv_heads divides num_q_heads.
      v: like k.
      mask: which token pairs count.
      work: block pairs; rows are query blocks, columns are kv blocks.
      state: what the query rows have gathered so far; None for nothing.
      block_size: rows per block; divides query_rows and kv_rows.
      scale: multiplies q.k before the softmax.
      implementation: "xla", "mosaic_gpu", or None to choose by device.

    Returns:
      The new state. Query blocks without items keep the old one.

    Raises:
      ValueError: if shapes, dtypes or `implementation` do not fit together.
    """
    _check(q, k, v, mask, work, block_size)
    if state is None:
        state = AttentionState.empty(*q.shape)
    return _implementation(implementation).forward(
        q, k, v, mask, work, state, block_size=block_size, scale=scale
    )


def block_attention_grad_q(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    mask: TokenMask,
    work: WorkList,
    dq: jax.Array | None = None,
    *,
    block_size: int,
    scale: float,
    implementation: str | None = None,
) -> jax.Array:
    """Gradient of `block_attention` in its queries, for the block pairs of a work list.

    Args:
      q: as in `block_attention`.
      k: as in `block_attention`.
      v: as in `block_attention`.
      dout: cotangent of the attention output, shaped like q.
      lse: float32 [num_q_heads, query_rows], over everything the query sees in all stages.
      delta: float32 [num_q_heads, query_rows], the row sums of out * dout.
      mask: which token pairs count.
      work: block pairs; rows are query blocks, columns are kv blocks.
      dq: float32, shaped like q: gradient so far, to be added to; None for zero.
      block_size: rows per block.
      scale: multiplies q.k before the softmax.
      implementation: as in `block_attention`.

    Returns:
      dq continued, float32.

    Raises:
      ValueError: if shapes, dtypes or `implementation` do not fit together.
    """
    _check(q, k, v, mask, work, block_size)
    if dq is None:
        dq = jnp.zeros(q.shape, jnp.float32)
    return _implementation(implementation).backward_q(
        q, k, v, dout, lse, delta, mask, work, dq, block_size=block_size, scale=scale
    )


def block_attention_grad_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    mask: TokenMask,
    work: WorkList,
    *,
    block_size: int,
    scale: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of `block_attention` in its keys and values, for the pairs of a work list.

    It is apart from `block_attention_grad_q` so that a context-parallel stage can send dk and dv
    home while dq is computed.

    Args:
      q: as in `block_attention`.
      k: as in `block_attention`.
      v: as in `block_attention`.
      dout: as in `block_attention_grad_q`.
      lse: as in `block_attention_grad_q`.
      delta: as in `block_attention_grad_q`.
      mask: which token pairs count.
      work: block pairs; rows are query blocks, columns are kv blocks.
      block_size: rows per block.
      scale: multiplies q.k before the softmax.
      implementation: as in `block_attention`.

    Returns:
      (dk, dv), float32, shaped like k and v, summed over the query heads that share a kv head.

    Raises:
      ValueError: if shapes, dtypes or `implementation` do not fit together.
    """
    _check(q, k, v, mask, work, block_size)
    return _implementation(implementation).backward_kv(
        q, k, v, dout, lse, delta, mask, work, block_size=block_size, scale=scale
    )


def _implementation(name: str | None):
    if name is None:
        name = "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name]


def _check(q, k, v, mask: TokenMask, work: WorkList, block_size: int) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            "q must be [query_rows, num_q_heads, head_dim] and k, v [kv_rows, num_kv_heads, "
            f"head_dim] with the same head_dim, got {q.shape=}, {k.shape=}, {v.shape=}"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k, v must share a dtype, got {q.dtype=}, {k.dtype=}, {v.dtype=}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"num_kv_heads must divide num_q_heads, got {k.shape[1]} and {q.shape[1]}")
    if q.shape[0] % block_size or k.shape[0] % block_size:
        raise ValueError(
            f"block_size must divide query_rows and kv_rows, got {block_size=}, "
            f"query_rows={q.shape[0]}, kv_rows={k.shape[0]}"
        )
    rows = {"query_lo": q.shape[0], "query_hi": q.shape[0], "kv_index": k.shape[0]}
    for name, size in rows.items():
        if getattr(mask, name).shape != (size,):
            raise ValueError(f"mask.{name} must be [{size}], got {getattr(mask, name).shape}")
    if work.row_starts.shape != (q.shape[0] // block_size + 1,):
        raise ValueError(
            f"work.row_starts must be [{q.shape[0] // block_size + 1}] for {q.shape[0]} query rows "
            f"of {block_size=}, got {work.row_starts.shape}"
        )
