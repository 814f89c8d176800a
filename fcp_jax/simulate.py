"""What a plan costs on a network: kernels and transfers of every rank, event by event.

A rank begins stage k when stage k - 1 has ended and all it sends and receives for stage k has
arrived. What stage k + 1 needs, and what stage k - 1 sends back, travels from then on: two stages
of keys and values are in memory, as in the runtime. Rates are max-min fair over the links of the
network, kernels run at measured rates, and nothing is fitted to results of others.
"""

import dataclasses
from typing import Any

import numpy as np

from fcp_jax.fair_sharing import Course, Flows, run
from fcp_jax.kernel_model import KernelModel, measure_pairs
from fcp_jax.plan import Plan
from fcp_jax.rounds import permutation
from fcp_jax.tables import fragment_blocks, work_items
from fcp_jax.topology import NIC, Topology

RESHUFFLES = ("none", "exposed", "hidden")
_BACKWARD = 2.5  # matrix products of backward over those of forward
_GRADIENT_BYTES = 4  # of a feature: gradients of keys and values travel in float32


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a rank computes at.

    Attributes:
      name: what it is.
      peak_tflops: dense bfloat16, what MFU is a share of.
      forward: kernel.
      backward: kernel; FLOPs counted as 2.5 times those of forward.
      launch_seconds: added to every stage that computes anything.
      reserved: share of the multiprocessors that transfers take from kernels.
    """

    name: str
    peak_tflops: float
    forward: KernelModel
    backward: KernelModel
    launch_seconds: float = 1e-4
    reserved: float = 6 / 132


# Kernels: `python -m benchmarks.calibrate` on benchmarks/results/attention.json. A stage begins
# with its tile schedule, 0.1 ms at 32K tokens (docs/kernels_attention.md). 989.4 TFLOP/s: NVIDIA's
# datasheet. 6 multiprocessors for transfers: FCP paper, section on implementation.
H200 = Hardware("h200", 989.4, KernelModel(638, 118, 182), KernelModel(548, 242, 357))


def of_intensity(flops_per_byte: float, nic: float = NIC) -> Hardware:
    """Hardware with this peak per byte a second of its network, kernels as good as on an H200.

    The paper names its clusters by this ratio: 5920 (GPU-X) and 2500 (GPU-Y).
    """
    peak = flops_per_byte * nic / 1e12
    scale = peak / H200.peak_tflops
    return dataclasses.replace(
        H200,
        name=f"{flops_per_byte:g} FLOPs a byte",
        peak_tflops=peak,
        forward=dataclasses.replace(H200.forward, tflops=H200.forward.tflops * scale),
        backward=dataclasses.replace(H200.backward, tflops=H200.backward.tflops * scale),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """The course of one attention.

    Step 0 is local work, step k the k-th stage.

    Attributes:
      makespan: seconds until the last rank is done.
      mfu: FLOPs of visible pairs over makespan, ranks and peak.
      kernel_share: the same over the rate of the kernel in large blocks instead of the peak.
      exposed: float64 [num_ranks], seconds a rank does not compute before the last one is done.
      link_bytes: float64 [num_links].
      link_use: float64 [num_links], bytes over capacity and makespan.
      flows: what travelled.
      course: when.
    """

    makespan: float
    mfu: float
    kernel_share: float
    exposed: np.ndarray
    link_bytes: np.ndarray
    link_use: np.ndarray
    flows: Flows
    course: Course


def simulate(
    plan: Plan,
    topology: Topology,
    hardware: Hardware = H200,
    *,
    backward: bool = False,
    overlap: bool = True,
    matched: bool = True,
    reshuffle: str = "none",
    defer: int | None = None,
    rank_speeds: np.ndarray | None = None,
) -> Simulation:
    """Simulates the first row of a plan.

    Ring plans pass keys and values on from neighbor to neighbor. "all_gather" and "wlb" plans
    gather all keys and values, along a ring too, before they compute anything.

    Args:
      plan: with its `config`, which prices tokens.
      topology: of as many ranks.
      hardware: what ranks compute at.
      backward: backward instead of forward: keys and values come, and float32 gradients go back
        while the next stage computes.
      overlap: whether the transfers of a stage run while the stage before computes.
      matched: whether transfers keep to the plan's rounds; else every rank pulls the blocks it
        needs in ascending order, as many at once as a stage has, whoever else pulls them; sender
        and receiver go through stages together in either case.
      reshuffle: "none" (the whole model is in the plan's layout), "exposed" (dispatch before and
        undispatch after), or "hidden" (dispatch behind local work, undispatch behind the last
        stage).
      defer: stages that keys and values stay in memory longer, so that a rank with more to do than
        others can do part of it later: what no runtime does yet. None keeps to the plan.
      rank_speeds: float [num_ranks], real speeds; None for those that the plan was made for.

    Returns:
      The course.

    Raises:
      ValueError: if the plan has no config, or ranks or options do not fit together.
    """
    config, shape = plan.config, plan.shape
    if config is None:
        raise ValueError("plan has no config, which the simulation needs to price tokens")
    ranks = shape.num_ranks
    if topology.num_ranks != ranks:
        raise ValueError(f"topology joins {topology.num_ranks} ranks, plan has {ranks}")
    if reshuffle not in RESHUFFLES:
        raise ValueError(f"reshuffle must be one of {RESHUFFLES}, got {reshuffle!r}")
    planned = np.ones(ranks) if config.rank_speeds is None else np.array(config.rank_speeds)
    speeds = planned if rank_speeds is None else np.asarray(rank_speeds, float)
    if speeds.shape != (ranks,) or not (speeds > 0).all():
        raise ValueError(f"rank_speeds must be {ranks} positive numbers, got {rank_speeds}")

    kernel = hardware.backward if backward else hardware.forward
    flops = 4.0 * config.num_q_heads * config.head_dim * (_BACKWARD if backward else 1.0)
    pairs, pulls = _stages(plan, kernel, backward, matched)
    if defer is not None:
        pairs = _deferred(pairs, defer)
    rate = kernel.tflops * 1e12 * (1 - hardware.reserved) * speeds[:, None]
    work = pairs * flops / rate + np.where(pairs > 0, hardware.launch_seconds, 0.0)
    flows = _flows(plan, pulls, work.shape[1], backward, overlap)
    if reshuffle != "none":
        hidden = reshuffle == "hidden"
        flows = Flows.join([flows, *_reshuffle(plan, work.shape[1], backward, hidden)])

    flow, link = topology.route(flows.src, flows.dst)
    tolerance = 5e-4 * float(work.sum(1).max(initial=0.0))
    course = run(work, flows, flow, link, topology.capacity, tolerance)
    makespan = float(course.begin[:, -1].max())
    link_bytes = np.bincount(link, flows.size[flow], minlength=len(topology.capacity))
    length = plan.fragment_hi[0].astype(float) - plan.fragment_lo[0] + 1
    seen = (length + 1) / 2 if shape.causal else length
    total = float((plan.fragment_length[0] * seen).sum()) * flops
    per_second = total / max(makespan, 1e-30) / ranks / 1e12
    return Simulation(
        makespan=makespan,
        mfu=per_second / hardware.peak_tflops,
        kernel_share=per_second / kernel.tflops,
        exposed=makespan - work.sum(1),
        link_bytes=link_bytes,
        link_use=link_bytes / topology.capacity / max(makespan, 1e-30),
        flows=flows,
        course=course,
    )


def trace(simulation: Simulation) -> dict[str, Any]:
    """The course in the Chrome trace event format, for chrome://tracing or Perfetto.

    Each rank is a process with two rows: what it computes, and from its first byte to its last what
    it receives for each step.
    """
    course, flows = simulation.course, simulation.flows
    ranks, steps = course.end.shape
    order = np.argsort(flows.dst, kind="stable")
    by_rank = np.split(order, np.searchsorted(flows.dst[order], np.arange(1, ranks)))
    spans = []
    for rank in range(ranks):
        for step in range(steps):
            name = f"stage {step - 1}" if step else "local"
            spans.append((rank, 0, name, course.begin[rank, step], course.end[rank, step]))
        for due in range(steps + 1):
            mine = by_rank[rank][flows.due[by_rank[rank]] == due]
            if len(mine):
                name = "before the end" if due == steps else f"for stage {due - 1}"
                first, last = course.flow_begin[mine].min(), course.flow_end[mine].max()
                spans.append((rank, 1, name if due else "dispatch", first, last))
    events: list[dict[str, Any]] = [
        {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": {"name": label}}
        for rank in range(ranks)
        for kind, row, label in (
            ("process_name", 0, f"rank {rank}"),
            ("thread_name", 0, "compute"),
            ("thread_name", 1, "receive"),
        )
    ]
    events += [
        {"name": name, "ph": "X", "pid": rank, "tid": row, "ts": a * 1e6, "dur": (b - a) * 1e6}
        for rank, row, name, a, b in spans
        if b > a
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _stages(plan: Plan, kernel: KernelModel, backward: bool, matched: bool):
    """Costs in token pairs [N, 1 + K], and (src, dst, stage) of the blocks that are pulled."""
    shape = plan.shape
    ranks, slots = shape.num_ranks, shape.num_slots
    blocks, items = fragment_blocks(plan), work_items(plan)
    if matched:
        stage, (src, dst, pull_stage) = items.stage, _rounds(plan)
    else:
        remote = items.kv_block // slots != items.rank
        block = np.where(remote, items.rank * blocks.num_blocks + items.kv_block, -1)
        needed, index = np.unique(block, return_inverse=True)
        rank, kv_block = np.divmod(needed, blocks.num_blocks)
        turn = np.arange(len(needed)) - np.searchsorted(rank, rank)
        stage_of = np.where(needed < 0, -1, turn // plan.recv_block.shape[3])
        stage = stage_of[index]
        remote = needed >= 0
        src, dst, pull_stage = kv_block[remote] // slots, rank[remote], stage_of[remote]
    count = 2 + max(int(stage.max(initial=-1)), int(pull_stage.max(initial=-1)))
    if plan.config and plan.config.method in ("all_gather", "wlb") and count > 1:
        stage, count = np.zeros_like(stage), 2
    step = items.rank * count + stage + 1

    found = measure_pairs(blocks, shape.causal)
    wanted = items.query_block * blocks.num_blocks + items.kv_block
    place = np.searchsorted(found.key, wanted)  # ring plans list pairs that hold nothing, too
    place = np.minimum(place, max(len(found.key) - 1, 0))
    hit = found.key[place] == wanted
    step, place = step[hit], place[hit]
    cost = np.bincount(
        step, found.visible[place] + kernel.diagonal * found.diagonal_rows[place], ranks * count
    )
    row_block = (items.kv_block if backward else items.query_block)[hit]
    rows = (found.kv_rows if backward else found.query_rows)[place]
    visited, index = np.unique(step * blocks.num_blocks + row_block, return_inverse=True)
    tokens = np.bincount(blocks.block, blocks.length, blocks.num_blocks)
    rows = np.minimum(np.bincount(index, rows, len(visited)), tokens[visited % blocks.num_blocks])
    cost += np.bincount(visited // blocks.num_blocks, kernel.row * rows, ranks * count)
    return cost.reshape(ranks, count), (src, dst, pull_stage)


def _deferred(pairs: np.ndarray, defer: int) -> np.ndarray:
    """Costs [N, 1 + K] when no rank does more than the mean so far, unless keys would be lost."""
    target, left = np.cumsum(pairs.mean(0)), pairs.copy()
    moved, done = np.zeros_like(pairs), np.zeros(len(pairs))
    steps = pairs.shape[1]
    for step in range(steps):
        window = [*range(max(step - defer, 1), step + 1), 0] if step else [0]
        if step == steps - 1:
            must = left.sum(1)
            window = [*range(1, steps), 0]
        else:
            must = left[:, step - defer] if step - defer >= 1 else 0.0
        wanted = np.minimum(left[:, window].sum(1), target[step] - done)
        todo = moved[:, step] = np.maximum(np.maximum(wanted, must), 0.0)
        done += todo
        for column in window:
            part = np.minimum(left[:, column], todo)
            left[:, column] -= part
            todo = todo - part
    return moved


def _rounds(plan: Plan):
    """(src, dst, stage) of every payload, those of padding included."""
    shape = plan.shape
    groups = np.repeat(np.arange(len(shape.groups)), plan.trips)
    if shape.transport in ("xor", "shift"):
        once = [
            np.concatenate([permutation(shape.transport, r, shape.num_ranks) for r in rounds])
            for rounds in shape.groups
        ]
        parts = [(once[group], stage) for stage, group in enumerate(groups)]
        pairs = np.concatenate([part for part, _ in parts] or [np.zeros((0, 2), int)])
        stage = np.repeat([s for _, s in parts], [len(part) for part, _ in parts]).astype(np.int64)
        return pairs[:, 0], pairs[:, 1], stage
    dst, stage, column = np.nonzero(plan.recv_block[0] >= 0)
    return plan.recv_block[0][dst, stage, column] // shape.num_slots, dst, stage


def _flows(plan: Plan, pulls, steps: int, backward: bool, overlap: bool) -> Flows:
    config = plan.config
    assert config is not None
    ranks = np.arange(plan.shape.num_ranks)
    kv = float(plan.shape.block_size * config.kv_bytes_per_token)
    gradient = kv * _GRADIENT_BYTES / config.kv_itemsize
    if config.method in ("all_gather", "wlb"):
        others = len(ranks) - 1
        before, after = np.roll(ranks, 1), np.roll(ranks, -1)
        parts = [Flows.make(before, ranks, kv * others, -1, min(1, steps - 1))]
        if backward:
            parts.append(Flows.make(ranks, after, gradient * others, 2 * steps - 1, steps))
        return Flows.join(parts if others else [Flows.make([], [], 0, -1, 0)])
    src, dst, stage = pulls
    step = stage + 1
    if config.method == "ring":
        src = (dst - 1) % len(ranks)
    opens = 2 * (step - 1) + (0 if overlap else 1)
    parts = [Flows.make(src, dst, kv, opens, step)]
    if backward:
        if config.method == "ring":
            src, dst = dst, (dst + 1) % len(ranks)
        else:
            src, dst = dst, src
        hides = overlap & (step < steps - 1)  # behind the next stage
        opens = np.where(hides, 2 * (step + 1), 2 * step + 1)
        parts.append(Flows.make(src, dst, gradient, opens, step + 1 + hides))
    return Flows.join(parts)


def _reshuffle(plan: Plan, steps: int, backward: bool, hidden: bool) -> list[Flows]:
    """Dispatch of q, k, v (and the cotangent), and the way back of the output (dq, dk, dv)."""
    config = plan.config
    assert config is not None
    dst, stage, column = np.nonzero(plan.dispatch_recv[0, ..., 0] >= 0)
    src = plan.dispatch_recv[0, dst, stage, column, 0]
    tokens = float(plan.shape.block_size)
    q_bytes = config.num_q_heads * config.head_dim * config.kv_itemsize
    there = tokens * (config.kv_bytes_per_token + q_bytes * (2 if backward else 1))
    back = tokens * (q_bytes + (config.kv_bytes_per_token if backward else 0))
    leaves = 2 * (steps - 1) if hidden else 2 * (steps - 1) + 1
    return [
        Flows.make(src, dst, there, -1, min(1, steps) if hidden else 0),
        Flows.make(dst, src, back, leaves, steps),
    ]
