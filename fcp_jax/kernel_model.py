"""How long an attention kernel takes on a list of block pairs, from measured rates.

Besides visible token pairs, each row that a launch visits costs something: a query row in forward,
whose state comes and goes, a key row in backward. Rows on the diagonal of a causal segment cost
more, as their tiles are half hidden. The figures are least squares fits of relative errors to
measured cases: `benchmarks/calibrate.py`, table in docs/topology.md.
"""

import dataclasses

import numpy as np

from fcp_jax.blocks import Blocks


@dataclasses.dataclass(frozen=True)
class KernelModel:
    """What a kernel costs, in token pairs at a rate.

    Attributes:
      tflops: TFLOP/s of visible pairs alone.
      row: token pairs that each visited row costs besides.
      diagonal: token pairs that each row costs besides where it meets its own segment's diagonal.
    """

    tflops: float
    row: float
    diagonal: float


@dataclasses.dataclass(frozen=True, eq=False)
class BlockPairs:
    """Every block pair that holds a visible token pair, arrays of [num_pairs].

    Attributes:
      key: int64, ascending: query_block * num_blocks + kv_block.
      visible: float64, visible token pairs.
      query_rows: float64, query tokens that see anything.
      kv_rows: float64, key tokens that are seen.
      diagonal_rows: float64, query tokens that see themselves under a causal mask.
    """

    key: np.ndarray
    visible: np.ndarray
    query_rows: np.ndarray
    kv_rows: np.ndarray
    diagonal_rows: np.ndarray


def measure_pairs(blocks: Blocks, causal: bool) -> BlockPairs:
    """Measures block pairs.

    Segments that go through the same blocks in the same order are added as one matrix product,
    which is what keeps ring plans, whose segments go through all ranks, within seconds.

    Args:
      blocks: the fragments.
      causal: whether a token sees itself and earlier tokens only.

    Returns:
      The pairs. Rows of fragments of several segments add up.
    """
    order = np.lexsort((blocks.start, blocks.segment))
    block, length = blocks.block[order], blocks.length[order].astype(float)
    firsts = np.flatnonzero(np.diff(blocks.segment[order], prepend=-1))
    counts = np.diff(firsts, append=len(order))
    alone = firsts[counts == 1]
    single = length[alone]
    seen = single * (single + 1) / 2 if causal else single**2
    keys = [block[alone] * (blocks.num_blocks + 1)]
    parts = [np.stack([seen, single, single, single * causal])]
    groups: dict[bytes, list[int]] = {}
    for first, count in zip(firsts[counts > 1], counts[counts > 1], strict=True):
        groups.setdefault(block[first : first + count].tobytes(), []).append(first)
    for name, members in groups.items():
        path = np.frombuffer(name, block.dtype)
        lengths = length[np.add.outer(members, np.arange(len(path)))]  # [segments, fragments]
        total = lengths.sum(0)
        visible = lengths.T @ lengths
        query, kv = np.indices(visible.shape).reshape(2, -1)
        if causal:
            np.fill_diagonal(visible, (lengths * (lengths + 1) / 2).sum(0))
            query, kv = np.tril_indices(len(path))
        own = total[query] * (causal & (query == kv))
        keys.append(path[query] * blocks.num_blocks + path[kv])
        parts.append(np.stack([visible[query, kv], total[query], total[kv], own]))
    key, index = np.unique(np.concatenate(keys), return_inverse=True)
    return BlockPairs(
        key, *(np.bincount(index, part, len(key)) for part in np.concatenate(parts, axis=1))
    )
