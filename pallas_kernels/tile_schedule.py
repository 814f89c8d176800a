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

    A column tile is gathered from `gather` pieces of neighboring rows. Row t visits the tiles i
    from starts[t] to starts[t + 1] - 1, that is the pieces pieces[i * gather], ...: first
    num_masked[t] tiles that need the token mask, then those that are visible throughout. Where the
    pieces do not fill the tiles, the first ones of the row are the piece after the last, which has
    to be hidden.

    Attributes:
      order: int32 [num_rows], row tiles by falling number of visits: longest processing time first.
      num_live: int32 [1], how many row tiles visit anything; the others come last in `order`.
      starts: int32 [num_rows + 1].
      num_masked: int32 [num_rows].
      pieces: int32 [room for every piece of every item, and for filling tiles up].
    """

    order: jax.Array
    num_live: jax.Array
    starts: jax.Array
    num_masked: jax.Array
    pieces: jax.Array


def query_major(
    mask: TokenMask, work: WorkList, *, block_size: int, tile_q: int, kv_piece: int, gather: int = 1
) -> TileSchedule:
    """Lists, for every query tile, the kv tiles it sees.

    Args:
      mask: which token pairs count.
      work: block pairs; rows are query blocks, columns are kv blocks.
      block_size: rows per block; a multiple of `tile_q` and `kv_piece`.
      tile_q: query rows per tile, a multiple of 16.
      kv_piece: neighboring kv rows in a tile, a multiple of 16.
      gather: pieces in a kv tile.

    Returns:
      A schedule whose rows are query tiles and whose columns are kv tiles.
    """
    rows = _rows(work)
    seen = _Summary.of_queries(mask, block_size, tile_q).take(rows)
    held = _Summary.of_kv(mask, block_size, kv_piece).take(work.columns)
    nowhere = mask.kv_index.shape[0] // kv_piece
    return _compress(*_meet(seen, held), work.columns, rows, work, gather, nowhere)


def kv_major(
    mask: TokenMask, work: WorkList, *, block_size: int, q_piece: int, tile_kv: int, gather: int = 1
) -> TileSchedule:
    """Lists, for every kv tile, the query tiles that see it.

    Args:
      mask: as in `query_major`.
      work: as there.
      block_size: rows per block; a multiple of `q_piece` and `tile_kv`.
      q_piece: neighboring query rows in a tile, a multiple of 16.
      tile_kv: kv rows per tile, a multiple of 16.
      gather: pieces in a query tile.

    Returns:
      A schedule whose rows are kv tiles and whose columns are query tiles.
    """
    work = work.transpose(mask.kv_index.shape[0] // block_size)
    rows = _rows(work)
    seen = _Summary.of_queries(mask, block_size, q_piece).take(work.columns)
    held = _Summary.of_kv(mask, block_size, tile_kv).take(rows)
    live, full = (x.swapaxes(1, 2) for x in _meet(seen, held))
    nowhere = mask.query_lo.shape[0] // q_piece
    return _compress(live, full, work.columns, rows, work, gather, nowhere)


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


def _compress(live, full, column, rows, work: WorkList, gather: int, nowhere: int) -> TileSchedule:
    """Boolean [item, row tile, column piece] to lists; no sort, since items are row-ordered."""
    num_items, per_row, per_column = live.shape
    is_item = jnp.arange(num_items) < work.row_starts[-1]
    # To [row tile in block, item, column piece in block].
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
    count = -(-(num_masked + num_full) // gather)
    starts = jnp.pad(jnp.cumsum(count), (1, 0))
    # Pieces that only fill up come first, so that their tile is one that is masked anyway.
    ends_masked = count * gather - num_full
    begin_masked = starts[:-1] * gather + ends_masked - num_masked
    row_tile = rows[None, :] * per_row + jnp.arange(per_row, dtype=jnp.int32)[:, None]
    begin, masked_here = (x[row_tile][..., None] for x in (begin_masked, num_masked))
    room = full.size + (gather - 1) * num_masked.size
    place = jnp.where(masked, begin + masked_rank, room)
    place = jnp.where(full, begin + masked_here + full_rank, place)
    entries = jnp.broadcast_to(entry, place.shape).reshape(-1)
    pieces = jnp.full(room, nowhere).at[place.reshape(-1)].set(entries, mode="drop")
    order = jnp.argsort(-count, stable=True)
    num_live = (count > 0).sum(keepdims=True)
    fields = (order, num_live, starts, -(-ends_masked // gather), pieces)
    return TileSchedule(*(x.astype(jnp.int32) for x in fields))
