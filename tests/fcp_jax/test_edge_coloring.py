"""Exactly max-degree colors, always; networkx and brute force as oracles."""

import itertools

import networkx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fcp_jax.edge_coloring import color_edges


def assert_optimal(src, dst, num_ranks):
    colors = color_edges(src, dst, num_ranks)
    degree = max(np.bincount(src).max(), np.bincount(dst).max()) if len(src) else 0
    assert colors.dtype == np.int32 and colors.shape == src.shape
    assert np.unique(colors).tolist() == list(range(degree))
    for ends in (src, dst):
        assert len(np.unique(ends * (degree + 1) + colors)) == len(ends)
    return colors, degree


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=70),
        )
    )
)
@example((1, [(0, 0)] * 7))
@example((3, []))
def test_random_multigraphs(case):
    num_ranks, edges = case
    src, dst = np.array(edges, np.int64).reshape(-1, 2).T
    assert_optimal(src, dst, num_ranks)


@pytest.mark.parametrize(("num_ranks", "degree"), [(64, 37), (256, 64), (100, 129)])
def test_large_graphs_against_networkx(num_ranks, degree):
    rng = np.random.default_rng(degree)
    src = np.tile(np.arange(num_ranks), degree)
    dst = np.concatenate([rng.permutation(num_ranks) for _ in range(degree)])
    kept = rng.random(len(src)) < 0.7
    src, dst = src[kept], dst[kept]
    colors, degree = assert_optimal(src, dst, num_ranks)
    graph = networkx.MultiGraph((int(s), num_ranks + int(d)) for s, d in zip(src, dst, strict=True))
    assert max(dict(graph.degree).values()) == degree  # no fewer colors are possible
    ends = {edge: (int(src[edge]), num_ranks + int(dst[edge])) for edge in range(len(src))}
    for color in range(degree):
        matching = {ends[edge] for edge in np.flatnonzero(colors == color).tolist()}
        assert networkx.is_matching(networkx.Graph(graph), matching)


def test_no_fewer_colors_by_brute_force():
    src, dst = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 0, 1])
    _, degree = assert_optimal(src, dst, 3)

    def proper(colors):
        pairs = itertools.combinations(range(len(src)), 2)
        return all(
            colors[a] != colors[b] or (src[a] != src[b] and dst[a] != dst[b]) for a, b in pairs
        )

    fewer = itertools.product(range(degree - 1), repeat=len(src))
    assert not any(proper(colors) for colors in fewer)


def test_same_input_same_colors():
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 20, 500), rng.integers(0, 20, 500)
    np.testing.assert_array_equal(color_edges(src, dst, 20), color_edges(src, dst, 20))


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [([0], [0, 1], "of one size"), ([0], [2], r"in \[0, 2\)"), ([-1], [0], r"in \[0, 2\)")],
)
def test_bad_edges(src, dst, message):
    with pytest.raises(ValueError, match=message):
        color_edges(np.array(src), np.array(dst), 2)
