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
    """Tiles to visit, in compressed sparse row form; masked tiles come first in each row.

    Row t visits the column tiles tiles[starts[t]], ..., tiles[starts[t + 1] - 1], of which the
    first num_masked[t] need the token mask and the others are visible throughout.

    Attributes:
      order: int32 [num_rows], row tiles by falling number of visits: longest processing time first.
      starts: int32 [num_rows + 1].
      num_masked: int32 [num_rows].
      tiles: int32 [max_items * row tiles in a block * column tiles in a block].
    """

    order: jax.Array
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
    return _build(mask, work, block_size, tile_q, tile_kv, query_rows=True)


def kv_major(
    mask: TokenMask, work: WorkList, *, block_size: int, tile_q: int, tile_kv: int
) -> TileSchedule:
    """Lists, for every kv tile, the query tiles that see it. Arguments as in `query_major`."""
    num_columns = mask.kv_index.shape[0] // block_size
    return _build(
        mask, work.transpose(num_columns), block_size, tile_q, tile_kv, query_rows=False
    )


def _build(mask, work, block_size, tile_q, tile_kv, query_rows) -> TileSchedule:
    real_row = mask.query_lo <= mask.query_hi
    # Stripe summaries decide emptiness: the span of places a stripe of query rows sees, and the
    # span of places a stripe of kv rows holds. Padding rows widen neither.
    see = (
        _stripes(jnp.where(real_row, mask.query_lo, _FAR), block_size, tile_q, jnp.min),
        _stripes(jnp.where(real_row, mask.query_hi, -1), block_size, tile_q, jnp.max),
    )
    real_kv = mask.kv_index >= 0
    hold = (
        _stripes(jnp.where(real_kv, mask.kv_index, _FAR), block_size, tile_kv, jnp.min),
        _stripes(jnp.where(real_kv, mask.kv_index, -1), block_size, tile_kv, jnp.max),
    )
    # A tile needs no mask where the narrowest row sees every place. Padding rows count here.
    see_all = (
        _tiles(mask.query_lo, block_size, tile_q, jnp.max),
        _tiles(jnp.where(real_row, mask.query_hi, -1), block_size, tile_q, jnp.min),
    )
    hold_all = (
        _tiles(jnp.where(real_kv, mask.kv_index, -1), block_size, tile_kv, jnp.min),
        _tiles(mask.kv_index, block_size, tile_kv, jnp.max),
    )

    rows = jnp.minimum(work.rows(), work.row_starts.shape[0] - 2)
    q_block, kv_block = (rows, work.columns) if query_rows else (work.columns, rows)
    num_q_blocks, num_kv_blocks = see_all[0].shape[0], hold_all[0].shape[0]
    q_block = jnp.clip(q_block, 0, num_q_blocks - 1)  # padding items may hold anything
    kv_block = jnp.clip(kv_block, 0, num_kv_blocks - 1)

    def pairs(q_side, kv_side, q_axes, kv_axes):
        """[item, q tile, kv tile, ...] views of per-block summaries."""
        q_side, kv_side = q_side[q_block], kv_side[kv_block]
        return jnp.expand_dims(q_side, q_axes), jnp.expand_dims(kv_side, kv_axes)

    # [item, q tile, kv tile, q stripe, kv stripe]
    axes = ((2, 4), (1, 3))
    lo, last = pairs(see[0], hold[1], *axes)
    hi, first = pairs(see[1], hold[0], *axes)
    live = ((lo <= last) & (first <= hi)).any(axis=(3, 4))
    lo, first = pairs(see_all[0], hold_all[0], (2,), (1,))
    hi, last = pairs(see_all[1], hold_all[1], (2,), (1,))
    full = live & (lo <= first) & (last <= hi)

    is_item = jnp.arange(work.columns.shape[0]) < work.row_starts[-1]
    live, full = live & is_item[:, None, None], full & is_item[:, None, None]
    column = kv_block if query_rows else q_block
    if not query_rows:
        live, full = live.swapaxes(1, 2), full.swapaxes(1, 2)
    return _compress(live & ~full, full, column, rows, work.row_starts)


def _compress(masked, full, column, rows, row_starts) -> TileSchedule:
    """Boolean [item, row tile, column tile] to lists, without a sort: items are row-ordered."""
    num_items, per_row, per_column = masked.shape
    tile = column[:, None] * per_column + jnp.arange(per_column, dtype=jnp.int32)
    tile = jnp.broadcast_to(tile, (per_row, num_items, per_column)).reshape(per_row, -1)
    row = jnp.repeat(rows, per_column)

    def ranks(kind):
        """Place of every entry in its row's list, and the list lengths [row block, row tile]."""
        kind = kind.swapaxes(0, 1).reshape(per_row, -1).astype(jnp.int32)
        total = jnp.pad(jnp.cumsum(kind, axis=1), ((0, 0), (1, 0)))
        edges = total[:, row_starts * per_column]
        return total[:, :-1] - edges[:, row], jnp.diff(edges, axis=1).T, kind > 0

    masked_rank, num_masked, masked = ranks(masked)
    full_rank, num_full, full = ranks(full)
    num_masked, num_full = num_masked.reshape(-1), num_full.reshape(-1)
    counts = num_masked + num_full
    starts = jnp.pad(jnp.cumsum(counts), (1, 0)).astype(jnp.int32)

    row_tile = row * per_row + jnp.arange(per_row, dtype=jnp.int32)[:, None]
    place = starts[row_tile] + jnp.where(masked, masked_rank, num_masked[row_tile] + full_rank)
    place = jnp.where(masked | full, place, tile.size)
    tiles = jnp.zeros(tile.size, jnp.int32).at[place.reshape(-1)].set(
        tile.reshape(-1).astype(jnp.int32), mode="drop"
    )
    order = jnp.argsort(-counts, stable=True).astype(jnp.int32)
    return TileSchedule(order, starts, num_masked.astype(jnp.int32), tiles)


def _tiles(x, block_size: int, tile: int, reduce):
    """[rows] to [block, tile in block]."""
    return reduce(x.reshape(-1, block_size // tile, tile), axis=2)


def _stripes(x, block_size: int, tile: int, reduce):
    """[rows] to [block, tile in block, stripe in tile]."""
    return reduce(x.reshape(-1, block_size // tile, tile // _STRIPE, _STRIPE), axis=3)
