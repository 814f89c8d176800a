"""Attention between a shared gather and a reduce-scatter, with rotary positions and a KV cache."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from flashcomm_jax.cache import KVCache
from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig
from flashcomm_jax.context import FlashCommContext, is_active
from flashcomm_jax.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from flashcomm_jax.tokens import per_rank, token_spec, unpad_tokens


def rotary(x: jax.Array, positions: jax.Array, theta: float = 10000.0) -> jax.Array:
    """Rotary position embedding, first half of the features rotated against the second.

    Args:
      x: [batch, length, heads, dim], dim even.
      positions: int [batch, length].
      theta: base of the wavelengths.

    Returns:
      Like x; rotated in float32 (Su et al., arXiv 2104.09864).
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    query_positions: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of tokens to those at or before them.

    Args:
      q: [batch, length, heads, dim].
      k: [batch, kv_length, kv_heads, dim].
      v: [batch, kv_length, kv_heads, value_dim], value_dim <= dim.
      scale: multiplies q.k; 1/sqrt(dim) if None.
      query_positions: int [batch, length], the last kv slot each query sees; None if
        query i sees kv slots 0..i.

    Returns:
      [batch, length, heads, value_dim]; NaN where a query's position is past the last slot,
      because what it should see was lost.
    """
    value_dim = v.shape[-1]
    if value_dim != q.shape[-1]:
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - value_dim)])
    mask = None
    if query_positions is not None:
        mask = (jnp.arange(k.shape[1]) <= query_positions[..., None])[:, None]
    on_gpu = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=query_positions is None,
        implementation="cudnn" if on_gpu and mask is None else None,
    )
    if query_positions is not None:
        lost = query_positions >= k.shape[1]
        out = jnp.where(lost[..., None, None], jnp.nan, out)
    return out[..., :value_dim]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    cache: KVCache | None = None,
    new_lengths: jax.Array | None = None,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """Causal attention of new tokens to the cache and to each other; stores them.

    Args:
      q: [batch, length, heads, dim].
      k: [batch, length, kv_heads, dim].
      v: [batch, length, kv_heads, value_dim].
      positions: int [batch, length]; with a cache that is not fresh, its next ones.
      cache: what came before, or None.
      new_lengths: int32 [batch], how many of the new tokens are real.
      scale: multiplies q.k.

    Returns:
      Output [batch, length, heads, value_dim] and the new cache.
    """
    if cache is None:
        return causal_attention(q, k, v, scale=scale), None
    assert new_lengths is not None
    new = cache.append(k, v, new_lengths)
    if cache.fresh:
        out = causal_attention(q, k, v, scale=scale)
    else:
        out = causal_attention(
            q,
            new.k.astype(q.dtype),
            new.v.astype(q.dtype),
            scale=scale,
            query_positions=positions,
        )
    return out, new


def check_cache(cache: KVCache | None, batch: int, length: int) -> None:
    """Raises ValueError where a cache can hold neither the batch nor the tokens."""
    if cache is None:
        return
    if cache.k.shape[0] != batch:
        raise ValueError(f"cache holds {cache.k.shape[0]} sequences, the batch has {batch}")
    if length > cache.max_len:
        raise ValueError(f"{length} new tokens do not fit in a cache of max_len={cache.max_len}")


class FlashCommAttention(nnx.Module):
    """Grouped-query self-attention: one gather for q, k and v; output reduce-scattered."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int | None = None,
        *,
        parallel: ParallelConfig = SINGLE_DEVICE,
        rope_theta: float = 10000.0,
        use_bias: bool = False,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          hidden_size: features of a hidden state.
          num_heads: query heads.
          num_kv_heads: key/value heads; divides num_heads.
          head_dim: features of a head; hidden_size / num_heads if None.
          parallel: mesh and axes.
          rope_theta: base of the rotary wavelengths.
          use_bias: biases on all four projections.
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: for initialization.

        Raises:
          ValueError: if the heads do not divide as needed.
        """
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_kv_heads=} must divide {num_heads=}")
        if num_kv_heads % parallel.tp:
            raise ValueError(
                f"{num_kv_heads=} must be a multiple of tp={parallel.tp}: choose a smaller tp, or "
                "repeat kv heads in the checkpoint"
            )
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if head_dim % 2:
            raise ValueError(f"{head_dim=} must be even for rotary positions")
        options = dict(
            parallel=parallel, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.q_proj = ColumnParallelLinear(hidden_size, num_heads * head_dim, **options)
        self.k_proj = ColumnParallelLinear(hidden_size, num_kv_heads * head_dim, **options)
        self.v_proj = ColumnParallelLinear(hidden_size, num_kv_heads * head_dim, **options)
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, **options)
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.rope_theta = rope_theta
        self.parallel = parallel

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> KVCache:
        """An empty cache for this layer."""
        return KVCache.empty(
            batch, max_len, self.num_kv_heads, self.head_dim, parallel=self.parallel, dtype=dtype
        )

    def __call__(
        self,
        x: jax.Array,
        context: FlashCommContext | None,
        positions: jax.Array,
        cache: KVCache | None = None,
        new_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Applies the layer.

        Args:
          x: hidden states [(rows,) tokens, hidden_size]: token shards if the context is active.
          context: the step's context.
          positions: int32 [batch, length]: rotary positions, and how a row's tokens split into
            sequences: rows * tokens == batch * length.
          cache: earlier tokens of the sequences; None for a forward pass on its own.
          new_lengths: int32 [batch], real tokens of each sequence; all if None.

        Returns:
          Hidden states like x, and the new cache.

        Raises:
          ValueError: if shapes do not fit together.
        """
        check_cache(cache, *positions.shape)
        q, k, v = column_parallel([self.q_proj, self.k_proj, self.v_proj], x, context)
        if is_active(context):
            q, k, v = (unpad_tokens(y, context) for y in (q, k, v))
        check_positions(positions, q)

        def local(q, k, v, positions, cache=None, new_lengths=None):
            q_heads, k_heads, v_heads = (
                y.reshape(*positions.shape, -1, self.head_dim) for y in (q, k, v)
            )
            out, cache = attend(
                rotary(q_heads, positions, self.rope_theta),
                rotary(k_heads, positions, self.rope_theta),
                v_heads,
                positions,
                cache,
                new_lengths,
            )
            out = out.reshape(q.shape)
            return out if cache is None else (out, cache)

        out, cache = attend_per_rank(
            local, self.parallel, context, (q, k, v), positions, cache, new_lengths
        )
        return self.o_proj(out, context), cache


def check_positions(positions: jax.Array, x: jax.Array) -> None:
    """Raises ValueError unless positions cover the tokens of x."""
    rows = x.shape[0] if x.ndim == 3 else 1
    if positions.ndim != 2 or positions.size != rows * x.shape[-2]:
        raise ValueError(
            f"positions must be [batch, length] with batch * length = {rows} rows * "
            f"{x.shape[-2]} tokens, got {positions.shape}"
        )


def attend_per_rank(
    local: Callable[..., Any],
    parallel: ParallelConfig,
    context: FlashCommContext | None,
    projections: Sequence[jax.Array],
    positions: jax.Array,
    cache: KVCache | None,
    new_lengths: jax.Array | None,
    *,
    sharded: Sequence[bool] = (True, True, True),
) -> tuple[jax.Array, KVCache | None]:
    """Runs attention on each rank's own rows and heads.

    Args:
      local: maps projections, positions (and cache, new_lengths) to output (and cache).
      parallel: mesh and axes.
      context: the step's context.
      projections: [(rows,) tokens, features] each.
      positions: int32 [batch, length].
      cache: earlier tokens, or None.
      new_lengths: int32 [batch]; all tokens if None.
      sharded: which projections have their features sharded over tp.

    Returns:
      Output [(rows,) tokens, features] with features sharded over tp, and the new cache.
    """
    arrays = [*projections, positions]
    if cache is not None:
        if new_lengths is None:
            new_lengths = jnp.full(positions.shape[0], positions.shape[1], jnp.int32)
        arrays += [cache, new_lengths]
    if parallel.mesh is None or not (is_active(context) or parallel.explicit or cache is not None):
        result = local(*arrays)  # the plain layer's program, heads partitioned by the compiler
    else:
        tp = parallel.name(parallel.tp_axis)
        first = projections[0]
        rows = parallel.row_axes(first.shape[0]) or None if first.ndim == 3 else None
        in_specs: list[Any] = [
            token_spec(parallel, y.shape, None, tp if is_sharded else None)
            for y, is_sharded in zip(projections, sharded, strict=True)
        ]
        in_specs.append(P(rows, None))
        out_specs: Any = token_spec(parallel, first.shape, None, tp)
        if cache is not None:
            cache_specs = cache.specs(parallel, rows)
            in_specs += [cache_specs, P(rows)]
            out_specs = (out_specs, dataclasses.replace(cache_specs, fresh=False))
        result = per_rank(local, parallel, in_specs, out_specs)(*arrays)
    return result if cache is not None else (result, None)
