"""Packed segments: where each document lies in the caller's row of tokens."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """Contiguous, non-overlapping runs of tokens, in ascending order, gaps allowed.

    Attributes:
      starts: int64 [num_segments], first row of each segment in the caller's layout.
      lengths: int64 [num_segments], tokens of each; zero is allowed.
    """

    starts: np.ndarray
    lengths: np.ndarray

    def __post_init__(self):
        """Checks order and overlap.

        Raises:
          ValueError: if an array is not one-dimensional integers, or a segment has negative
            length, or starts before the previous one ends.
        """
        starts, lengths = _integers("starts", self.starts), _integers("lengths", self.lengths)
        if len(starts) != len(lengths):
            raise ValueError(
                f"starts and lengths must have the same size, got {len(starts)} and {len(lengths)}"
            )
        if (lengths < 0).any():
            raise ValueError(f"lengths must not be negative, got {lengths[lengths < 0][0]}")
        if len(starts) and (starts[0] < 0 or (starts[1:] < (starts + lengths)[:-1]).any()):
            raise ValueError("starts must be ascending and segments must not overlap")
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "lengths", lengths)

    def __len__(self) -> int:
        """Returns the number of segments, empty ones included."""
        return len(self.starts)

    @property
    def ends(self) -> np.ndarray:
        """Row after the last token of each segment, int64 [num_segments]."""
        return self.starts + self.lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments together."""
        return int(self.lengths.sum())

    @classmethod
    def from_seqlens(cls, seqlens) -> "Segments":
        """Returns segments packed one after the other from row 0.

        Args:
          seqlens: integers [num_segments], tokens of each segment.
        """
        lengths = _integers("seqlens", seqlens)
        if (lengths < 0).any():
            raise ValueError(f"seqlens must not be negative, got {lengths[lengths < 0][0]}")
        return cls(np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens) -> "Segments":
        """Returns the segments between consecutive boundaries.

        Args:
          cu_seqlens: integers [num_segments + 1], ascending; repeated values are empty segments.
        """
        boundaries = _integers("cu_seqlens", cu_seqlens)
        if not len(boundaries):
            raise ValueError("cu_seqlens must hold at least one boundary, got an empty array")
        if boundaries[0] < 0 or (np.diff(boundaries) < 0).any():
            raise ValueError(f"cu_seqlens must ascend from 0 or more, got {boundaries}")
        return cls(boundaries[:-1], np.diff(boundaries))

    @classmethod
    def from_segment_ids(cls, segment_ids) -> "Segments":
        """Returns the runs of equal nonzero ids; zeros are padding and stay where they are.

        Args:
          segment_ids: integers [num_tokens].

        Raises:
          ValueError: if an id comes back after another id (1, 1, 2, 1): such tokens would be
            one segment by id but two by place.
        """
        ids = _integers("segment_ids", segment_ids)
        edges = np.flatnonzero(np.diff(ids)) + 1
        starts = np.concatenate([[0], edges]) if len(ids) else np.zeros(0, np.int64)
        lengths = np.diff(np.concatenate([starts, [len(ids)]]))
        real = ids[starts] != 0
        values, counts = np.unique(ids[starts][real], return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"segment_ids must name each segment once, but id {values[counts > 1][0]} comes "
                "back after another id"
            )
        return cls(starts[real], lengths[real])


def as_segments(segments) -> Segments:
    """Returns `segments` as `Segments`, taking plain lengths to be packed from row 0."""
    return segments if isinstance(segments, Segments) else Segments.from_seqlens(segments)


def _integers(name: str, values) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.reshape(-1).astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a one-dimensional array of integers, got "
            f"shape {array.shape} of {array.dtype}"
        )
    return array.astype(np.int64)
