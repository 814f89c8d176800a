"""Pictures of a plan: where blocks live, and when each rank computes and communicates."""

import numpy as np

from fcp_jax.plan import Plan
from fcp_jax.simulate import Simulation
from fcp_jax.stats import KERNEL_TFLOPS
from fcp_jax.tables import fragment_blocks, stage_areas

LINK_GBPS = 50.0
"""Bandwidth of the pictured links, GB/s a direction: one ConnectX-7 a GPU (paper)."""


def plot_plan(plan: Plan, path, *, row: int = 0) -> None:
    """Draws the placement and a modelled stage timeline of one row to an image file.

    The timeline models forward compute at `KERNEL_TFLOPS` and transfers at `LINK_GBPS`, a stage's
    pull starting with the stage before it. Needs matplotlib (extra `viz`).

    Args:
      plan: from `make_plan`, with its config.
      path: image file to write.
      row: which row of the batch.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    ranks = plan.shape.num_ranks
    height = min(max(0.34 * ranks, 2.2), 12.0)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, height + 1.3), width_ratios=(1, 1.5), layout="constrained"
    )
    _draw_placement(left, plan, row)
    _draw_timeline(right, plan, row)
    for axis in (left, right):
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(_title(plan))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _title(plan: Plan) -> str:
    stats = plan.stats
    if stats is None:
        return f"{plan.shape.num_ranks} ranks"
    return (
        f"{stats.method}, {stats.num_ranks} ranks, {stats.transport}: compute imbalance "
        f"{stats.compute_imbalance:.1%}, {stats.num_transfers} transfers, max degree "
        f"{stats.max_degree}, {stats.num_rounds} rounds in {stats.num_stages} stages"
    )


def _draw_placement(axis, plan: Plan, row: int) -> None:
    """Blocks by rank and slot; a color a segment that spans several blocks, gray for the rest."""
    from matplotlib import colormaps

    shape = plan.shape
    blocks = fragment_blocks(plan, row)
    pieces = np.bincount(blocks.segment)
    long = np.flatnonzero(pieces > 1)
    long = long[np.argsort(-pieces[long], kind="stable")]
    palette = [colormaps["tab20"](i) for i in range(20)]
    color = {int(segment): palette[i % len(palette)] for i, segment in enumerate(long)}
    rank, slot = np.divmod(blocks.block, shape.num_slots)
    axis.barh(
        rank,
        blocks.length,
        left=slot * shape.block_size + blocks.offset,
        height=0.86,
        color=[color.get(int(segment), "0.82") for segment in blocks.segment],
        edgecolor="white",
        linewidth=0.4,
    )
    for edge in range(shape.num_slots + 1):
        axis.axvline(edge * shape.block_size, color="0.6", linewidth=0.5)
    axis.set(
        title=f"placement: {len(long)} segments in several blocks (colors), the rest gray",
        xlabel=f"rows of the plan's layout ({shape.num_slots} slots of {shape.block_size})",
        ylabel="rank",
        ylim=(shape.num_ranks - 0.5, -0.5),
        xlim=(0, shape.plan_rows_per_rank),
    )


def _draw_timeline(axis, plan: Plan, row: int) -> None:
    compute, pulls = timeline(plan, row)
    stages = compute.shape[1]
    for rank in range(plan.shape.num_ranks):
        busy = [(1e3 * a, 1e3 * (b - a)) for a, b in compute[rank]]
        shades = ["tab:blue"] + ["tab:cyan", "tab:olive"] * stages
        axis.broken_barh(busy, (rank - 0.43, 0.56), facecolors=shades[:stages])
        moving = [(1e3 * a, 1e3 * (b - a)) for a, b in pulls[rank]]
        axis.broken_barh(moving, (rank + 0.15, 0.26), facecolors="tab:red")
    axis.set(
        title=f"modelled forward: local (blue), stages, transfers at {LINK_GBPS:.0f} GB/s (red)",
        xlabel=f"milliseconds at {KERNEL_TFLOPS:.0f} TFLOP/s",
        ylim=(plan.shape.num_ranks - 0.5, -0.5),
        xlim=(0, None),
    )


def timeline(plan: Plan, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Models when each rank computes and pulls.

    Args:
      plan: with its config, which prices FLOPs and bytes.
      row: which row of the batch.

    Returns:
      (compute, pulls): float64 seconds [N, 1 + stages, 2] and [N, stages, 2], (begin, end) each;
      stage 0 of compute is local work, pulls[:, i] brings what compute[:, 1 + i] reads.

    Raises:
      ValueError: if the plan has no config.
    """
    if plan.config is None:
        raise ValueError("plan has no config, which prices its FLOPs and bytes")
    config, shape = plan.config, plan.shape
    stages = int(plan.trips.sum())
    flops = 4.0 * config.num_q_heads * config.head_dim * stage_areas(plan, row)[:, : 1 + stages]
    work = flops / (KERNEL_TFLOPS * 1e12)
    arriving = (plan.recv_block[row] >= 0).sum(-1)[:, :stages]
    leaving = (plan.send_slot[row] >= 0).sum(-1)[:, :stages]
    block_seconds = shape.block_size * config.kv_bytes_per_token / (LINK_GBPS * 1e9)
    pull = np.maximum(arriving, leaving) * block_seconds

    compute = np.zeros((shape.num_ranks, 1 + stages, 2))
    pulls = np.zeros((shape.num_ranks, stages, 2))
    compute[:, 0, 1] = work[:, 0]
    for stage in range(stages):
        begin = compute[:, stage, 0]
        if stage:
            begin = np.maximum(begin, pulls[:, stage - 1, 1])
        pulls[:, stage] = np.stack([begin, begin + pull[:, stage]], 1)
        start = np.maximum(compute[:, stage, 1], pulls[:, stage, 1])
        compute[:, 1 + stage] = np.stack([start, start + work[:, 1 + stage]], 1)
    return compute, pulls


def plot_simulation(simulation: Simulation, path) -> None:
    """Draws when each rank of a simulation computes and receives.

    Args:
      simulation: from `fcp_jax.simulate.simulate`.
      path: image file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    course, flows = simulation.course, simulation.flows
    ranks, steps = course.end.shape
    figure, axis = plt.subplots(
        figsize=(14, min(max(0.3 * ranks, 2.2), 12.0) + 1.3), layout="constrained"
    )
    shades = ["tab:blue", *(["tab:cyan", "tab:olive"] * steps)][:steps]
    for rank in range(ranks):
        spans = np.stack([course.begin[rank, :-1], course.end[rank] - course.begin[rank, :-1]], 1)
        axis.broken_barh((1e3 * spans).tolist(), (rank - 0.43, 0.56), facecolors=shades)
        mine = flows.dst == rank
        due = flows.due[mine]
        first, last = np.full(steps + 1, np.inf), np.zeros(steps + 1)
        np.minimum.at(first, due, course.flow_begin[mine])
        np.maximum.at(last, due, course.flow_end[mine])
        used = np.flatnonzero(last > 0)
        bars = 1e3 * np.stack([first[used], (last - first)[used]], 1)
        axis.broken_barh(bars.tolist(), (rank + 0.15, 0.26), facecolors="tab:red")
    axis.set(
        title=f"modelled: local (blue), stages, what arrives (red); {simulation.kernel_share:.0%} "
        "of the kernel's rate",
        xlabel="milliseconds",
        ylabel="rank",
        ylim=(ranks - 0.5, -0.5),
        xlim=(0, 1e3 * simulation.makespan),
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_comparison(plans: dict[str, dict], path) -> None:
    """Draws balance, busiest rank's bytes and rounds of several methods side by side.

    Args:
      plans: fields of `PlanStats` by method.
      path: image file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("compute_imbalance", "compute imbalance (max / mean - 1)", 1.0),
        ("comm_imbalance", "communication imbalance (max / mean - 1)", 1.0),
        ("payload_bytes_max", "KV of the busiest rank, GB a direction", 1e9),
        ("num_rounds", "rounds", 1.0),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(15, 3.6), layout="constrained")
    for axis, (name, title, unit) in zip(axes, panels, strict=True):
        bars = axis.barh(list(plans), [stats[name] / unit for stats in plans.values()])
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.margins(x=0.15)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)
