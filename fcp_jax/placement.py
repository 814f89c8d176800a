"""Placing blocks on ranks by longest processing time first (paper: Block Distributor)."""

import heapq

import numpy as np

from fcp_jax.blocks import Blocks


def zigzag_units(blocks: Blocks) -> list[list[int]]:
    """Groups blocks that are placed together.

    The full blocks i and n-1-i of a segment form a unit: under a causal mask all such pairs of a
    segment compute and receive the same amount. Every other block is a unit of its own.
    """
    full = blocks.length == blocks.block_size
    units: list[list[int]] = np.flatnonzero(
        ~np.isin(np.arange(blocks.num_blocks), blocks.block[full])
    )[:, None].tolist()
    full_block, full_segment = blocks.block[full], blocks.segment[full]
    order = np.lexsort((blocks.start[full], full_segment))
    edges = np.flatnonzero(np.diff(full_segment[order])) + 1
    for members in np.split(full_block[order], edges):
        ids = members.tolist()
        half = len(ids) // 2
        units += [[ids[i], ids[-1 - i]] for i in range(half)]
        if len(ids) % 2:
            units.append([ids[half]])
    return units


def place_lpt(costs: np.ndarray, units: list[list[int]], speeds: np.ndarray, max_slots: int):
    """Gives each unit, costliest first, to the rank that would finish earliest (Graham 1969).

    Args:
      costs: int64 [num_blocks], token pairs of each block's queries.
      units: blocks that stay together while any rank has the room.
      speeds: float64 [num_ranks], relative speed of each rank.
      max_slots: blocks a rank has room for; num_ranks * max_slots >= num_blocks.

    Returns:
      int64 [num_blocks], the rank of each block.
    """
    rank_of = np.full(len(costs), -1, np.int64)
    room = np.full(len(speeds), max_slots)
    heap = [(0.0, 0, rank) for rank in range(len(speeds))]
    pending = sorted(units, key=lambda unit: -int(costs[unit].sum()))
    at = 0
    while at < len(pending):
        unit = pending[at]
        skipped = []
        while heap and room[heap[0][2]] < len(unit):
            skipped.append(heapq.heappop(heap))
        if not heap:  # only single slots are left: split the pair
            pending[at : at + 1] = [[block] for block in unit]
        else:
            finish, held, rank = heapq.heappop(heap)
            rank_of[unit] = rank
            room[rank] -= len(unit)
            load = finish + float(costs[unit].sum()) / speeds[rank]
            skipped.append((load, held + len(unit), rank))
            at += 1
        for entry in skipped:
            if room[entry[2]]:
                heapq.heappush(heap, entry)
    return rank_of
