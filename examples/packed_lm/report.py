"""What a run leaves behind: a table of a plan, pictures, metrics."""

import dataclasses
import importlib.util
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fcp_jax import Plan
from fcp_jax.plotting import plot_plan
from packed_lm.model import ModelConfig
from packed_lm.training import StepRecord, Trainer


def progress_line(record: StepRecord, steps: int) -> str:
    """Formats one step."""
    return (
        f"step {record.step + 1:3d}/{steps}  loss {record.loss:.4f}  "
        f"grad norm {record.grad_norm:7.3f}  {record.tokens_per_second:8,.0f} tokens/s  "
        f"step {record.seconds:6.2f} s  "
        f"plan {1e3 * record.plan_seconds:5.1f} ms, waited for {1e3 * record.wait_seconds:4.1f}"
        + ("  (compiled)" if record.compiled else "")
    )


def plan_table(plan: Plan) -> str:
    """Formats the figures of a plan, the worst row's where rows differ."""
    stats = plan.stats
    assert stats is not None
    lines = {
        "rows x ranks": f"{plan.shape.num_rows} x {stats.num_ranks}",
        "blocks": f"{stats.num_blocks} of {stats.block_size} tokens a row",
        "transport": f"{stats.transport} ({stats.transport_reason})",
        "compute imbalance": f"{stats.compute_imbalance:.1%}",
        "communication imbalance": f"{stats.comm_imbalance:.1%}",
        "transfers": f"{stats.num_transfers}",
        "max degree (no schedule has fewer rounds)": f"{stats.max_degree}",
        "rounds in stages": f"{stats.num_rounds} in {stats.num_stages}",
        "KV bytes, busiest rank": f"{stats.payload_bytes_max:,}",
        "KV bytes with padding": f"{stats.wire_bytes_max:,}",
        "dispatch bytes, busiest rank": f"{stats.reshuffle_bytes_max:,}",
        "planning": f"{1e3 * stats.planning_seconds:.1f} ms",
    }
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in lines.items())


def dispatch_bytes(plan: Plan, model: ModelConfig) -> dict[str, int]:
    """Counts what the busiest rank sends or receives for each layout in a step, by layout."""
    assert plan.stats is not None and plan.config is not None
    heads = plan.config.num_q_heads + 2 * plan.config.num_kv_heads
    token = plan.config.kv_bytes_per_token * heads // (2 * plan.config.num_kv_heads)
    tokens = plan.stats.reshuffle_bytes_max // token
    layouts = (dataclasses.replace(model, layout=layout) for layout in ("caller", "plan"))
    return {each.layout: tokens * each.dispatch_bytes for each in layouts}


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the largest relative difference of two loss curves."""
    a, b = np.array(losses), np.array(reference)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def write(directory: Path, trainer: Trainer, runs: dict[str, list[StepRecord]]) -> None:
    """Prints a summary and leaves `metrics.json`, `plan.png` and `loss.png`.

    Args:
      directory: where.
      trainer: of the first run, after it.
      runs: the steps of each run by name; others than the first are compared with it.
    """
    (_, records), *others = runs.items()
    if not records:
        print(f"nothing to do: {trainer.step} steps are done")
        return
    steps = [record.step for record in records]
    shown = max(steps, key=lambda step: sum(map(len, trainer.corpus.batch(step).segments)))
    _, plan = trainer.plan(shown)
    assert plan.stats is not None
    moved = dispatch_bytes(plan, trainer.model.config)
    losses = [record.loss for record in records]
    steady = [record for record in records if not record.compiled] or records
    metrics = {
        "parameters": trainer.num_parameters,
        "tokens_per_step": statistics.mean(record.num_tokens for record in records),
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "loss_fall": 1.0 - losses[-1] / losses[0],
        "compilations": trainer.num_traces,
        "table_growths": trainer.buckets.num_growths,
        "fewest_ranks_of_widest_segment": min(record.widest_segment for record in records),
        "tokens_per_second": statistics.median(record.tokens_per_second for record in steady),
        # The first plan is made while there is no step yet to hide it.
        "longest_wait_for_a_plan": max(record.wait_seconds for record in records[1:] or records),
        "plan_seconds": statistics.median(record.plan_seconds for record in records),
        "largest_difference": {
            other: largest_difference([record.loss for record in compared], losses)
            for other, compared in others
        },
        "layout": trainer.model.config.layout,
        "dispatch_bytes_of_layout": moved,
        "plan_of_step": shown,
        "plan": dataclasses.asdict(plan.stats),
        "runs": {run: [dataclasses.asdict(r) for r in rows] for run, rows in runs.items()},
    }
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"\nplan of step {shown + 1}, the batch with the most segments:\n{plan_table(plan)}\n")
    print(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} ({metrics['loss_fall']:.1%} lower), "
        f"{metrics['tokens_per_second']:,.0f} tokens/s, step compiled "
        f"{trainer.num_traces} time(s), widest segment of every batch on at least "
        f"{metrics['fewest_ranks_of_widest_segment']} ranks; from the second step on, none waited "
        f"for its plan longer than {1e3 * metrics['longest_wait_for_a_plan']:.1f} ms"
    )
    print(
        f"layout {trainer.model.config.layout!r}; to change it and back, the busiest rank moves "
        f"{moved['caller']:,} bytes in a step of layout 'caller', {moved['plan']:,} of 'plan'"
    )
    for other, compared in others:
        print(
            f"{other}: final loss {compared[-1].loss:.6f} against {losses[-1]:.6f}, largest "
            f"relative difference of any step {metrics['largest_difference'][other]:.1e}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed (extra viz)")
        return
    row = int(np.argmax((plan.fragment_length > 0).sum(axis=1)))
    plot_plan(plan, directory / "plan.png", row=row)
    draw_losses({run: [r.loss for r in rows] for run, rows in runs.items()}, directory / "loss.png")
    print(f"wrote {directory}/metrics.json, plan.png, loss.png")


def draw_losses(curves: dict[str, Sequence[float]], path: Path) -> None:
    """Draws loss curves; below, how far others are from the first (limit of the demo: 1e-4)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    (name, base), *others = curves.items()
    steps = np.arange(1, len(base) + 1)
    figure, axes = plt.subplots(
        1 + bool(others),
        1,
        squeeze=False,
        figsize=(7, 5.5),
        height_ratios=(3, 1)[: 1 + bool(others)],
        sharex=True,
        layout="constrained",
    )
    top, bottom = axes[0, 0], axes[-1, 0]
    top.plot(steps, base, color="tab:blue", linewidth=5, alpha=0.45, label=name)
    for other, losses in others:
        top.plot(steps, losses, color="tab:red", linewidth=1.2, label=other)
        difference = np.abs(np.array(losses) - base) / np.abs(base)
        bottom.semilogy(steps, np.maximum(difference, 1e-9), ".-", color="tab:red")
        bottom.axhline(1e-4, color="0.5", linestyle="--", linewidth=1)
        bottom.set(ylabel="relative difference\n(0 drawn as 1e-9)", ylim=(5e-10, 1e-3))
    bottom.set(xlabel="step")
    top.set(ylabel="loss, nats a byte", title="Next-byte loss on packed text")
    top.grid(alpha=0.3)
    top.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
