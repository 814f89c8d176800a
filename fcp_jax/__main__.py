"""Command line: `python -m fcp_jax plan --workload lognormal --num-ranks 64 --json`."""

import argparse
import dataclasses
import json
import sys

import numpy as np

from fcp_jax.config import METHODS, TRANSPORTS, PlanConfig
from fcp_jax.planner import make_plan
from fcp_jax.workloads import sample_seqlens


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fcp_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="plan one batch and say what it costs")
    _add_batch_arguments(plan)
    plan.add_argument("--num-ranks", type=int, required=True)
    plan.add_argument("--method", choices=METHODS, default="fcp")
    plan.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    plan.add_argument("--out", metavar="PLAN.npz", help="save the plan")
    plan.add_argument("--plot", metavar="PLAN.png", help="draw placement and stage timeline")
    plan.set_defaults(run=_plan)
    compare = commands.add_parser("compare", help="plan one batch with several methods")
    _add_batch_arguments(compare)
    compare.add_argument("--num-ranks", type=int, required=True)
    compare.add_argument("--methods", default="all", help="names with commas between, or all")
    compare.add_argument("--json", action="store_true", help="print one JSON object only")
    compare.add_argument("--plot", metavar="COMPARE.png", help="draw balance, bytes and rounds")
    compare.set_defaults(run=_compare)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {options.command}: {error}", file=sys.stderr)
        return 2


def _add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        required=True,
        help="lognormal, weak_tail, bimodal, uniform, or a file: a length a line, or a histogram",
    )
    parser.add_argument("--tokens-per-rank", type=int, default=32768)
    parser.add_argument("--block-size", type=int, default=4096)
    parser.add_argument("--coalesce", type=int, default=16)
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    parser.add_argument("--full", action="store_true", help="full instead of causal attention")
    parser.add_argument("--seed", type=int, default=0)


def _config(options: argparse.Namespace, num_ranks: int, method: str) -> PlanConfig:
    return PlanConfig(
        num_ranks=num_ranks,
        tokens_per_rank=options.tokens_per_rank,
        block_size=options.block_size,
        causal=not options.full,
        method=method,
        transport=options.transport,
        coalesce=options.coalesce,
    )


def _plan(options: argparse.Namespace) -> int:
    config = _config(options, options.num_ranks, options.method)
    seqlens = _seqlens(options)
    plan = make_plan(seqlens, config)
    if options.out:
        plan.save(options.out)
    if options.plot:
        from fcp_jax.plotting import plot_plan

        plot_plan(plan, options.plot)
    assert plan.stats is not None
    figures = {
        **dataclasses.asdict(plan.stats),
        **_batch_figures(options, seqlens),
    }
    print(json.dumps(figures) if options.json else format_figures(figures))
    return 0


def _compare(options: argparse.Namespace) -> int:
    methods = METHODS if options.methods == "all" else tuple(options.methods.split(","))
    seqlens = _seqlens(options)
    plans = {}
    for method in methods:
        plan = make_plan(seqlens, _config(options, options.num_ranks, method))
        assert plan.stats is not None
        plans[method] = dataclasses.asdict(plan.stats)
    if options.plot:
        from fcp_jax.plotting import plot_comparison

        plot_comparison(plans, options.plot)
    figures = {**_batch_figures(options, seqlens), "methods": plans}
    print(json.dumps(figures) if options.json else format_comparison(plans))
    return 0


def _seqlens(options: argparse.Namespace) -> np.ndarray:
    return sample_seqlens(
        options.workload,
        num_ranks=options.num_ranks,
        tokens_per_rank=options.tokens_per_rank,
        seed=options.seed,
    )


def _batch_figures(options: argparse.Namespace, seqlens: np.ndarray) -> dict[str, object]:
    return {
        "workload": options.workload,
        "seed": options.seed,
        "num_segments": len(seqlens),
        "num_tokens": int(seqlens.sum()),
        "longest_segment": int(seqlens.max(initial=0)),
    }


COMPARED = {
    "compute_imbalance": "compute imbalance",
    "comm_imbalance": "comm imbalance",
    "bandwidth_needed": "GB/s needed",
    "payload_bytes_max": "busiest rank, bytes",
    "num_rounds": "rounds",
    "max_degree": "max degree",
    "memory_tokens_max": "rows a rank",
    "planning_seconds": "seconds",
}
"""Figures of a comparison, with their headings."""


def format_comparison(plans: dict[str, dict]) -> str:
    """Returns a table with a line a method."""
    lines = [["method", *COMPARED.values()]]
    lines += [
        [method, *(f"{stats[name]:.4g}" for name in COMPARED)] for method, stats in plans.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def format_figures(figures: dict[str, object]) -> str:
    """Returns a table of names and values, one a line."""
    width = max(map(len, figures))
    return "\n".join(
        f"{name:{width}}  {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in figures.items()
    )


if __name__ == "__main__":
    sys.exit(main())
