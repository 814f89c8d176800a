"""FlashComm: tensor-parallel prefill on token shards, without all-reduce."""

from flashcomm_jax.attention import FlashCommAttention
from flashcomm_jax.cache import KVCache
from flashcomm_jax.collective_matmul import compiler_options
from flashcomm_jax.config import FlashCommConfig, ParallelConfig
from flashcomm_jax.context import FlashCommContext
from flashcomm_jax.decoder import FlashCommDecoderLayer
from flashcomm_jax.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    quantize_w8a8,
)
from flashcomm_jax.mla import FlashCommMLAAttention
from flashcomm_jax.mlp import FlashCommMLP
from flashcomm_jax.model import FlashCommLlama, LlamaConfig, VocabParallelEmbed, load_checkpoint
from flashcomm_jax.moe import FlashCommMoE
from flashcomm_jax.reasons import (
    FallbackReason,
    FlashCommFallbackError,
    fallback_counts,
    reset_fallback_counts,
)
from flashcomm_jax.tokens import gather_tokens, shard_tokens, take_tokens, unpad_tokens

__all__ = [
    "ColumnParallelLinear",
    "FallbackReason",
    "FlashCommAttention",
    "FlashCommConfig",
    "FlashCommContext",
    "FlashCommDecoderLayer",
    "FlashCommFallbackError",
    "FlashCommLlama",
    "FlashCommMLAAttention",
    "FlashCommMLP",
    "FlashCommMoE",
    "KVCache",
    "LlamaConfig",
    "ParallelConfig",
    "RowParallelLinear",
    "VocabParallelEmbed",
    "column_parallel",
    "compiler_options",
    "fallback_counts",
    "gather_tokens",
    "load_checkpoint",
    "quantize_w8a8",
    "reset_fallback_counts",
    "shard_tokens",
    "take_tokens",
    "unpad_tokens",
]
