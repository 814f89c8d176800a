"""What a block kernel computes: which (query block, kv block) pairs, and which token pairs inside.

A kernel call sees `query_rows` and `kv_rows` rows of tokens, each a whole number of blocks of
`block_size` rows. A `WorkList` names the block pairs to compute; a `TokenMask` says which token
pairs inside them count. Both are data (int32 arrays), so a new batch never recompiles a kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WorkList(NamedTuple):
    """Block pairs in compressed sparse row form.

    Row r of the list computes the pairs (r, columns[i]) for i in [row_starts[r], row_starts[r+1]).
    In the forward pass and for dq a row is a query block and a column a kv block; for dk and dv a
    row is a kv block and a column a query block (see `transpose`). A pair appears at most once.

    Attributes:
      row_starts: int32 [num_rows + 1], ascending from 0; its last entry is the run-time item count.
      columns: int32 [max_items]; entries at or after row_starts[-1] are ignored.
    """

    row_starts: jax.Array
    columns: jax.Array

    @classmethod
    def from_pairs(cls, rows, columns, count, num_rows: int) -> "WorkList":
        """Builds a work list from unordered pairs, on device.

        Args:
          rows: int32 [max_items], the row of each pair.
          columns: int32 [max_items], its column.
          count: int32 scalar, how many leading pairs are real.
          num_rows: number of row blocks.

        Returns:
          The pairs sorted by (row, original order), as a `WorkList`.
        """
        valid = jnp.arange(rows.shape[0], dtype=jnp.int32) < count
        keyed = jnp.where(valid, rows, num_rows)
        order = jnp.argsort(keyed, stable=True)
        row_starts = _count_below(keyed, jnp.arange(num_rows + 1, dtype=jnp.int32))
        return cls(row_starts.astype(jnp.int32), columns[order].astype(jnp.int32))

    def rows(self) -> jax.Array:
        """Returns the row of every item, int32 [max_items]; padding items get num_rows."""
        items = jnp.arange(self.columns.shape[0], dtype=jnp.int32)
        return _count_below(self.row_starts, items + 1) - 1

    def transpose(self, num_columns: int) -> "WorkList":
        """Returns the same pairs grouped by column: the list that dk and dv need."""
        return WorkList.from_pairs(
            self.columns, self.rows(), count=self.row_starts[-1], num_rows=num_columns
        )


class TokenMask(NamedTuple):
    """Which token pairs count: kv token j is visible to query row i iff lo[i] <= index[j] <= hi[i].

    Tokens carry their place in the packed batch as `kv_index`; a causal query at place p of a
    segment that starts at s has (lo, hi) = (s, p), a full one (s, last place of the segment). One
    rule covers segments, causal order, padding and any cutting into blocks. Because positions
    increase strictly inside a segment, order by place is order by position.

    Attributes:
      query_lo: int32 [query_rows], first visible place.
      query_hi: int32 [query_rows], last visible place; a padding row has lo > hi.
      kv_index: int32 [kv_rows], place of each kv row; padding rows are negative.
    """

    query_lo: jax.Array
    query_hi: jax.Array
    kv_index: jax.Array


class AttentionState(NamedTuple):
    """What a query row has gathered so far; a later call continues it.

    Attributes:
      out: float32 [query_rows, num_q_heads, head_dim], softmax-normalized over what was seen.
      lse: float32 [num_q_heads, query_rows], natural log of the sum of exponentials; -inf where
        nothing was visible yet (out is then exactly 0).
    """

    out: jax.Array
    lse: jax.Array

    @classmethod
    def empty(cls, query_rows: int, num_q_heads: int, head_dim: int) -> "AttentionState":
        """Returns the state of rows that have seen nothing."""
        return cls(
            jnp.zeros((query_rows, num_q_heads, head_dim), jnp.float32),
            jnp.full((num_q_heads, query_rows), -jnp.inf, jnp.float32),
        )


def _count_below(values: jax.Array, bounds: jax.Array) -> jax.Array:
    """Counts the values below each bound: one small kernel where a search takes dozens."""
    return jnp.sum(values[:, None] < bounds, axis=0, dtype=jnp.int32)
