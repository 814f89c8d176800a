"""Multi-head latent attention (arXiv 2405.04434, section 2.1) on token shards."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from flashcomm_jax.attention import (
    attend,
    attend_per_rank,
    causal_attention,
    check_cache,
    check_positions,
    rotary,
)
from flashcomm_jax.cache import KVCache
from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig
from flashcomm_jax.context import FlashCommContext, is_active
from flashcomm_jax.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from flashcomm_jax.tokens import gather_tokens, per_rank, token_spec


class FlashCommMLAAttention(nnx.Module):
    """Attention through low-rank latents; the cache holds latents, not heads.

    The projections to latents, q_a and kv_a, are small and whole on every rank; the projections
    from latents to heads, q_b and kv_b, are column-parallel.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        gather_latents: bool = False,
        parallel: ParallelConfig = SINGLE_DEVICE,
        rope_theta: float = 10000.0,
        epsilon: float = 1e-6,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          hidden_size: features of a hidden state.
          num_heads: heads; a multiple of tp.
          q_lora_rank: features of the query latent; kv_lora_rank if None.
          kv_lora_rank: features of the key/value latent.
          qk_nope_head_dim: features of a query/key head without position.
          qk_rope_head_dim: features with rotary position, shared by all key heads.
          v_head_dim: features of a value head; at most those of a key.
          gather_latents: with an active context, project token shards to latents and gather
            those, instead of gathering hidden states before the projections: fewer bytes by
            hidden_size / (q_lora_rank + kv_lora_rank + qk_rope_head_dim), and 1/tp of the work.
          parallel: mesh and axes.
          rope_theta: base of the rotary wavelengths.
          epsilon: of the latent norms.
          dtype: of the computation.
          param_dtype: of the parameters.
          rngs: for initialization.

        Raises:
          ValueError: if the heads do not fit the mesh or each other.
        """
        if num_heads % parallel.tp:
            raise ValueError(f"{num_heads=} must be a multiple of tp={parallel.tp}")
        if v_head_dim > qk_nope_head_dim + qk_rope_head_dim:
            raise ValueError(
                f"{v_head_dim=} must not exceed {qk_nope_head_dim=} + {qk_rope_head_dim=}"
            )
        if qk_rope_head_dim % 2:
            raise ValueError(f"{qk_rope_head_dim=} must be even for rotary positions")
        q_lora_rank = kv_lora_rank if q_lora_rank is None else q_lora_rank
        key_dim = qk_nope_head_dim + qk_rope_head_dim
        dtypes: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        whole: dict[str, Any] = dict(
            use_bias=False, kernel_metadata=parallel.metadata(None, None), **dtypes
        )
        split: dict[str, Any] = dict(use_bias=False, parallel=parallel, **dtypes)
        self.q_a_proj = nnx.Linear(hidden_size, q_lora_rank, **whole)
        norm: dict[str, Any] = dict(
            epsilon=epsilon, scale_metadata=parallel.metadata(None), **dtypes
        )
        self.q_a_layernorm = nnx.RMSNorm(q_lora_rank, **norm)
        self.q_b_proj = ColumnParallelLinear(q_lora_rank, num_heads * key_dim, **split)
        self.kv_a_proj = nnx.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, **whole)
        self.kv_a_layernorm = nnx.RMSNorm(kv_lora_rank, **norm)
        self.kv_b_proj = ColumnParallelLinear(
            kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), **split
        )
        self.o_proj = RowParallelLinear(num_heads * v_head_dim, hidden_size, **split)
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.gather_latents = gather_latents
        self.rope_theta = rope_theta
        self.parallel = parallel

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> KVCache:
        """An empty cache: `k` holds rotated shared keys, `v` the normalized latents."""
        return KVCache.empty(
            batch,
            max_len,
            1,
            self.qk_rope_head_dim,
            self.kv_lora_rank,
            parallel=self.parallel,
            dtype=dtype,
            shard_heads=False,
        )

    def __call__(
        self,
        x: jax.Array,
        context: FlashCommContext | None,
        positions: jax.Array,
        cache: KVCache | None = None,
        new_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Applies the layer; arguments and results are those of `FlashCommAttention`."""
        check_cache(cache, *positions.shape)
        if is_active(context) and not self.gather_latents:
            x = gather_tokens(x, context)
        q_latent, kv = self.q_a_proj(x), self.kv_a_proj(x)
        if is_active(context) and self.gather_latents:
            both = gather_tokens(jnp.concatenate([q_latent, kv], axis=-1), context)
            q_latent, kv = jnp.split(both, [q_latent.shape[-1]], axis=-1)
        q_latent = self.q_a_layernorm(q_latent)
        latent = self.kv_a_layernorm(kv[..., : self.kv_lora_rank])
        shared_key = kv[..., self.kv_lora_rank :]
        check_positions(positions, q_latent)
        (q,) = column_parallel([self.q_b_proj], q_latent, context, gathered=True)
        batch, length = positions.shape
        nope = self.qk_nope_head_dim

        if cache is None:
            (heads,) = column_parallel([self.kv_b_proj], latent, context, gathered=True)

            def local(q, heads, shared_key, positions):
                split = heads.reshape(*positions.shape, -1, nope + self.v_head_dim)
                query, key = self._with_position(q, split[..., :nope], shared_key, positions)
                out, _ = attend(query, key, split[..., nope:], positions)
                return out.reshape(*q.shape[:-1], -1)

            out, _ = attend_per_rank(
                local,
                self.parallel,
                context,
                (q, heads, shared_key),
                positions,
                None,
                None,
                sharded=(True, True, False),
            )
            return self.o_proj(out, context), None

        # Latents enter the cache whole on every rank; heads are expanded from what it holds.
        if new_lengths is None:
            new_lengths = jnp.full(batch, length, jnp.int32)
        new = self._store(cache, shared_key, latent, positions, new_lengths)
        cached = new.v.astype(latent.dtype)[:, :, 0]
        (heads,) = column_parallel([self.kv_b_proj], cached, context, gathered=True)
        lead = q.shape[:-2]
        slots = batch * cache.max_len // (lead[0] if lead else 1)
        axes = (self.parallel.row_axes(lead[0]) or None, None) if lead else (None,)
        tp = self.parallel.name(self.parallel.tp_axis)
        expanded = self.parallel.reshape(heads, (*lead, slots, heads.shape[-1]), *axes, tp)
        cached_key = self.parallel.reshape(
            new.k.astype(q.dtype), (*lead, slots, self.qk_rope_head_dim), *axes, None
        )

        def local_cached(q, heads, cached_key, positions):
            shape = (positions.shape[0], cache.max_len)
            split = heads.reshape(*shape, -1, nope + self.v_head_dim)
            query = self._query(q, positions)
            key = self._join(split[..., :nope], cached_key.reshape(*shape, 1, -1))
            out = causal_attention(query, key, split[..., nope:], query_positions=positions)
            return out.reshape(*q.shape[:-1], -1)

        out, _ = attend_per_rank(
            local_cached,
            self.parallel,
            context,
            (q, expanded, cached_key),
            positions,
            None,
            None,
            sharded=(True, True, False),
        )
        return self.o_proj(out, context), new

    def _store(self, cache, shared_key, latent, positions, new_lengths):
        """Appends rotated shared keys and latents, on every rank the same."""

        def local(cache, shared_key, latent, positions, new_lengths):
            key = shared_key.reshape(*positions.shape, 1, -1)
            value = latent.reshape(*positions.shape, 1, -1)
            rotated = rotary(key, positions, self.rope_theta)
            return cache.append(rotated, value, new_lengths)

        parallel = self.parallel
        if parallel.mesh is not None:
            batch_axes = parallel.row_axes(positions.shape[0]) or None
            specs = cache.specs(parallel, batch_axes, shard_heads=False)
            tokens = token_spec(parallel, latent.shape)
            local = per_rank(
                local,
                parallel,
                [specs, tokens, tokens, P(batch_axes, None), P(batch_axes)],
                dataclasses.replace(specs, fresh=False),
            )
        return local(cache, shared_key, latent, positions, new_lengths)

    def _query(self, q, positions):
        q = q.reshape(*positions.shape, -1, self.qk_nope_head_dim + self.qk_rope_head_dim)
        position_free, with_position = jnp.split(q, [self.qk_nope_head_dim], axis=-1)
        rotated = rotary(with_position, positions, self.rope_theta)
        return jnp.concatenate([position_free, rotated], axis=-1)

    def _join(self, key, rotated):
        rotated = jnp.broadcast_to(rotated, (*key.shape[:-1], self.qk_rope_head_dim))
        return jnp.concatenate([key, rotated], axis=-1)

    def _with_position(self, q, key, shared_key, positions):
        shared_key = shared_key.reshape(*positions.shape, 1, -1)
        rotated = rotary(shared_key, positions, self.rope_theta)
        return self._query(q, positions), self._join(key, rotated)
