"""Decoder layer: norms and residuals on token shards, gathers only where columns are split."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flashcomm_jax.cache import KVCache
from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig
from flashcomm_jax.context import FlashCommContext


class FlashCommDecoderLayer(nnx.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        self_attn: Any,
        mlp: Any,
        hidden_size: int,
        *,
        parallel: ParallelConfig = SINGLE_DEVICE,
        epsilon: float = 1e-6,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          self_attn: a `FlashCommAttention` or `FlashCommMLAAttention`.
          mlp: a `FlashCommMLP` or `FlashCommMoE`.
          hidden_size: features of a hidden state.
          parallel: mesh and axes.
          epsilon: of the norms.
          dtype: of the computation.
          param_dtype: of the norms' parameters.
          rngs: for initialization.
        """
        options: dict[str, Any] = dict(
            epsilon=epsilon,
            scale_metadata=parallel.metadata(None),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.input_layernorm = nnx.RMSNorm(hidden_size, **options)
        self.self_attn = self_attn
        self.post_attention_layernorm = nnx.RMSNorm(hidden_size, **options)
        self.mlp = mlp

    def __call__(
        self,
        x: jax.Array,
        context: FlashCommContext | None,
        positions: jax.Array,
        cache: KVCache | None = None,
        new_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Applies the layer; arguments and results are those of `FlashCommAttention`."""
        attended, cache = self.self_attn(
            self.input_layernorm(x), context, positions, cache, new_lengths
        )
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), context), cache
