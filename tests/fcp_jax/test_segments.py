import numpy as np
import pytest

from fcp_jax import Segments


def test_seqlens_are_packed_from_zero():
    segments = Segments.from_seqlens([3, 0, 5])
    np.testing.assert_array_equal(segments.starts, [0, 3, 3])
    np.testing.assert_array_equal(segments.ends, [3, 3, 8])
    assert segments.num_tokens == 8 and len(segments) == 3


def test_cu_seqlens_keep_empty_segments():
    segments = Segments.from_cu_seqlens([0, 0, 1208, 2048, 2048])
    np.testing.assert_array_equal(segments.lengths, [0, 1208, 840, 0])


def test_segment_ids_keep_gaps():
    segments = Segments.from_segment_ids([0, 7, 7, 0, 0, 2, 0])
    np.testing.assert_array_equal(segments.starts, [1, 5])
    np.testing.assert_array_equal(segments.lengths, [2, 1])
    assert len(Segments.from_segment_ids([])) == 0
    assert len(Segments.from_segment_ids([0, 0])) == 0


def test_segment_ids_that_come_back_are_refused():
    with pytest.raises(ValueError, match="segment_ids.*id 1 comes back"):
        Segments.from_segment_ids([1, 1, 2, 2, 1])
    with pytest.raises(ValueError, match="id 1 comes back"):
        Segments.from_segment_ids([1, 0, 1])


@pytest.mark.parametrize(
    ("build", "values", "message"),
    [
        (Segments.from_seqlens, [3, -1], "seqlens must not be negative, got -1"),
        (Segments.from_seqlens, [3.5], "seqlens must be .* integers"),
        (Segments.from_seqlens, [[3]], "seqlens must be a one-dimensional"),
        (Segments.from_seqlens, ["3"], "seqlens must be .* integers"),
        (Segments.from_cu_seqlens, [0, 5, 4], "cu_seqlens must ascend"),
        (Segments.from_cu_seqlens, [], "at least one boundary"),
    ],
)
def test_bad_input_names_the_argument(build, values, message):
    with pytest.raises(ValueError, match=message):
        build(values)


def test_overlap_is_refused():
    with pytest.raises(ValueError, match="must not overlap"):
        Segments(np.array([0, 2]), np.array([3, 1]))
    with pytest.raises(ValueError, match="same size"):
        Segments(np.array([0]), np.array([3, 1]))
