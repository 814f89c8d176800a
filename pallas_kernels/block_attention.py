"""Attention over a work list of blocks: the entry points that every implementation serves.

    out, lse = block_attention(q, k, v, mask, work, state, block_size=..., scale=...)

continues `state` with the block pairs of `work`. One call may be a whole attention, or one stage
of a context-parallel one whose keys and values have just arrived.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention_mgpu, block_attention_xla, implementations
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList


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
    out_dtype: jax.typing.DTypeLike = jnp.float32,
    reserve_sms: int = 0,
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
      scale: multiplies q.k before the softmax; positive.
      out_dtype: of the output where `state` is None. A state that goes on should stay float32.
      reserve_sms: streaming multiprocessors that "mosaic_gpu" leaves to others, such as transfers;
        "xla" knows no such thing.
      implementation: "mosaic_gpu", "xla", or None for the fastest that serves the case; `explain`
        tells which that is. A named one is used or refused.

    Returns:
      The new state. Query blocks without items keep the old one.

    Raises:
      ValueError: if shapes, dtypes, `scale`, `reserve_sms` or `implementation` do not fit together.
    """
    _check(q, k, v, mask, work, block_size, scale, reserve_sms)
    if state is not None and out_dtype != state.out.dtype:
        raise ValueError(f"out_dtype is for a new state, got {out_dtype=} and {state.out.dtype=}")
    options = dict(block_size=block_size, scale=scale, out_dtype=out_dtype)
    if _choose(implementation, q, k, block_size) == "mosaic_gpu":
        forward = block_attention_mgpu.forward
        return forward(q, k, v, mask, work, state, reserve_sms=reserve_sms, **options)
    return block_attention_xla.forward(q, k, v, mask, work, state, **options)


def block_attention_grad(
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
    reserve_sms: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `block_attention` for the block pairs of a work list.

    Args:
      q: as in `block_attention`.
      k: as in `block_attention`.
      v: as in `block_attention`.
      dout: cotangent of the attention output, shaped like q, of the same dtype.
      lse: float32 [num_q_heads, query_rows], over everything the query sees in all stages.
      delta: float32 [num_q_heads, query_rows], the row sums of out * dout.
      mask: which token pairs count.
      work: block pairs; rows are query blocks, columns are kv blocks.
      dq: float32, shaped like q: gradient so far, to be added to; None for zero.
      block_size: rows per block.
      scale: multiplies q.k before the softmax; positive.
      reserve_sms: as in `block_attention`.
      implementation: as in `block_attention`.

    Returns:
      dq continued, dk and dv, float32, shaped like q, k and v; dk and dv are summed over the query
      heads that share a kv head.

    Raises:
      ValueError: if shapes, dtypes, `scale`, `reserve_sms` or `implementation` do not fit together.
    """
    _check(q, k, v, mask, work, block_size, scale, reserve_sms)
    operands = q, k, v, dout, lse, delta, mask, work, dq
    options = dict(block_size=block_size, scale=scale)
    if _choose(implementation, q, k, block_size) == "mosaic_gpu":
        return block_attention_mgpu.backward(*operands, reserve_sms=reserve_sms, **options)
    return block_attention_xla.backward(*operands, **options)


def explain(q, k, *, block_size: int, implementation: str | None = None) -> str:
    """Says in a sentence which implementation `block_attention` uses for operands, and why.

    Args:
      q: queries, or anything with their shape and dtype.
      k: keys, likewise.
      block_size: rows per block.
      implementation: as in `block_attention`.

    Returns:
      The sentence; it begins with the name of the implementation.

    Raises:
      ValueError: if `implementation` cannot be used.
    """
    return implementations.explain(implementation, _refusal(implementation, q, k, block_size))


def _choose(name: str | None, q, k, block_size: int) -> str:
    return implementations.choose(name, _refusal(name, q, k, block_size))


def _refusal(name: str | None, q, k, block_size: int) -> str | None:
    """Says why the Hopper kernels do not serve operands; what never ran on a GPU is opt-in."""
    if name == "cudnn":
        raise ValueError(
            "implementation 'cudnn' is not offered: cuDNN's attention takes sequence lengths, not "
            "block pairs with a token mask, and cannot continue a state"
        )
    if name is None and q.shape[2] == 256:
        return "its kernels for head_dim 256 have not run on a GPU yet and must be asked for"
    return block_attention_mgpu.unsupported(q, k, block_size)


def _check(q, k, v, mask: TokenMask, work: WorkList, block_size, scale, reserve_sms) -> None:
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
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if reserve_sms < 0:
        raise ValueError(f"reserve_sms must not be negative, got {reserve_sms}")
