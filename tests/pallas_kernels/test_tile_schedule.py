"""Tile schedules: every tile that holds a visible pair is listed once, and no mask is left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_blocks import all_pairs, packed_mask

from pallas_kernels import TokenMask, WorkList, tile_schedule

BLOCK, ROWS = 128, 512


def visits(schedule, row, gather):
    starts, pieces = np.asarray(schedule.starts), np.asarray(schedule.pieces)
    return pieces[starts[row] * gather : starts[row + 1] * gather].reshape(-1, gather)


@pytest.mark.parametrize("kind", ["query_major", "kv_major"])
@pytest.mark.parametrize(("piece", "gather"), [(64, 1), (32, 4), (16, 3)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[130, 100, 17, 1, 64, 64, 80], [], [300]])
def test_schedule_visits_what_the_mask_shows(lengths, causal, piece, gather, kind):
    lo, hi, index = packed_mask(lengths, ROWS, causal)
    visible = (lo[:, None] <= index) & (index <= hi[:, None])
    pairs = all_pairs(lo, hi, index, BLOCK)
    padded = np.zeros((len(pairs) + 2, 2), np.int32)
    padded[: len(pairs)] = pairs
    work = WorkList.from_pairs(padded[:, 0], padded[:, 1], len(pairs), ROWS // BLOCK)
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (lo, hi, index)))
    if kind == "query_major":
        make = functools.partial(tile_schedule.query_major, tile_q=64, kv_piece=piece)
    else:
        make = functools.partial(tile_schedule.kv_major, tile_kv=64, q_piece=piece)
        visible = visible.T
    schedule = jax.jit(functools.partial(make, block_size=BLOCK, gather=gather))(mask, work)
    tiles = visible.reshape(ROWS // 64, 64, ROWS // piece, piece)
    any_visible, all_visible = tiles.any((1, 3)), tiles.all((1, 3))
    nowhere = ROWS // piece
    counts = np.diff(np.asarray(schedule.starts))
    for row in range(ROWS // 64):
        tiles_here = visits(schedule, row, gather)
        listed = tiles_here[tiles_here < nowhere]
        assert len(set(listed)) == len(listed)
        # Stripes of 16 may list a tile in which no single pair is visible, never miss one.
        assert set(np.flatnonzero(any_visible[row])) <= set(listed)
        assert (tiles_here >= nowhere).sum() < gather
        open_tiles = tiles_here[np.asarray(schedule.num_masked)[row] :]
        assert all(piece < nowhere and all_visible[row, piece] for piece in open_tiles.flat)
        assert counts[row] == -(-len(listed) // gather)
    order, num_live = np.asarray(schedule.order), int(schedule.num_live[0])
    assert sorted(order) == list(range(ROWS // 64)) and (np.diff(counts[order]) <= 0).all()
    assert num_live == (counts > 0).sum()


def test_gathering_visits_fewer_hidden_pairs_of_short_segments():
    lo, hi, index = packed_mask([70] * 7, ROWS, True)
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (lo, hi, index)))
    pairs = all_pairs(lo, hi, index, BLOCK)
    work = WorkList.from_pairs(pairs[:, 0], pairs[:, 1], len(pairs), ROWS // BLOCK)
    tiles = [
        int(
            tile_schedule.query_major(
                mask, work, block_size=BLOCK, tile_q=64, kv_piece=128 // gather, gather=gather
            ).starts[-1]
        )
        for gather in (1, 4)
    ]
    assert tiles[1] < tiles[0]
