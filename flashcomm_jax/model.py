"""A Llama-style language model on FlashComm layers, with prefill, decode and generation."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from flashcomm_jax.attention import FlashCommAttention, check_cache
from flashcomm_jax.cache import KVCache
from flashcomm_jax.config import SINGLE_DEVICE, FlashCommConfig, ParallelConfig
from flashcomm_jax.context import FlashCommContext, Stage, is_active
from flashcomm_jax.decoder import FlashCommDecoderLayer
from flashcomm_jax.linear import ColumnParallelLinear, column_parallel
from flashcomm_jax.mla import FlashCommMLAAttention
from flashcomm_jax.mlp import FlashCommMLP
from flashcomm_jax.moe import FlashCommMoE
from flashcomm_jax.tokens import gather_tokens, per_rank, take_tokens, token_spec


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a model.

    Attributes:
      vocab_size: tokens; a multiple of tp.
      hidden_size: features of a hidden state.
      intermediate_size: features inside the feed-forward layers (of each expert, with MoE).
      num_layers: decoder layers.
      num_heads: query heads.
      num_kv_heads: key/value heads (not used by MLA).
      head_dim: features of a head; hidden_size / num_heads if None.
      rope_theta: base of the rotary wavelengths.
      num_experts: experts per layer; 0 for a dense feed-forward layer.
      experts_per_token: experts that see a token.
      kv_lora_rank: 0 for grouped-query attention; else the latent width of MLA.
      dtype: of the computation.
      param_dtype: of the parameters.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    num_experts: int = 0
    experts_per_token: int = 2
    kv_lora_rank: int = 0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @classmethod
    def llama_8b(cls, **changes) -> "LlamaConfig":
        """Llama 3 8B: the shape of the benchmark "8b"."""
        return dataclasses.replace(cls(128256, 4096, 14336, 32, 32, 8, 128, 500000.0), **changes)

    @classmethod
    def llama_70b(cls, **changes) -> "LlamaConfig":
        """Llama 3 70B: the shape of the benchmark "70b"."""
        return dataclasses.replace(cls(128256, 8192, 28672, 80, 64, 8, 128, 500000.0), **changes)


class VocabParallelEmbed(nnx.Embed):
    """Embedding with the vocabulary sharded over tp; ends in token shards if active."""

    def __init__(self, num_embeddings: int, features: int, *, parallel: ParallelConfig, **kwargs):
        """Makes the layer; other keyword arguments are those of `nnx.Embed`."""
        if num_embeddings % parallel.tp:
            raise ValueError(f"{num_embeddings=} must be a multiple of tp={parallel.tp}")
        super().__init__(
            num_embeddings,
            features,
            embedding_metadata=parallel.metadata(parallel.tp_axis, None),
            **kwargs,
        )
        self.parallel = parallel

    def __call__(
        self, inputs: jax.Array, context: FlashCommContext | None = None, out_sharding=None
    ) -> jax.Array:
        """Embeds tokens [(rows,) tokens] to [(rows,) tokens, features]."""
        parallel, tp = self.parallel, self.parallel.tp_axis
        if not is_active(context):
            if not parallel.explicit:
                return super().__call__(inputs)
            spec = token_spec(parallel, (*inputs.shape, self.features))
            return super().__call__(inputs, out_sharding=parallel.sharding(*spec))
        if inputs.shape[-1] != context.original_num_tokens:
            raise ValueError(
                f"inputs must have original_num_tokens={context.original_num_tokens} tokens a row, "
                f"got {inputs.shape=}"
            )
        widths = [(0, 0)] * (inputs.ndim - 1) + [(0, context.pad_size)]
        inputs = jnp.pad(inputs, widths, constant_values=-1)  # in no rank's vocabulary
        (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)

        def local(inputs, table):
            index = inputs - lax.axis_index(tp) * table.shape[0]
            owned = (index >= 0) & (index < table.shape[0])
            found = jnp.where(owned[..., None], table[jnp.where(owned, index, 0)], 0)
            return lax.psum_scatter(found, tp, scatter_dimension=found.ndim - 2, tiled=True)

        out_shape = (*inputs.shape, self.features)
        in_spec = P(*token_spec(parallel, out_shape)[:-1])
        out_spec = token_spec(parallel, out_shape, tp)
        return per_rank(local, parallel, [in_spec, P(tp, None)], out_spec)(inputs, table)


class FlashCommLlama(nnx.Module):
    """Embedding, decoder layers, norm and LM head.

    The embedding ends in a reduce-scatter and the LM head begins with a gather (of the last
    tokens alone, in a prefill), so in between every hidden state is a token shard.
    """

    def __init__(
        self, config: LlamaConfig, *, parallel: ParallelConfig = SINGLE_DEVICE, rngs: nnx.Rngs
    ):
        """Makes the model.

        Args:
          config: its shape.
          parallel: mesh and axes.
          rngs: for initialization.

        Raises:
          ValueError: if the shape does not fit the mesh.
        """
        dtypes: dict[str, Any] = dict(dtype=config.dtype, param_dtype=config.param_dtype)
        self.embed_tokens = VocabParallelEmbed(
            config.vocab_size, config.hidden_size, parallel=parallel, rngs=rngs, **dtypes
        )
        shared: dict[str, Any] = dict(parallel=parallel, rngs=rngs, **dtypes)
        layers: list[Any] = []
        for _ in range(config.num_layers):
            if config.kv_lora_rank:
                attention = FlashCommMLAAttention(
                    config.hidden_size,
                    config.num_heads,
                    kv_lora_rank=config.kv_lora_rank,
                    rope_theta=config.rope_theta,
                    **shared,
                )
            else:
                attention = FlashCommAttention(
                    config.hidden_size,
                    config.num_heads,
                    config.num_kv_heads,
                    config.head_dim,
                    rope_theta=config.rope_theta,
                    **shared,
                )
            if config.num_experts:
                mlp = FlashCommMoE(
                    config.hidden_size,
                    config.intermediate_size,
                    config.num_experts,
                    config.experts_per_token,
                    **shared,
                )
            else:
                mlp = FlashCommMLP(config.hidden_size, config.intermediate_size, **shared)
            layers.append(FlashCommDecoderLayer(attention, mlp, config.hidden_size, **shared))
        self.layers = nnx.List(layers)
        self.norm = nnx.RMSNorm(
            config.hidden_size, scale_metadata=parallel.metadata(None), rngs=rngs, **dtypes
        )
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, use_bias=False, **shared
        )
        self.config = config
        self.parallel = parallel

    def build_context(
        self, batch: int, length: int, config: FlashCommConfig, stage: Stage
    ) -> FlashCommContext:
        """The context of a step on `batch` sequences of `length` new tokens each."""
        rows = self.parallel.num_rows(batch)
        return FlashCommContext.build(batch // rows * length, self.parallel, config, stage)

    def init_caches(self, batch: int, max_len: int, dtype=None) -> tuple[KVCache, ...]:
        """Empty caches, one per layer; dtype as the computation's if None."""
        dtype = dtype or self.config.dtype or self.config.param_dtype
        layers: Any = self.layers
        return tuple(layer.self_attn.init_cache(batch, max_len, dtype) for layer in layers)

    def __call__(
        self,
        tokens: jax.Array,
        context: FlashCommContext | None,
        caches: Sequence[KVCache] | None = None,
        lengths: jax.Array | None = None,
        *,
        logits: Literal["all", "last"] = "all",
    ) -> tuple[jax.Array, tuple[KVCache, ...] | None]:
        """Logits of the tokens, and what the next step needs.

        Args:
          tokens: int32 [batch, length]; shorter prompts are padded on the right.
          context: the step's context; `build_context` makes one.
          caches: earlier tokens, one cache per layer; None for a forward pass on its own.
          lengths: int32 [batch], real tokens of each sequence; all if None.
          logits: "all" for every position, "last" for each sequence's last real token.

        Returns:
          Logits [batch, length or 1, vocab_size], vocabulary sharded over tp, and the new
          caches.

        Raises:
          ValueError: if an argument does not fit the model or the context.
        """
        if logits not in ("all", "last"):
            raise ValueError(f"logits must be 'all' or 'last', got {logits!r}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch, length], got {tokens.shape=}")
        batch, length = tokens.shape
        rows = self.parallel.num_rows(batch)
        if lengths is None:
            lengths = jnp.full(batch, length, jnp.int32)
        if caches is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        else:
            check_cache(caches[0], batch, length)
            positions = caches[0].positions(length)
        row_axes = self.parallel.row_axes(batch) or None
        folded = (rows, batch // rows * length)
        tokens = self.parallel.reshape(tokens, folded, row_axes, None)
        x = self.embed_tokens(tokens, context)
        new_caches: list[Any] = []
        for i, layer in enumerate(self.layers):
            cache = None if caches is None else caches[i]
            x, cache = layer(x, context, positions, cache, lengths)
            new_caches.append(cache)
        x = self.norm(x)
        if logits == "last":
            starts = jnp.arange(batch // rows, dtype=jnp.int32) * length
            last = jnp.maximum(lengths - 1, 0)
            last = self.parallel.reshape(last, (rows, batch // rows), row_axes, None)
            index = starts + last
            x = take_tokens(x, index, context)
        elif is_active(context):
            x = gather_tokens(x, context)
        (out,) = column_parallel([self.lm_head], x, context, gathered=True)
        picks = 1 if logits == "last" else length
        out_shape = (batch, picks, self.config.vocab_size)
        out = self.parallel.reshape(
            out, out_shape, row_axes, None, self.parallel.name(self.parallel.tp_axis)
        )
        return out, None if caches is None else tuple(new_caches)


def load_checkpoint(model: nnx.Module, state: Any) -> nnx.Module:
    """Loads the state of a plain nnx model with the same parameter names, unchanged.

    Args:
      model: a model of this package; its parameters' shardings and annotations stay.
      state: `nnx.state(plain_model)`, or such a state as restored from disk.

    Returns:
      The model, updated in place.

    Raises:
      ValueError: if a parameter is missing, unknown, or of another shape.
    """
    ours = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    theirs = dict(nnx.to_flat_state(nnx.state(state, nnx.Param)))
    missing, unknown = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    if missing or unknown:
        raise ValueError(
            f"checkpoint does not match the model: missing {sorted(missing, key=str)}, "
            f"unknown {sorted(unknown, key=str)}"
        )
    for path, variable in ours.items():
        value = theirs[path][...]
        if value.shape != variable.shape:
            raise ValueError(f"{path}: the model has {variable.shape}, the state {value.shape}")
        old = variable[...]
        variable[...] = jax.device_put(jnp.asarray(value, old.dtype), old.sharding)
    nnx.update(model, nnx.from_flat_state(ours))
    return model
