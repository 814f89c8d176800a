"""Edge coloring of bipartite multigraphs with as few colors as there can be (König 1916)."""

import numpy as np


def color_edges(src: np.ndarray, dst: np.ndarray, num_ranks: int) -> np.ndarray:
    """Colors edges so that edges of one color share no sender and no receiver.

    Args:
      src: int64 [num_edges], sender of each edge.
      dst: int64 [num_edges], receiver of each edge.
      num_ranks: vertices on each side.

    Returns:
      int32 [num_edges], colors 0 to max-degree - 1.
    """
    degree = np.concatenate([np.bincount(src, minlength=1), np.bincount(dst, minlength=1)])
    num_colors = int(degree.max(initial=0))
    # edge_at[vertex][color]: the edge of that color there, -1 for none; receivers follow senders.
    edge_at = np.full((2 * num_ranks, num_colors), -1, np.int64)
    ends = np.stack([src, dst + num_ranks], 1).tolist()
    colors = np.full(len(ends), -1, np.int32)
    for edge, (u, v) in enumerate(ends):
        a, b = int(np.argmin(edge_at[u] >= 0)), int(np.argmin(edge_at[v] >= 0))
        if a != b:  # swap a and b along the path from v that starts with a
            path, at, color = [], v, a
            while (step := edge_at[at, color]) >= 0:
                path.append(step)
                at = sum(ends[step]) - at
                color = a + b - color
            for step in path:
                edge_at[ends[step], colors[step]] = -1
            for step in path:
                colors[step] = a + b - colors[step]
                edge_at[ends[step], colors[step]] = step
        colors[edge] = a
        edge_at[[u, v], a] = edge
    return colors
