"""Turns a work list of blocks into lists of tiles: what a kernel has to visit, and how.

A kernel tile is smaller than a block, and most tiles of a packed causal batch are either empty or
need no mask. Both facts are known before the kernel runs: they depend on the mask alone, so one
`TileSchedule` serves every head and every layer of a step. Plain jnp, inside `jit`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.work_list import TokenMask, WorkList

_STRIPE = 16  # rows whose places are summarized together when deciding whether a tile is empty
_FAR = 2**30  # beyond any place; TokenMask places are below it


class TileSchedule(NamedTuple):
    """Tiles to visit, in compressed sparse row form.

    Row t visits the column tiles named by tiles[starts[t]], ..., tiles[starts[t + 1] - 1]: first
    num_masked[t] that need the token mask, then those that are visible throughout.

    Attributes:
      order: int32 [num_rows], row tiles by falling number of visits: longest processing time first.
      num_live: int32 [1], how many row tiles visit anything; the others come last in `order`.
      starts: int32 [num_rows + 1].
      num_masked: int32 [num_rows].
      tiles: int32 [max_items * row tiles in a block * column tiles in a block].
    """

    order: jax.Array
    num_live: jax.Array
    starts: jax.Array
    num_masked: jax.Array
    tiles: jax.Array


def query_major(
    mask: TokenMask, work: WorkList, *, block_size: int, tile_q: int, tile_kv: int
) -> TileSchedule:
    """Lists, for every query tile, the kv tiles it sees.

    Args:
      mask: which token pairs count.
      work: block pairs; rows are query blocks, columns are kv blocks.
      block_size: rows per block; a multiple of both tiles.
      tile_q: query rows per tile, a multiple of 16.
      tile_kv: kv rows per tile, a multiple of 16.

    Returns:
      A schedule whose rows are query tiles and whose columns are kv tiles.
    """
    rows = _rows(work)
    seen = _Summary.of_queries(mask, block_size, tile_q).take(rows)
    held = _Summary.of_kv(mask, block_size, tile_kv).take(work.columns)
    return _compress(*_meet(seen, held), work.columns, rows, work)


def kv_major(
    mask: TokenMask, work: WorkList, *, block_size: int, tile_q: int, tile_kv: int
) -> TileSchedule:
    """Lists, for every kv tile, the query tiles that see it. Arguments as in `query_major`."""
    work = work.transpose(mask.kv_index.shape[0] // block_size)
    rows = _rows(work)
    seen = _Summary.of_queries(mask, block_size, tile_q).take(work.columns)
    held = _Summary.of_kv(mask, block_size, tile_kv).take(rows)
    live, full = (x.swapaxes(1, 2) for x in _meet(seen, held))
    return _compress(live, full, work.columns, rows, work)


class _Summary(NamedTuple):
    """Spans of places, by stripe [block, tile, stripe] and by tile [block, tile].

    For query rows, the stripe spans cover all that any row sees and the tile spans what every row
    sees; for kv rows both cover what the rows hold. Padding rows widen no stripe and make a tile's
    span impossible, so that it never counts as visible throughout.
    """

    first: jax.Array
    last: jax.Array
    tile_first: jax.Array
    tile_last: jax.Array

    @classmethod
    def of_queries(cls, mask: TokenMask, block_size: int, tile: int) -> "_Summary":
        real = mask.query_lo <= mask.query_hi
        shape = (-1, block_size // tile, tile // _STRIPE, _STRIPE)
        return cls(
            jnp.where(real, mask.query_lo, _FAR).reshape(shape).min(3),
            jnp.where(real, mask.query_hi, -1).reshape(shape).max(3),
            jnp.where(real, mask.query_lo, _FAR).reshape(shape).max((2, 3)),
            jnp.where(real, mask.query_hi, -1).reshape(shape).min((2, 3)),
        )

    @classmethod
    def of_kv(cls, mask: TokenMask, block_size: int, tile: int) -> "_Summary":
        real = mask.kv_index >= 0
        shape = (-1, block_size // tile, tile // _STRIPE, _STRIPE)
        first = jnp.where(real, mask.kv_index, _FAR).reshape(shape).min(3)
        last = jnp.where(real, mask.kv_index, -1).reshape(shape).max(3)
        return cls(first, last, jnp.where(real, mask.kv_index, -1).reshape(shape).min((2, 3)),
                   last.max(2))  # fmt: skip

    def take(self, blocks) -> "_Summary":
        """Picks blocks; padding items may name any, so they are clipped."""
        blocks = jnp.clip(blocks, 0, self.first.shape[0] - 1)
        return _Summary(*(x[blocks] for x in self))


def _meet(seen: _Summary, held: _Summary) -> tuple[jax.Array, jax.Array]:
    """Whether [item, query tile, kv tile] holds any visible pair, and whether all are visible."""
    live = (seen.first[:, :, None, :, None] <= held.last[:, None, :, None, :]) & (
        held.first[:, None, :, None, :] <= seen.last[:, :, None, :, None]
    )
    full = (seen.tile_first[:, :, None] <= held.tile_first[:, None, :]) & (
        held.tile_last[:, None, :] <= seen.tile_last[:, :, None]
    )
    live = live.any(axis=(3, 4))
    return live, live & full


def _rows(work: WorkList) -> jax.Array:
    return jnp.minimum(work.rows(), work.row_starts.shape[0] - 2)


def _compress(live, full, column, rows, work: WorkList) -> TileSchedule:
    """Boolean [item, row tile, column tile] to lists; no sort, since items are row-ordered."""
    num_items, per_row, per_column = live.shape
    is_item = jnp.arange(num_items) < work.row_starts[-1]
    # To [row tile in block, item, column tile in block].
    live, full = ((x & is_item[:, None, None]).swapaxes(0, 1) for x in (live, full))
    entry = column[:, None] * per_column + jnp.arange(per_column, dtype=jnp.int32)

    def ranks(kind):
        """Place of every entry among its kind in its row, and how many each row has."""
        total = jnp.cumsum(kind.reshape(per_row, -1).astype(jnp.int32), axis=1)
        total = jnp.pad(total, ((0, 0), (1, 0)))
        edges = total[:, work.row_starts * per_column]
        rank = total[:, :-1].reshape(kind.shape) - edges[:, rows][..., None]
        return rank, jnp.diff(edges, axis=1).T.reshape(-1)  # [row block, row tile] flattened

    masked = live & ~full
    masked_rank, num_masked = ranks(masked)
    full_rank, num_full = ranks(full)
    total = num_masked + num_full
    starts = jnp.pad(jnp.cumsum(total), (1, 0))
    row_tile = rows[None, :] * per_row + jnp.arange(per_row, dtype=jnp.int32)[:, None]
    begin, masked_here = (x[row_tile][..., None] for x in (starts[:-1], num_masked))
    place = jnp.where(masked, begin + masked_rank, full.size)
    place = jnp.where(full, begin + masked_here + full_rank, place)
    entries = jnp.broadcast_to(entry, place.shape).reshape(-1)
    tiles = jnp.zeros(full.size, jnp.int32).at[place.reshape(-1)].set(entries, mode="drop")
    order = jnp.argsort(-total, stable=True)
    num_live = (total > 0).sum(keepdims=True)
    fields = (order, num_live, starts, num_masked, tiles)
    return TileSchedule(*(x.astype(jnp.int32) for x in fields))
