"""Ring and all-gather context parallelism as plans: one block a rank, every rank needs every block.

They differ from FCP only in how tokens are cut and placed and in how rounds are grouped, so the
same validator, simulator and runtime serve them.
"""

import numpy as np

from fcp_jax.blocks import Blocks
from fcp_jax.segments import Segments


def ring_blocks(segments: Segments, num_ranks: int, block_size: int) -> Blocks:
    """Cuts every segment into 2N chunks; rank r's block holds chunks r and 2N-1-r of each.

    This is zigzag ring attention for packed sequences as TransformerEngine does it: computation
    and communication are even, however small the chunks of short segments get. Tokens that 2N does
    not divide go to ranks in turn, so no rank holds more than ceil(num_tokens / num_ranks).
    """
    extra = segments.lengths % (2 * num_ranks)
    cursor = np.cumsum(extra) - extra
    rank = np.arange(num_ranks)
    # How many of a segment's extra tokens rank r receives: 0, 1 or 2.
    turns = (rank - cursor[:, None]) % num_ranks
    per_rank = (turns < extra[:, None]).astype(np.int64) + (turns + num_ranks < extra[:, None])
    size = np.zeros((len(segments), 2 * num_ranks), np.int64)
    size += (segments.lengths // (2 * num_ranks))[:, None]
    size[:, :num_ranks] += per_rank >= 1
    size[:, num_ranks:] += (per_rank == 2)[:, ::-1]
    start = segments.starts[:, None] + np.cumsum(size, axis=1) - size
    chunk_rank = np.concatenate([rank, rank[::-1]])
    return _from_chunks(
        block_size,
        np.broadcast_to(chunk_rank, size.shape),
        start,
        size,
        np.broadcast_to(np.arange(len(segments))[:, None], size.shape),
    )


def all_gather_blocks(
    segments: Segments, num_ranks: int, tokens_per_rank: int, block_size: int
) -> Blocks:
    """Cuts the whole row into 2N chunks; rank r's block holds chunks r and 2N-1-r.

    This is the all-gather context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2).
    """
    edges = np.arange(2 * num_ranks + 1) * tokens_per_rank // 2
    begin = np.maximum(segments.starts[:, None], edges[:-1])
    size = np.maximum(np.minimum(segments.ends[:, None], edges[1:]) - begin, 0)
    rank = np.arange(num_ranks)
    return _from_chunks(
        block_size,
        np.broadcast_to(np.concatenate([rank, rank[::-1]]), size.shape),
        begin,
        size,
        np.broadcast_to(np.arange(len(segments))[:, None], size.shape),
    )


def _from_chunks(block_size: int, rank, start, size, segment) -> Blocks:
    real = size > 0
    return Blocks.from_fragments(block_size, rank[real], start[real], size[real], segment[real])
