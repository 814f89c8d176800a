"""Reproduces the FCP paper's figures by simulation, then asks what it left open.

    python examples/topology_experiments.py                   # all, about ten minutes on one core
    python examples/topology_experiments.py --only ladder,traffic --seeds 1

Writes a picture an experiment to docs/images/ and one record a figure to
benchmarks/results/topology.json, where records of experiments not asked for stay. Everything is
modelled (`fcp_jax.simulate`) with kernel rates measured on an H200; nothing is fitted to the
paper's figures. What the paper (arXiv 2605.08524) states is recorded beside. docs/topology.md
tells what came out.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import sys
import time
from typing import Any

import numpy as np

import fcp_jax as fcp
from fcp_jax.simulate import H200, Hardware, of_intensity, simulate
from fcp_jax.stats import KERNEL_TFLOPS
from fcp_jax.topology import Topology, fat_tree, rail_optimized, torus, torus_shape
from fcp_jax.workloads import sample_seqlens

TOKENS, BLOCK = 32768, 4096
GPU_X, GPU_Y = of_intensity(5920), of_intensity(2500)
BASELINES = ("ring", "bytescale", "wlb", "magi")
SCALES = (16, 32, 64, 128, 256)
LADDER = {  # what is switched on, and the paper's forward and backward MFU (Table 2, 128 GPUs)
    "no pipeline": (dict(overlap=False, matched=False, reshuffle="exposed"), 1, 0.29, 0.37),
    "+ pipeline": (dict(matched=False, reshuffle="exposed"), 1, 0.48, 0.46),
    "+ congestion-free": (dict(reshuffle="exposed"), 1, 0.62, 0.59),
    "+ coalescer": (dict(reshuffle="exposed"), 16, 0.70, 0.69),
    "+ hidden reshuffle": (dict(reshuffle="hidden"), 16, 0.75, 0.74),
}
SHARE = "share of the kernel's rate"
ROOT = pathlib.Path(__file__).parent.parent


@functools.lru_cache(maxsize=64)
def plan_of(ranks: int, seed: int, workload: str = "lognormal", **options) -> fcp.Plan:
    """The plan of a batch; exact matchings unless a transport is asked for."""
    seqlens = sample_seqlens(workload, num_ranks=ranks, tokens_per_rank=TOKENS, seed=seed)
    config: dict[str, Any] = {"block_size": BLOCK, "transport": "static"} | options
    return fcp.make_plan(seqlens, fcp.PlanConfig(ranks, TOKENS, **config))


@dataclasses.dataclass
class Lab:
    """What the experiments share."""

    seeds: int
    scales: tuple[int, ...]
    images: pathlib.Path
    records: list[dict] = dataclasses.field(default_factory=list)

    def share(
        self,
        ranks: int,
        topology: Topology | None = None,
        hardware: Hardware = GPU_X,
        *,
        workload: str = "lognormal",
        backward: bool = False,
        plan: dict | None = None,
        figure: str = "kernel_share",
        **options,
    ) -> float:
        """Mean over seeds of a figure of the simulation."""
        plan = plan or {}
        moves = plan.get("method", "fcp") in ("fcp", "magi")
        chosen: dict[str, Any] = {"reshuffle": "hidden" if moves else "none"} | options
        values = [
            getattr(
                simulate(
                    plan_of(ranks, seed, workload, **plan),
                    topology or fat_tree(ranks),
                    hardware,
                    backward=backward,
                    **chosen,
                ),
                figure,
            )
            for seed in range(self.seeds)
        ]
        return float(np.mean(values))

    def record(self, case: str, value: float, unit: str, **more) -> None:
        """Keeps and prints one figure; `paper` is what the paper states."""
        self.records.append({"case": case, "value": value, "unit": unit, **more})
        paper = f"   paper {more['paper']}" if "paper" in more else ""
        print(f"{case:52} {value:8.3f} {unit}{paper}", flush=True)

    def point(self, line: dict, x, value: float, case: str, unit: str = SHARE, **more) -> None:
        """Records a figure that is also drawn, as line[x]."""
        line[x] = value
        self.record(case, value, unit, **more)

    def draw(self, name: str, panels: dict[str, dict[str, dict]], label: str, what: str) -> None:
        """One panel a title; lines of {x: y}, or bars where x is text."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        size = (4.8 * len(panels), 3.9)
        figure, axes = plt.subplots(
            1, len(panels), figsize=size, layout="constrained", squeeze=False
        )
        for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
            bars = isinstance(next(iter(next(iter(lines.values())))), str)
            for i, (line, points) in enumerate(lines.items()):
                if bars:
                    width = 0.8 / len(lines)
                    place = np.arange(len(points)) + (i - (len(lines) - 1) / 2) * width
                    axis.bar(place, list(points.values()), width, label=line)
                    axis.set_xticks(range(len(points)), list(points), rotation=20, ha="right")
                else:
                    axis.plot(list(points), list(points.values()), marker="o", label=line)
                    axis.set_xscale("log", base=2)
                    axis.set_xticks(list(points), [f"{x:g}" for x in points])
            top = max(max(points.values()) for points in lines.values())
            axis.set(title=title, xlabel="" if bars else label, ylabel=what)
            axis.set_ylim(0, top * (1.3 if bars else 1.06))  # bars leave room for the legend
            axis.legend(fontsize=8)
        self.images.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.images / f"topology_{name}.png", dpi=100)
        plt.close(figure)


def scaling(lab: Lab) -> None:
    """(a) Weak scaling by method on both clusters; the paper has FCP ahead by 1.13 to 2.21."""
    panels: dict[str, dict[str, dict]] = {}
    for cluster, hardware in (("GPU-X", GPU_X), ("GPU-Y", GPU_Y)):
        for backward in (False, True):
            way = "backward" if backward else "forward"
            lines = panels[f"{cluster}, {way}"] = {}
            for method in ("fcp", *BASELINES):
                lines[method] = {}
                for ranks in lab.scales:
                    value = lab.share(
                        ranks,
                        hardware=hardware,
                        backward=backward,
                        plan={"method": method},
                        figure="mfu",
                    )
                    case = f"scaling_{cluster}_{way}_{method}_{ranks}"
                    lab.point(lines[method], ranks, value, case, "MFU")
            for ranks in lab.scales:
                best = max(lines[method][ranks] for method in BASELINES)
                gain = lines["fcp"][ranks] / best
                lab.record(f"scaling_{cluster}_{way}_fcp_over_best_{ranks}", gain, "ratio")
    lab.draw("scaling", panels, "ranks", "MFU")


def ladder(lab: Lab) -> None:
    """(b) What each part of FCP adds, as MFU and as a share of the kernel's own rate."""
    ranks = min(128, lab.scales[-1])
    panels: dict[str, dict[str, dict]] = {}
    for backward in (False, True):
        way = "backward" if backward else "forward"
        lines = panels[way] = {"MFU": {}, SHARE: {}, "paper, MFU": {}}
        for name, (options, coalesce, *paper) in LADDER.items():
            run = functools.partial(
                lab.share, ranks, backward=backward, plan={"coalesce": coalesce}, **options
            )
            mfu, share = run(figure="mfu"), run()
            stated = paper[backward]
            for line, value in zip(lines.values(), (mfu, share, stated), strict=True):
                line[name] = value
            lab.record(f"ladder_{way}_{name}", mfu, "MFU", paper=stated, kernel_share=share)
    lab.draw("ladder", panels, "", f"{ranks} ranks")


def imbalance(lab: Lab) -> None:
    """(c) Imbalance of computation and communication by method."""
    stated = {("fcp", 0): 0.05, ("fcp", 1): 0.05, ("bytescale", 0): 0.70, ("magi", 1): 0.17}
    panels: dict[str, dict[str, dict]] = {}
    for i, name in enumerate(("compute_imbalance", "comm_imbalance")):
        lines = panels[name] = {}
        for method in ("fcp", *BASELINES):
            lines[method] = {}
            for ranks in lab.scales:
                plans = [plan_of(ranks, seed, method=method) for seed in range(lab.seeds)]
                values = [getattr(plan.stats, name) for plan in plans]
                paper = {"paper": stated[method, i]} if (method, i) in stated else {}
                case = f"imbalance_{name}_{method}_{ranks}"
                mean = float(np.mean(values))
                lab.point(lines[method], ranks, mean, case, "max/mean - 1", **paper)
    lab.draw("imbalance", panels, "ranks", "max / mean - 1")


def block_size(lab: Lab) -> None:
    """(d) Block size, as asked for; with more than 8 ranks the planner halves down to 2048."""
    ranks = min(64, lab.scales[-1])
    lines: dict[str, dict] = {"forward": {}, "backward": {}}
    for size in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        coalesce = max(16 * BLOCK // size, 1)
        used = plan_of(ranks, 0, block_size=size, coalesce=coalesce).shape.block_size
        for way, line in lines.items():
            value = lab.share(
                ranks, backward=way == "backward", plan=dict(block_size=size, coalesce=coalesce)
            )
            lab.point(line, used, value, f"block_size_{way}_{size}", used=used)
    lab.draw("block_size", {f"{ranks} ranks": lines}, "rows a block", SHARE)


def workloads(lab: Lab) -> None:
    """(e) The other distributions."""
    panels: dict[str, dict[str, dict]] = {}
    for workload in ("weak_tail", "bimodal"):
        lines = panels[workload] = {}
        for method in ("fcp", *BASELINES):
            lines[method] = {}
            for ranks in lab.scales:
                value = lab.share(ranks, workload=workload, plan={"method": method})
                case = f"workload_{workload}_forward_{method}_{ranks}"
                lab.point(lines[method], ranks, value, case)
    lab.draw("workloads", panels, "ranks", f"{SHARE}, forward")


def traffic(lab: Lab) -> None:
    """(f) What naive context parallelism moves for short segments, and what hides one block."""
    lengths = np.concatenate(
        [
            sample_seqlens("lognormal", num_ranks=128, tokens_per_rank=TOKENS, seed=seed)
            for seed in range(max(lab.seeds, 3))
        ]
    )
    short = float(lengths[lengths < 4096].sum() / lengths.sum())
    lab.record("traffic_of_segments_below_4096", short, "fraction of bytes", paper="about half")
    config = fcp.PlanConfig(8, TOKENS, BLOCK)
    seconds = 4.0 * config.num_q_heads * config.head_dim * BLOCK**2 / (KERNEL_TFLOPS * 1e12)
    hides = BLOCK * config.kv_bytes_per_token / seconds / 1e9
    lab.record("bandwidth_that_hides_a_block", hides, "GB/s", paper=22)


def tori(lab: Lab) -> None:
    """How far FCP falls on a torus, and what compact windows win back."""
    panels: dict[str, dict[str, dict]] = {}
    for dims in (2, 3):
        lines = panels[f"{dims}D torus"] = {
            "FCP": {}, "FCP, windows in boxes": {}, "FCP, fat tree": {}, "ring": {}
        }  # fmt: skip
        for ranks in lab.scales:
            network = torus(torus_shape(ranks, dims))
            ring = {"method": "ring"}
            values = (
                lab.share(ranks, network),
                lab.share(ranks, boxes(ranks, dims)),
                lab.share(ranks),
                lab.share(ranks, network, plan=ring),
            )
            for (line, points), value in zip(lines.items(), values, strict=True):
                case = f"torus{dims}d_{line.replace(',', '').replace(' ', '_')}_{ranks}"
                lab.point(points, ranks, value, case)
    lab.draw("torus", panels, "ranks", f"{SHARE}, forward")


def boxes(ranks: int, dims: int) -> Topology:
    """A torus whose ranks are numbered so that aligned runs of 2**k are boxes (Morton order)."""
    shape = torus_shape(ranks, dims)
    plain = torus(shape)
    place = np.array(np.unravel_index(np.arange(ranks), shape))
    key = np.zeros(ranks, np.int64)
    for bit in range(16):
        for d in range(dims):
            key |= (place[d] >> bit & 1) << (bit * dims + d)
    order = np.argsort(key, kind="stable")
    return dataclasses.replace(
        plain,
        name=f"{plain.name} in boxes",
        route=lambda src, dst: plain.route(order[src], order[dst]),
    )


def transports(lab: Lab) -> None:
    """Rounds as data against exact matchings; "ragged" has the rounds of "static"."""
    panels: dict[str, dict[str, dict]] = {}
    for name, hardware in (("GPU-X", GPU_X), ("H200", H200)):
        for backward in (False, True):
            way = "backward" if backward else "forward"
            lines = panels[f"{name}, {way}"] = {}
            for transport in ("static", "ragged", "xor"):
                lines[transport] = {}
                for ranks in lab.scales:
                    value = lab.share(
                        ranks,
                        hardware=hardware,
                        backward=backward,
                        plan={"transport": transport},
                    )
                    case = f"transport_{name}_{way}_{transport}_{ranks}"
                    lab.point(lines[transport], ranks, value, case)
    lab.draw("transports", panels, "ranks", SHARE)


def layouts(lab: Lab) -> None:
    """Reshuffling every attention, exposed or hidden, against once for the whole model."""
    lines: dict[str, dict] = {}
    for reshuffle in ("exposed", "hidden", "none"):
        name = {"none": "model-level layout"}.get(reshuffle, f"every attention, {reshuffle}")
        lines[name] = {}
        for ranks in lab.scales:
            value = lab.share(ranks, hardware=H200, reshuffle=reshuffle)
            lab.point(lines[name], ranks, value, f"layout_{reshuffle}_{ranks}")
    lab.draw("layouts", {"H200, forward": lines}, "ranks", SHARE)


def large(lab: Lab) -> None:
    """1024 ranks, and planning for 4096, whose simulation takes longer than 20 minutes."""
    plans = {}
    for ranks in (1024, 4096):
        plan = plans[ranks] = plan_of(ranks, 0, transport="ragged")
        assert plan.stats is not None
        lab.record(
            f"large_planning_{ranks}",
            plan.stats.planning_seconds,
            "s",
            compute_imbalance=plan.stats.compute_imbalance,
            num_transfers=plan.stats.num_transfers,
            max_degree=plan.stats.max_degree,
        )
    for name, hardware in (("GPU-X", GPU_X), ("H200", H200)):
        started = time.perf_counter()
        done = simulate(plans[1024], fat_tree(1024), hardware, reshuffle="hidden")
        seconds = time.perf_counter() - started
        case = f"large_{name}_1024"
        lab.record(case, done.kernel_share, SHARE, simulation_seconds=seconds)


def oversubscription(lab: Lab) -> None:
    """Thinner trees, and rails."""
    ranks = lab.scales[-1]
    lines: dict[str, dict] = {}
    for method in ("fcp", "ring", "magi"):
        lines[method] = {}
        for thin in (1, 2, 4, 8):
            network = fat_tree(ranks, oversubscription=thin)
            value = lab.share(ranks, network, H200, plan={"method": method})
            case = f"oversubscribed_{method}_{thin}"
            lab.point(lines[method], thin, value, case, num_ranks=ranks)
        rails = lab.share(ranks, rail_optimized(ranks), H200, plan={"method": method})
        lab.record(f"rails_{method}", rails, SHARE, num_ranks=ranks)
    title = f"{ranks} ranks, H200, forward"
    lab.draw("oversubscription", {title: lines}, "oversubscription", SHARE)


def slow(lab: Lab) -> None:
    """One rank, or its links, at a part of the speed of the others."""
    ranks = min(64, lab.scales[-1])
    lines: dict[str, dict] = {}
    for factor in (1.0, 0.9, 0.75, 0.5):
        speeds = np.ones(ranks)
        speeds[ranks // 3] = factor
        known = {"rank_speeds": tuple(speeds.tolist())}
        network = fat_tree(ranks).slowed(ranks // 3, factor)
        values = {
            "slow rank, unknown to the planner": lab.share(ranks, rank_speeds=speeds),
            "slow rank, known": lab.share(ranks, plan=known),
            "slow links, H200": lab.share(ranks, network, H200),
        }
        for name, value in values.items():
            case = f"{name.replace(',', '').replace(' ', '_')}_{factor:g}"
            lab.point(lines.setdefault(name, {}), f"{factor:g}", value, case)
    lab.draw("slow", {f"{ranks} ranks": lines}, "", f"{SHARE}, forward")


def deferral(lab: Lab) -> None:
    """If keys and values stayed a few stages longer, and their work could wait."""
    panels: dict[str, dict[str, dict]] = {}
    for transport in ("static", "xor"):
        lines = panels[transport] = {}
        for defer in (None, 1, 2, 4):
            name = "as planned" if defer is None else f"{defer} stages longer"
            lines[name] = {}
            for ranks in lab.scales:
                value = lab.share(ranks, plan={"transport": transport}, defer=defer)
                case = f"deferral_{transport}_{defer or 0}_{ranks}"
                lab.point(lines[name], ranks, value, case)
    lab.draw("deferral", panels, "ranks", f"{SHARE}, forward")


EXPERIMENTS = (
    scaling, ladder, imbalance, block_size, workloads, traffic, tori, transports, layouts, large,
    oversubscription, slow, deferral,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Runs the experiments that are asked for."""
    names = [experiment.__name__ for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(names), help="names with commas between")
    parser.add_argument("--seeds", type=int, default=2, help="batches that figures are means of")
    parser.add_argument("--scales", default=",".join(map(str, SCALES)), help="numbers of ranks")
    parser.add_argument("--images", type=pathlib.Path, default=ROOT / "docs" / "images")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "topology.json"
    )
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--only must name some of {', '.join(names)}, got {', '.join(unknown)}")
    lab = Lab(options.seeds, tuple(map(int, options.scales.split(","))), options.images)
    for experiment in EXPERIMENTS:
        if experiment.__name__ in chosen:
            print(f"\n{(experiment.__doc__ or '').splitlines()[0]}")
            before = len(lab.records)
            experiment(lab)
            for record in lab.records[before:]:
                record["experiment"] = experiment.__name__
    stamp = {
        "benchmark": "topology",
        "kind": "modelled",
        "seeds": options.seeds,
        "command": "python examples/topology_experiments.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }
    kept = json.loads(options.out.read_text()) if options.out.exists() else []
    records = [record for record in kept if record["experiment"] not in chosen]
    records += [record | stamp for record in lab.records]
    text = ",\n".join(map(json.dumps, records))
    options.out.write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
