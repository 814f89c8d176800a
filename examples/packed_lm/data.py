"""Text in, packed batches out: the Python standard library's own sources as byte tokens.

Documents are packed whole where they fit into a row; only a document longer than a row is cut.
"""

import dataclasses
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fcp_jax import Segments

VOCAB_SIZE = 256
"""Tokens are bytes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one step, [R, capacity] each; padding is 0 in every array.

    Attributes:
      arrays: "tokens", "targets" (the next byte of the same document), "positions" (in the
        document) and "segment_ids" (from 1), int32; "weights", float32, 1 where there is a target.
      segments: where the documents of each row lie.
    """

    arrays: dict[str, np.ndarray]
    segments: list[Segments]

    @property
    def num_tokens(self) -> int:
        """Tokens, padding not counted."""
        return sum(row.num_tokens for row in self.segments)


def standard_library() -> list[np.ndarray]:
    """Returns the modules of this Python's standard library, without tests, sorted by path.

    Returns:
      uint8 arrays, one a file.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return [
        np.fromfile(root / path, np.uint8) for path in paths if skipped.isdisjoint(Path(path).parts)
    ]


def pack(pieces: Sequence[np.ndarray], capacity: int) -> list[list[np.ndarray]]:
    """Packs pieces into rows by best fit decreasing (Johnson 1973).

    Args:
      pieces: tokens of each piece, at most `capacity`.
      capacity: tokens a row.

    Returns:
      The pieces of each row.
    """
    rows: list[list[np.ndarray]] = []
    room = np.zeros(len(pieces), np.int64)
    for piece in sorted(pieces, key=len, reverse=True):
        fits = np.flatnonzero(room[: len(rows)] >= len(piece))
        if len(fits):
            row = fits[np.argmin(room[fits])]
        else:
            row = len(rows)
            rows.append([])
            room[row] = capacity
        rows[row].append(piece)
        room[row] -= len(piece)
    return rows


class PackedCorpus:
    """Batches of packed rows, in an order that follows from the seed and the step alone."""

    def __init__(
        self,
        documents: Sequence[np.ndarray],
        *,
        num_rows: int,
        capacity: int,
        long_segment: int,
        seed: int = 0,
    ):
        """Stores the documents.

        Args:
          documents: uint8 tokens of each; those of less than two have no target and are left out.
          num_rows: R, rows a batch.
          capacity: tokens a row.
          long_segment: every batch holds a segment of at least this many tokens.
          seed: of the order.

        Raises:
          ValueError: if there are too few documents, or too few long ones, for that.
        """
        if long_segment > capacity:
            raise ValueError(f"long_segment must be at most {capacity=}, got {long_segment}")
        self._documents = [document for document in documents if len(document) > 1]
        self._num_rows, self._capacity, self._seed = num_rows, capacity, seed
        self._long_segment = long_segment
        self._epoch, self._batches = 0, self._make_epoch(0)
        if not self._batches:
            raise ValueError(
                f"documents must fill {num_rows} rows of {capacity} tokens, one of them with a "
                f"segment of {long_segment}, got {sum(map(len, documents))} tokens"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Batches until the documents come again, in another order."""
        return len(self._batches)

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step, from 0; the same on every machine."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._make_epoch(epoch)
        return make_batch(self._batches[index], self._capacity)

    def _make_epoch(self, epoch: int) -> list[list[list[np.ndarray]]]:
        rng = np.random.default_rng((self._seed, epoch))
        pieces = [
            document[start : start + self._capacity]
            for index in rng.permutation(len(self._documents))
            for document in [self._documents[index]]
            for start in range(0, len(document) - 1, self._capacity)
        ]
        rows = pack(pieces, self._capacity)
        rows = [rows[i] for i in rng.permutation(len(rows))]
        is_long = [len(row[0]) >= self._long_segment for row in rows]
        long = [row for row, yes in zip(rows, is_long, strict=True) if yes]
        count = min(len(rows) // self._num_rows, len(long))
        rest = long[count:] + [row for row, yes in zip(rows, is_long, strict=True) if not yes]
        rest = [rest[i] for i in rng.permutation(len(rest))]
        others = self._num_rows - 1
        batches = [[long[i], *rest[i * others : (i + 1) * others]] for i in range(count)]
        return [[batch[i] for i in rng.permutation(self._num_rows)] for batch in batches]


def make_batch(rows: Sequence[Sequence[np.ndarray]], capacity: int) -> Batch:
    """Lays the pieces of each row one after the other.

    Args:
      rows: the pieces of each row, at most `capacity` tokens together.
      capacity: tokens a row, padding included.
    """
    names = ("tokens", "targets", "positions", "segment_ids")
    arrays: dict[str, np.ndarray]
    arrays = {name: np.zeros((len(rows), capacity), np.int32) for name in names}
    arrays["weights"] = np.zeros((len(rows), capacity), np.float32)
    segments = [Segments.from_seqlens([len(piece) for piece in row]) for row in rows]
    for r, row in enumerate(rows):
        for i, (piece, start) in enumerate(zip(row, segments[r].starts, strict=True)):
            whole, but_last = slice(start, start + len(piece)), slice(start, start + len(piece) - 1)
            arrays["tokens"][r, whole] = piece
            arrays["targets"][r, but_last] = piece[1:]
            arrays["weights"][r, but_last] = 1.0
            arrays["positions"][r, whole] = np.arange(len(piece))
            arrays["segment_ids"][r, whole] = i + 1
    return Batch(arrays, segments)
