"""Max-min fair rates of flows over shared links, and the course of steps that wait for flows."""

import dataclasses
import heapq

import numpy as np


def max_min_rates(
    flow: np.ndarray, link: np.ndarray, num_flows: int, capacity: np.ndarray
) -> np.ndarray:
    """Fills links until each flow has a full link on which no flow is faster.

    Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2), except that every
    link that is the narrowest of all its flows is filled at once.

    Args:
      flow: int [num_hops], sorted: the flow of each hop.
      link: int [num_hops]: its link.
      num_flows: how many flows.
      capacity: float64 [num_links], bytes a second.

    Returns:
      float64 [num_flows], bytes a second; infinite for flows without hops.
    """
    rates = np.full(num_flows, np.inf)
    left = capacity.astype(float)
    while len(flow):
        share = left / np.maximum(np.bincount(link, minlength=len(left)), 1)
        begins = np.flatnonzero(np.r_[True, flow[1:] != flow[:-1]])
        counts = np.diff(begins, append=len(flow))
        fair = np.minimum.reduceat(share[link], begins)
        slower = np.repeat(fair, counts) < share[link] * (1 - 1e-12)
        full = np.bincount(link, slower, minlength=len(left)) == 0
        done = np.logical_or.reduceat(full[link], begins)
        rates[flow[begins[done]]] = fair[done]
        ended = np.repeat(done, counts)
        left -= np.bincount(link[ended], rates[flow[ended]], minlength=len(left))
        left = np.maximum(left, 0.0)
        flow, link = flow[~ended], link[~ended]
    return rates


@dataclasses.dataclass(frozen=True, eq=False)
class Flows:
    """Transfers between ranks, arrays of [num_flows].

    A rank begins step 0, ends it, begins step 1, and so on; event 2 * c is the begin of step c on a
    rank, event 2 * c + 1 its end.

    Attributes:
      src: int, sender.
      dst: int, receiver.
      size: float, bytes.
      opens: int, the event on its ranks after which a flow may start; -1 for the beginning.
      due: int, the step that its ranks do not begin before the flow has ended; the number of steps
        stands for being done.
    """

    src: np.ndarray
    dst: np.ndarray
    size: np.ndarray
    opens: np.ndarray
    due: np.ndarray

    @classmethod
    def join(cls, parts: list["Flows"]) -> "Flows":
        """Concatenates."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @classmethod
    def make(cls, src, dst, size, opens, due) -> "Flows":
        """Broadcasts scalars to the flows."""
        src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
        size, opens, due = (
            np.broadcast_to(np.asarray(x, kind), src.shape)
            for x, kind in ((size, float), (opens, np.int64), (due, np.int64))
        )
        return cls(src, dst, size, opens, due)


@dataclasses.dataclass(frozen=True, eq=False)
class Course:
    """When everything happened, in seconds from the start.

    Attributes:
      begin: float64 [num_ranks, num_steps + 1]; the last column is when a rank is done.
      end: float64 [num_ranks, num_steps].
      flow_begin: float64 [num_flows].
      flow_end: float64 [num_flows].
    """

    begin: np.ndarray
    end: np.ndarray
    flow_begin: np.ndarray
    flow_end: np.ndarray


def run(
    work: np.ndarray,
    flows: Flows,
    flow: np.ndarray,
    link: np.ndarray,
    capacity: np.ndarray,
    tolerance: float = 0.0,
) -> Course:
    """Runs steps and flows event by event; rates change whenever a flow starts or ends.

    Args:
      work: float64 [num_ranks, num_steps], seconds that each step computes.
      flows: what travels.
      flow: int [num_hops], sorted: the flow of each hop; flows without hops take no time.
      link: int [num_hops], its link.
      capacity: float64 [num_links], bytes a second.
      tolerance: seconds; flows that end within it end together, at the latest of their ends.

    Returns:
      The course.

    Raises:
      RuntimeError: if some step waits for something that never comes.
    """
    num_ranks, num_steps = work.shape
    count = len(flows.src)
    begin = np.full((num_ranks, num_steps + 1), np.inf)
    end = np.full(work.shape, np.inf)
    flow_begin, flow_end = np.full(count, np.inf), np.full(count, np.inf)
    waits = np.zeros((num_ranks, num_steps + 1), np.int64)
    waits[:, 1:] = 1
    for side in (flows.src, flows.dst):
        np.add.at(waits, (side, flows.due), 1)
    closed = np.where(flows.opens < 0, 0, 2)
    first_hop = np.searchsorted(flow, np.arange(count + 1))
    opened_by = _opened_by(flows, num_ranks, 2 * num_steps)
    left = flows.size.astype(float)
    active, rates, now = np.zeros(0, np.int64), np.zeros(0), 0.0
    ends: list[tuple[float, int, int]] = []
    ready = [(rank, 0) for rank in np.flatnonzero(waits[:, 0] == 0).tolist()]
    fresh = [np.flatnonzero(closed == 0)]

    def happen(rank: int, event: int) -> None:
        opened = opened_by(rank, event)
        if len(opened):
            closed[opened] -= 1
            fresh.append(opened[closed[opened] == 0])

    while True:
        while ready:
            rank, step = ready.pop()
            begin[rank, step] = now
            if step < num_steps:
                heapq.heappush(ends, (now + work[rank, step], rank, step))
                happen(rank, 2 * step)
        started = np.concatenate(fresh) if fresh else active[:0]
        fresh.clear()
        flow_begin[started] = now
        over = active[left[active] <= rates * tolerance + flows.size[active] * 1e-12]
        over = np.append(over, started[first_hop[started] == first_hop[started + 1]])
        if len(over):
            flow_end[over] = now
            sides = np.r_[flows.dst[over], flows.src[over]]
            due = np.tile(flows.due[over], 2)
            np.subtract.at(waits, (sides, due), 1)
            touched = sides * (num_steps + 1) + due
            for key in np.unique(touched[waits[sides, due] == 0]).tolist():
                ready.append(divmod(key, num_steps + 1))
        if len(over) or len(started):
            active = np.append(active, started)
            active = active[np.isinf(flow_end[active])]
            hops = first_hop[active + 1] - first_hop[active]
            place = np.repeat(np.arange(len(active)), hops)
            within = np.arange(len(place)) - np.repeat(np.cumsum(hops) - hops, hops)
            links = link[first_hop[active][place] + within]
            rates = max_min_rates(place, links, len(active), capacity)
        if ready:
            continue
        until = now + (left[active] / rates).min(initial=np.inf)
        until = min(until, ends[0][0] if ends else np.inf)
        if np.isinf(until):
            break
        left[active] -= rates * (until - now)
        now = until
        while ends and ends[0][0] <= now:
            _, rank, step = heapq.heappop(ends)
            end[rank, step] = now
            happen(rank, 2 * step + 1)
            waits[rank, step + 1] -= 1
            if not waits[rank, step + 1]:
                ready.append((rank, step + 1))
    if np.isinf(begin).any() or np.isinf(flow_end).any():
        raise RuntimeError("a step waits for a flow that its own end would open")
    return Course(begin, end, flow_begin, flow_end)


def _opened_by(flows: Flows, num_ranks: int, num_events: int):
    """Returns a lookup from (rank, event) to the flows that the event helps to open."""
    gated = np.flatnonzero(flows.opens >= 0)
    index = np.tile(gated, 2)
    key = np.r_[flows.dst[gated], flows.src[gated]] * num_events + flows.opens[index]
    order = np.argsort(key, kind="stable")
    bounds = np.searchsorted(key[order], np.arange(num_ranks * num_events + 1))
    index = index[order]

    def lookup(rank: int, event: int) -> np.ndarray:
        place = rank * num_events + event
        return index[bounds[place] : bounds[place + 1]]

    return lookup
