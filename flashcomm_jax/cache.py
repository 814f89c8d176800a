"""Key/value cache of one layer, for prompts of different lengths side by side."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from flashcomm_jax.config import SINGLE_DEVICE, ParallelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What one attention layer has seen of each sequence.

    Attributes:
      k: [batch, max_len, heads, key_dim]; slots at or past `lengths` are never read.
      v: [batch, max_len, heads, value_dim].
      lengths: int32 [batch], tokens stored of each sequence.
      fresh: static: nothing is stored yet, so a prefill attends to its own tokens alone.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def empty(
        cls,
        batch: int,
        max_len: int,
        heads: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        parallel: ParallelConfig = SINGLE_DEVICE,
        dtype: jax.typing.DTypeLike = jnp.float32,
        shard_heads: bool = True,
    ) -> "KVCache":
        """A cache with nothing in it, sharded over batch rows and heads.

        Args:
          batch: sequences.
          max_len: slots per sequence, for prompt and output together.
          heads: key/value heads.
          key_dim: features of a key.
          value_dim: features of a value; as `key_dim` if None.
          parallel: mesh and axes.
          dtype: of keys and values.
          shard_heads: whether heads are sharded over tp (latents are not).

        Returns:
          The cache.
        """
        value_dim = key_dim if value_dim is None else value_dim
        rows = parallel.row_axes(batch) or None
        head_axis = parallel.name(parallel.tp_axis) if shard_heads else None

        def zeros(dim):
            x = jnp.zeros((batch, max_len, heads, dim), dtype)
            return parallel.put(x, rows, None, head_axis, None)

        lengths = parallel.put(jnp.zeros(batch, jnp.int32), rows)
        return cls(zeros(key_dim), zeros(value_dim), lengths, fresh=True)

    def specs(self, parallel: ParallelConfig, rows: Any, *, shard_heads: bool = True) -> Any:
        """PartitionSpecs in the place of the arrays; `rows` are the axes of the batch."""
        heads = parallel.name(parallel.tp_axis) if shard_heads else None
        spec = P(rows, None, heads, None)
        return dataclasses.replace(self, k=cast(Any, spec), v=spec, lengths=P(rows))

    @property
    def max_len(self) -> int:
        """Slots per sequence."""
        return self.k.shape[1]

    def positions(self, length: int) -> jax.Array:
        """Positions of the next `length` tokens of each sequence, int32 [batch, length]."""
        return self.lengths[:, None] + jnp.arange(length, dtype=jnp.int32)

    def append(self, k: jax.Array, v: jax.Array, new_lengths: jax.Array) -> "KVCache":
        """Stores the first `new_lengths[b]` of the given tokens after those of sequence b.

        Args:
          k: [batch, length, heads, key_dim].
          v: [batch, length, heads, value_dim].
          new_lengths: int32 [batch], each at most `length`; the rest is prompt padding.

        Returns:
          The cache with them. Tokens past `max_len` are lost: attention answers their queries
          with NaN rather than from a part of what they should see.
        """
        batch, length = k.shape[:2]
        slots = self.lengths[:, None] + jnp.arange(length)
        slots = jnp.where(jnp.arange(length) < new_lengths[:, None], slots, self.max_len)
        index = jnp.arange(batch)[:, None], slots
        return KVCache(
            self.k.at[index].set(k.astype(self.k.dtype), mode="drop"),
            self.v.at[index].set(v.astype(self.v.dtype), mode="drop"),
            self.lengths + new_lengths,
        )
