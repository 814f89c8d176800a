"""Edge coloring of bipartite multigraphs with as few colors as there can be.

König (1916): max-degree colors suffice. Here they are found by Euler splitting (Gabow 1976): pad
the multigraph to a regular one, halve its degree by walking its cycles alternately, and take out
one perfect matching wherever the degree is odd. All subgraphs of a level are processed at once;
with regular ones every vertex has equally many edges, so no step ever sorts. O(E log degree).
"""

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching


def color_edges(src: np.ndarray, dst: np.ndarray, num_ranks: int) -> np.ndarray:
    """Colors edges so that edges of one color share no sender and no receiver.

    Args:
      src: integers [num_edges], sender of each edge, below num_ranks.
      dst: integers [num_edges], receiver of each edge, below num_ranks.
      num_ranks: vertices on each side.

    Returns:
      int32 [num_edges], colors 0 to max-degree - 1; each is used.

    Raises:
      ValueError: if src and dst differ in size or name a vertex that does not exist.
    """
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    if src.shape != dst.shape or src.ndim != 1:
        raise ValueError(f"src and dst must be of one size, got {src.shape} and {dst.shape}")
    if not len(src):
        return np.zeros(0, np.int32)
    if min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= num_ranks:
        raise ValueError(f"src and dst must be in [0, {num_ranks})")
    out_degree = np.bincount(src, minlength=num_ranks)
    in_degree = np.bincount(dst, minlength=num_ranks)
    degree = int(max(out_degree.max(), in_degree.max()))
    vertices = np.arange(num_ranks)
    left = np.concatenate([src, np.repeat(vertices, degree - out_degree)])
    right = np.concatenate([dst, np.repeat(vertices, degree - in_degree)])
    return _color_regular(left, right, num_ranks, degree)[: len(src)]


def _color_regular(left, right, num_ranks: int, degree: int) -> np.ndarray:
    """Colors a regular multigraph."""
    color = np.empty(len(left), np.int32)
    # Edges by (subgraph, vertex), `degree` each: [subgraphs * num_ranks, degree].
    vertex = np.min_scalar_type(num_ranks)  # numpy sorts 16-bit integers by radix
    at_left, at_right = (
        np.argsort(side.astype(vertex), kind="stable").astype(np.int32).reshape(-1, degree)
        for side in (left, right)
    )
    next_color = 0
    while True:
        subgraphs = len(at_left) // num_ranks
        if degree % 2:
            matched = _perfect_matchings(at_left, right, num_ranks)
            color[matched] = next_color + np.repeat(np.arange(subgraphs), num_ranks)
            next_color += subgraphs
            degree -= 1
            if not degree:
                return color
            keep = np.ones(len(left), bool)
            keep[matched] = False
            at_left = at_left[keep[at_left]].reshape(-1, degree)
            at_right = at_right[keep[at_right]].reshape(-1, degree)
        half = _alternate(at_left, at_right, len(left))
        degree //= 2
        at_left, at_right = (_split(at, half, num_ranks) for at in (at_left, at_right))


def _alternate(at_left: np.ndarray, at_right: np.ndarray, num_edges: int) -> np.ndarray:
    """Marks half of the edges at every vertex, bool [num_edges].

    Pairing the edges at each vertex makes the edges a union of cycles that alternate between left
    and right pairs. Two steps along a cycle keep the mark, one step changes it.
    """
    left_partner, right_partner = np.tile(np.arange(num_edges, dtype=np.int32), (2, 1))
    for partner, at in ((left_partner, at_left), (right_partner, at_right)):
        a, b = at.reshape(-1, 2).T
        partner[a], partner[b] = b, a
    two_steps = right_partner[left_partner]
    links = csr_array(
        (np.ones(num_edges), two_steps, np.arange(num_edges + 1, dtype=np.int32)),
        shape=(num_edges, num_edges),
    )
    # On a permutation strong components are the cycles, and need no transposed graph.
    orbit = connected_components(links, directed=True, connection="strong")[1]
    return orbit < orbit[left_partner]


def _split(at: np.ndarray, half: np.ndarray, num_ranks: int) -> np.ndarray:
    """Splits every subgraph's edges into the marked and the unmarked half."""
    degree = at.shape[1] // 2
    at = at.ravel()
    marked = half[at]
    parts = [at.compress(chosen).reshape(-1, 1, num_ranks, degree) for chosen in (marked, ~marked)]
    return np.concatenate(parts, axis=1).reshape(-1, degree)


def _perfect_matchings(at_left: np.ndarray, right: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns one edge for every (subgraph, left vertex): a perfect matching of each subgraph."""
    rows, degree = at_left.shape
    if degree == 1:
        return at_left[:, 0]
    receiver = right[at_left] + np.arange(rows)[:, None] // num_ranks * num_ranks
    graph = csr_array(
        (np.ones(receiver.size, np.int32), receiver.flatten(), np.arange(rows + 1) * degree),
        shape=(rows, rows),
    )
    graph.sum_duplicates()  # scipy 1.18 writes out of bounds on parallel edges
    partner = maximum_bipartite_matching(graph, perm_type="column")
    return at_left[np.arange(rows), np.argmax(receiver == partner[:, None], axis=1)]
