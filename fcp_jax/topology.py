"""Networks as links with capacities, and the links that a transfer between two ranks takes.

Capacities are bytes a second, one direction. The defaults are an NVSwitch node of H200s (450 GB/s a
GPU each way, NVIDIA H200 datasheet: 900 GB/s in both) and one 400 Gb/s NIC a GPU (50 GB/s, the line
rate of the FCP paper, arXiv 2605.08524).
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

NVLINK = 450e9
NIC = 50e9

Route = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(src, dst), int [num_flows] each -> (flow, link), int [num_hops] each, sorted by flow."""


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """A network.

    Attributes:
      name: what it is.
      num_ranks: ranks that it joins.
      capacity: float64 [num_links], bytes a second.
      route: the links of transfers; a transfer from a rank to itself takes none.
    """

    name: str
    num_ranks: int
    capacity: np.ndarray
    route: Route

    def slowed(self, rank: int, factor: float) -> "Topology":
        """The same with the links into and out of a rank at `factor` of their capacity."""
        others = np.flatnonzero(np.arange(self.num_ranks) != rank)
        alone = np.full(len(others), rank)
        leaving, out = self.route(alone, others)
        coming, into = self.route(others, alone)
        own = np.append(
            out[np.diff(leaving, prepend=-1) > 0], into[np.diff(coming, append=len(others)) > 0]
        )
        capacity = self.capacity.copy()
        capacity[np.unique(own)] *= factor
        name = f"{self.name}, rank {rank} at {factor:g}"
        return dataclasses.replace(self, name=name, capacity=capacity)


def nvswitch(num_ranks: int, bandwidth: float = NVLINK) -> Topology:
    """One non-blocking switch: only each rank's own way out and way in are shared."""
    capacity = np.full(2 * num_ranks, bandwidth)

    def route(src, dst):
        return _hops(src != dst, [src, num_ranks + dst])

    return Topology("nvswitch", num_ranks, capacity, route)


def fat_tree(
    num_ranks: int,
    ranks_per_node: int = 8,
    nodes_per_leaf: int = 4,
    oversubscription: float = 1.0,
    nic: float = NIC,
    nvlink: float = NVLINK,
) -> Topology:
    """NVSwitch nodes under leaf switches under a spine.

    Args:
      num_ranks: how many ranks.
      ranks_per_node: ranks that one NVSwitch joins.
      nodes_per_leaf: nodes under one leaf switch.
      oversubscription: what the ranks of a leaf can send over what the leaf can; 1 is non-blocking.
      nic: bytes a second of a rank to the network.
      nvlink: bytes a second of a rank inside its node.
    """
    _check_nodes(num_ranks, ranks_per_node)
    per_leaf = ranks_per_node * nodes_per_leaf
    leaves = -(-num_ranks // per_leaf)
    up = per_leaf * nic / oversubscription
    capacity = np.concatenate(
        [
            np.full(2 * num_ranks, nvlink),
            np.full(2 * num_ranks, nic),
            np.full(2 * leaves, up),
        ]
    )

    def route(src, dst):
        inside = src // ranks_per_node == dst // ranks_per_node
        far = src // per_leaf != dst // per_leaf
        columns = [
            np.where(inside, src, 2 * num_ranks + src),
            np.where(far, 4 * num_ranks + src // per_leaf, -1),
            np.where(far, 4 * num_ranks + leaves + dst // per_leaf, -1),
            np.where(inside, num_ranks + dst, 3 * num_ranks + dst),
        ]
        return _hops(src != dst, columns)

    name = "fat_tree" if oversubscription == 1 else f"fat_tree {oversubscription:g}:1"
    return Topology(name, num_ranks, capacity, route)


def rail_optimized(
    num_ranks: int, ranks_per_node: int = 8, nic: float = NIC, nvlink: float = NVLINK
) -> Topology:
    """NVSwitch nodes whose i-th ranks share a switch; other rails are reached through NVLink first.

    Args:
      num_ranks: how many ranks.
      ranks_per_node: ranks that one NVSwitch joins; as many rails.
      nic: bytes a second of a rank to its rail.
      nvlink: bytes a second of a rank inside its node.
    """
    _check_nodes(num_ranks, ranks_per_node)
    capacity = np.repeat([nvlink, nvlink, nic, nic], num_ranks)

    def route(src, dst):
        node = src // ranks_per_node
        inside = node == dst // ranks_per_node
        via = node * ranks_per_node + dst % ranks_per_node
        turns = ~inside & (via != src)
        columns = [
            np.where(inside | turns, src, -1),
            np.where(turns, num_ranks + via, -1),
            np.where(inside, -1, 2 * num_ranks + via),
            np.where(inside, num_ranks + dst, 3 * num_ranks + dst),
        ]
        return _hops(src != dst, columns)

    return Topology("rail", num_ranks, capacity, route)


def torus(shape: tuple[int, ...], bandwidth: float = NIC) -> Topology:
    """A torus; transfers go dimension by dimension, the shorter way round.

    Args:
      shape: ranks along each dimension; rank numbers run through the last one first.
      bandwidth: bytes a second of a link, each way; a rank has two links a dimension.
    """
    num_ranks, dims = int(np.prod(shape)), len(shape)
    capacity = np.full(2 * dims * num_ranks, bandwidth)  # [direction, rank it leaves]

    def route(src, dst):
        place = np.array(np.unravel_index(src, shape))
        goal = np.array(np.unravel_index(dst, shape))
        columns = []
        for d, size in enumerate(shape):
            forth = (goal[d] - place[d]) % size
            back = size - forth
            sign = np.where(forth <= back, 1, -1)
            steps = np.minimum(forth, back)
            for step in range(size // 2):
                going = step < steps
                rank = np.ravel_multi_index(tuple(place), shape)
                direction = 2 * d + (sign < 0)
                columns.append(np.where(going, direction * num_ranks + rank, -1))
                place[d] = np.where(going, (place[d] + sign) % size, place[d])
        return _hops(src != dst, columns)

    return Topology("torus " + "x".join(map(str, shape)), num_ranks, capacity, route)


def torus_shape(num_ranks: int, dims: int) -> tuple[int, ...]:
    """The shape of `dims` dimensions nearest to a cube."""
    if dims == 1:
        return (num_ranks,)
    sizes = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    size = min(sizes, key=lambda n: abs(np.log(n) - np.log(num_ranks) / dims))
    return (size, *torus_shape(num_ranks // size, dims - 1))


def _torus(dims: int, num_ranks: int) -> Topology:
    return torus(torus_shape(num_ranks, dims))


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "nvswitch": nvswitch,
    "fat_tree": fat_tree,
    "rail": rail_optimized,
    "torus2d": functools.partial(_torus, 2),
    "torus3d": functools.partial(_torus, 3),
}
"""Makers of topologies by name, from a number of ranks."""


def _check_nodes(num_ranks: int, ranks_per_node: int) -> None:
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node:
        raise ValueError(
            f"num_ranks must be a multiple of ranks_per_node, got {num_ranks} and {ranks_per_node}"
        )


def _hops(moves: np.ndarray, columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Joins one link a column, -1 for none, to (flow, link)."""
    links = np.stack(columns, axis=1)
    flow, column = np.nonzero((links >= 0) & moves[:, None])
    return flow, links[flow, column]
