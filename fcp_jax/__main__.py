"""Command line: `python -m fcp_jax plan --workload lognormal --num-ranks 64 --json`."""

import argparse
import dataclasses
import json
import sys

import numpy as np

from fcp_jax.config import METHODS, TRANSPORTS, PlanConfig
from fcp_jax.planner import make_plan
from fcp_jax.simulate import RESHUFFLES
from fcp_jax.topology import TOPOLOGIES, fat_tree
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
    simulation = commands.add_parser("simulate", help="what methods take on a network, modelled")
    _add_batch_arguments(simulation)
    simulation.add_argument("--num-ranks", default="64", help="numbers with commas between")
    simulation.add_argument("--methods", default="all", help="names with commas between, or all")
    simulation.add_argument("--topology", choices=tuple(TOPOLOGIES), default="fat_tree")
    simulation.add_argument("--oversubscription", type=float, default=1.0, help="of a fat tree")
    simulation.add_argument(
        "--flops-per-byte", type=float, help="peak over network bandwidth; else that of an H200"
    )
    simulation.add_argument("--reshuffle", choices=RESHUFFLES, default="hidden")
    simulation.add_argument("--json", action="store_true", help="print one JSON object only")
    simulation.add_argument("--plot", metavar="TIMELINE.png", help="draw the last forward")
    simulation.add_argument("--trace", metavar="TRACE.json", help="the same for Perfetto")
    simulation.set_defaults(run=_simulate)
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
    seqlens = _seqlens(options, options.num_ranks)
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
    seqlens = _seqlens(options, options.num_ranks)
    plans = {}
    for method in _methods(options):
        plan = make_plan(seqlens, _config(options, options.num_ranks, method))
        assert plan.stats is not None
        plans[method] = dataclasses.asdict(plan.stats)
    if options.plot:
        from fcp_jax.plotting import plot_comparison

        plot_comparison(plans, options.plot)
    figures = {**_batch_figures(options, seqlens), "methods": plans}
    print(json.dumps(figures) if options.json else format_comparison(plans))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from fcp_jax.simulate import H200, of_intensity, simulate, trace

    hardware = of_intensity(options.flops_per_byte) if options.flops_per_byte else H200
    records, forward = [], None
    for ranks in map(int, options.num_ranks.split(",")):
        topology = TOPOLOGIES[options.topology](ranks)
        if options.oversubscription != 1:
            if options.topology != "fat_tree":
                raise ValueError(f"oversubscription is of a fat_tree, got {options.topology}")
            topology = fat_tree(ranks, oversubscription=options.oversubscription)
        seqlens = _seqlens(options, ranks)
        for method in _methods(options):
            plan = make_plan(seqlens, _config(options, ranks, method))
            moves = "none" if method in ("ring", "all_gather", "wlb") else options.reshuffle
            forward = simulate(plan, topology, hardware, reshuffle=moves)
            backward = simulate(plan, topology, hardware, backward=True, reshuffle=moves)
            records.append(
                {
                    "method": method,
                    "num_ranks": ranks,
                    "transport": plan.shape.transport,
                    "topology": topology.name,
                    "hardware": hardware.name,
                    "mfu_forward": forward.mfu,
                    "mfu_backward": backward.mfu,
                    "kernel_share_forward": forward.kernel_share,
                    "kernel_share_backward": backward.kernel_share,
                    "seconds_forward": forward.makespan,
                    "seconds_backward": backward.makespan,
                    "exposed_forward": float(forward.exposed.mean()),
                    "busiest_link": float(forward.link_use.max(initial=0.0)),
                }
            )
    if forward is None:
        raise ValueError("methods and num_ranks must name at least one each")
    if options.plot:
        from fcp_jax.plotting import plot_simulation

        plot_simulation(forward, options.plot)
    if options.trace:
        with open(options.trace, "w") as file:
            json.dump(trace(forward), file)
    figures = {"workload": options.workload, "seed": options.seed, "simulations": records}
    print(json.dumps(figures) if options.json else format_rows(records))
    return 0


def _methods(options: argparse.Namespace) -> tuple[str, ...]:
    return METHODS if options.methods == "all" else tuple(options.methods.split(","))


def _seqlens(options: argparse.Namespace, num_ranks: int) -> np.ndarray:
    return sample_seqlens(
        options.workload,
        num_ranks=num_ranks,
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
    return format_rows(
        [
            {"method": method, **{title: stats[name] for name, title in COMPARED.items()}}
            for method, stats in plans.items()
        ]
    )


def format_rows(rows: list[dict]) -> str:
    """Returns a table of rows that have the same names."""
    lines = [list(rows[0])]
    lines += [
        [f"{x:.4g}" if isinstance(x, float | int) else x for x in row.values()] for row in rows
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
