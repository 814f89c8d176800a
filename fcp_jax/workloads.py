"""Synthetic and recorded distributions of segment lengths."""

import csv
import pathlib
from collections.abc import Callable

import numpy as np

MAX_LENGTH = 524288
"""Longest synthetic segment, tokens: the 512K of the paper's trace."""


def _lognormal(rng: np.random.Generator, size: int) -> np.ndarray:
    """Long tail as in the paper: median 3K tokens, sigma 1.5, cut off at 512K."""
    return rng.lognormal(np.log(3072.0), 1.5, size)


def _weak_tail(rng: np.random.Generator, size: int) -> np.ndarray:
    """A tail that ends early: median 4K tokens, sigma 0.8."""
    return rng.lognormal(np.log(4096.0), 0.8, size)


def _bimodal(rng: np.random.Generator, size: int) -> np.ndarray:
    """Nine in ten segments near 2K tokens, one near 64K."""
    center = np.where(rng.random(size) < 0.9, 2048.0, 65536.0)
    return center * rng.lognormal(0.0, 0.3, size)


def _uniform(rng: np.random.Generator, size: int) -> np.ndarray:
    """Anything between 1 and 64K tokens."""
    return rng.uniform(1.0, 65536.0, size)


WORKLOADS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal": _lognormal,
    "weak_tail": _weak_tail,
    "bimodal": _bimodal,
    "uniform": _uniform,
}


def sample_seqlens(
    workload: str, *, num_ranks: int, tokens_per_rank: int, seed: int = 0
) -> np.ndarray:
    """Draws segments until a batch is full; the last one is trimmed to fit.

    Args:
      workload: a name in `WORKLOADS`, or the path of a file with either one length a line, or a
        histogram as CSV whose first column is a range like "[201, 500]" and whose second is a
        count; lengths are then uniform inside a range.
      num_ranks: ranks of the batch.
      tokens_per_rank: tokens a rank; the batch holds their product.
      seed: of numpy's default generator; the same seed gives the same batch everywhere.

    Returns:
      int64 [num_segments], at least 1 each, summing to num_ranks * tokens_per_rank.

    Raises:
      ValueError: if `workload` is neither a known name nor a readable file of lengths.
    """
    capacity = num_ranks * tokens_per_rank
    rng = np.random.default_rng(seed)
    draw = WORKLOADS.get(workload) or _file_sampler(workload)
    drawn, total = [], 0
    while total < capacity:
        lengths = np.clip(draw(rng, 1024).astype(np.int64), 1, min(MAX_LENGTH, capacity))
        drawn.append(lengths)
        total += int(lengths.sum())
    lengths = np.concatenate(drawn)
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, capacity)) + 1
    lengths = lengths[:count]
    lengths[-1] -= ends[count - 1] - capacity
    return lengths


def _file_sampler(name: str) -> Callable[[np.random.Generator, int], np.ndarray]:
    path = pathlib.Path(name)
    if not path.is_file():
        raise ValueError(
            f"workload must be one of {', '.join(WORKLOADS)} or a readable file, got {name!r}"
        )
    with path.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    try:
        if len(rows[0]) == 1:
            lengths = np.array([int(row[0]) for row in rows])
            if (lengths < 0).any():
                raise ValueError("a length is negative")
            return lambda rng, size: rng.choice(lengths, size)
        bounds = np.array([[int(x) for x in row[0].strip("[]").split(",")] for row in rows[1:]])
        counts = np.array([float(row[1]) for row in rows[1:]])
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"workload file {name!r} must hold one length a line or a histogram of "
            f'"[low, high]",count lines: {error}'
        ) from error

    def draw(rng: np.random.Generator, size: int) -> np.ndarray:
        low, high = bounds[rng.choice(len(bounds), size, p=counts / counts.sum())].T
        return rng.integers(low, high + 1)

    return draw
