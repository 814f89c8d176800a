"""Measures the planner: balance, rounds, traffic and time over workloads, sizes and seeds.

    python -m benchmarks.planner --seeds 50            # writes benchmarks/results/planner.json
    python -m benchmarks.planner --seeds 3 --num-ranks 16,64 --out /tmp/planner.json

Runs on one core and needs numpy and scipy only. Every figure but the times is deterministic.
"""

import argparse
import datetime
import heapq
import json
import pathlib
import platform
import statistics
import sys
import time

import numpy as np
import scipy

import fcp_jax as fcp
from fcp_jax.edge_coloring import color_edges
from fcp_jax.stats import seconds_per_pair
from fcp_jax.workloads import WORKLOADS, sample_seqlens

TOKENS, BLOCK = 32768, 4096
RESULTS = pathlib.Path(__file__).parent / "results" / "planner.json"


def main() -> None:
    """Runs the sweep and the planning time curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--num-ranks", default="16,32,64,128,256")
    parser.add_argument("--time-ranks", default="16,32,64,128,256,512,1024")
    parser.add_argument("--odd-ranks", default="3,6,12,24,96")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    records = []
    for workload in WORKLOADS:
        for ranks in _integers(options.num_ranks):
            records += sweep(workload, ranks, options.seeds)
    for ranks in _integers(options.odd_ranks):
        records += sweep("lognormal", ranks, min(options.seeds, 10))
    for ranks in _integers(options.time_ranks):
        records.append(planning_time(ranks))
    records.append(coloring_time())
    command = "python -m benchmarks.planner " + " ".join(sys.argv[1:])
    common = {
        "benchmark": "planner",
        "device": f"{platform.machine()} CPU, one core",
        "versions": {"numpy": np.__version__, "scipy": scipy.__version__},
        "command": command.strip(),
        "date": datetime.date.today().isoformat(),
    }
    text = ",\n".join(json.dumps({**record, **common}) for record in records)
    options.out.write_text(f"[\n{text}\n]\n")


def sweep(workload: str, ranks: int, seeds: int) -> list[dict]:
    """Plans `seeds` batches; returns one record a figure and prints a line."""
    config = fcp.PlanConfig(ranks, TOKENS, BLOCK)
    stats, lpt, fine_lpt, longest, alone, stays = [], [], [], [], [], []
    for seed in range(seeds):
        seqlens = sample_seqlens(workload, num_ranks=ranks, tokens_per_rank=TOKENS, seed=seed)
        plan = fcp.make_plan(seqlens, config)
        if seed == 0:
            fcp.validate_plan(plan)
        stats.append(plan.stats)
        lpt.append(plain_lpt_tokens(seqlens, ranks, BLOCK))
        fine_lpt.append(plain_lpt_tokens(seqlens, ranks, plan.shape.block_size))
        longest.append(int(seqlens.max()))
        alone.append(bandwidth_of_longest(seqlens, config))
        stays.append(tokens_that_stay(plan) / int(seqlens.sum()))
    sent = np.array([s.num_transfers * s.block_size for s in stats])
    degree = np.array([max(s.max_degree, 1) for s in stats])
    busy = [i for i, s in enumerate(stats) if s.bandwidth_needed > 10]
    uneven = [i for i in busy if stats[i].comm_imbalance > 0.05]
    # A rank with a piece of the end of a segment pulls nearly all of it; with a zigzag pair, what
    # it sends comes to half as much again. If that alone is above the mean, no placement is even.
    dominated = [i for i in uneven if 1.5 * longest[i] > 1.05 * 2 * sent[i] / ranks]
    figures = {
        "compute_imbalance_max": (max(s.compute_imbalance for s in stats), "max/mean - 1"),
        "comm_imbalance_mean": (
            statistics.mean(s.comm_imbalance for s in stats),
            "max/mean - 1",
        ),
        "comm_imbalance_within_5_percent": (
            (len(busy) - len(uneven)) / len(busy) if busy else 1.0,
            "fraction of plans above 10 GB/s",
        ),
        "uneven_because_one_segment_dominates": (
            len(dominated) / len(uneven) if uneven else 0.0,
            "fraction of plans above 10 GB/s and 5%",
        ),
        "bandwidth_needed_max": (max(s.bandwidth_needed for s in stats), "GB/s"),
        "bandwidth_needed_mean": (statistics.mean(s.bandwidth_needed for s in stats), "GB/s"),
        "bandwidth_above_25": (sum(s.bandwidth_needed > 25 for s in stats), "plans"),
        "bandwidth_above_25_but_not_longest_segment_alone": (
            sum(s.bandwidth_needed > 25 >= one for s, one in zip(stats, alone, strict=True)),
            "plans",
        ),
        "rounds_over_max_degree": (
            float(np.mean([s.num_rounds for s in stats] / degree)),
            "mean ratio",
        ),
        "max_degree_mean": (float(degree.mean()), "blocks"),
        "num_rounds_mean": (statistics.mean(s.num_rounds for s in stats), "rounds"),
        "tokens_without_dispatch": (statistics.mean(stays), "fraction"),
        "intra_node_bytes": (
            sum(s.intra_node_bytes for s in stats)
            / max(sum(s.intra_node_bytes + s.inter_node_bytes for s in stats), 1),
            "fraction",
        ),
        "memory_over_tokens_per_rank": (stats[0].memory_tokens_max / TOKENS, "ratio"),
    }
    name = f"{workload}_{ranks}"
    records = [
        {"case": f"{name}_{figure}", "value": float(value), "unit": unit, "kind": "measured"}
        for figure, (value, unit) in figures.items()
    ]
    if sum(lpt):
        ring = 2 * ranks * (ranks - 1) * TOKENS // 2
        references = {
            "plain LPT": sum(lpt),
            "plain LPT of the same blocks": sum(fine_lpt),
            "ring": ring * seeds,  # all-gather moves the same
        }
        for reference, tokens in references.items():
            records.append(
                {
                    "case": f"{name}_bytes_against_{reference.replace(' ', '_')}",
                    "value": float(sent.sum()) / seeds * config.kv_bytes_per_token,
                    "unit": "bytes a batch",
                    "reference": reference,
                    "reference_value": tokens / seeds * config.kv_bytes_per_token,
                    "ratio": tokens / float(sent.sum()) if sent.sum() else 1.0,
                    "kind": "measured",
                }
            )
    short = {key: round(float(value), 3) for key, (value, _) in figures.items()}
    ratios = [sent.sum() / max(sum(tokens), 1) for tokens in (lpt, fine_lpt)]
    print(name, short, "bytes/LPT, coarse and same blocks", np.round(ratios, 2), flush=True)
    return records


def bandwidth_of_longest(seqlens: np.ndarray, config: fcp.PlanConfig) -> float:
    """Returns the GB/s of a rank that pulls all of the longest segment in a fair share's time.

    Whoever computes the segment's last row does, less its own rows, wherever blocks lie.
    """
    pairs = float((seqlens * (seqlens + 1) // 2).sum()) / config.num_ranks
    seconds = pairs * seconds_per_pair(config)
    return int(seqlens.max()) * config.kv_bytes_per_token / seconds / 1e9


def tokens_that_stay(plan: fcp.Plan) -> int:
    """Counts tokens whose rank is the same in the caller's layout and the plan's."""
    rank = plan.fragment_row[0] // plan.shape.plan_rows_per_rank
    begin, end = plan.fragment_start[0], plan.fragment_start[0] + plan.fragment_length[0]
    own = np.minimum(end, (rank + 1) * TOKENS) - np.maximum(begin, rank * TOKENS)
    return int(own.clip(0).sum())


def plain_lpt_tokens(seqlens: np.ndarray, ranks: int, block_size: int) -> int:
    """Returns the tokens whose keys and values travel under plain LPT over zigzag pairs.

    Full blocks i and n-1-i of a segment go to the rank with the least work, costliest pair first;
    remainders of segments are single units. Slots are not limited, which is to its advantage.
    """
    units = []
    for segment, length in enumerate(seqlens.tolist()):
        full, rest = divmod(length, block_size)
        pair_cost = block_size * (full - 1) * block_size + block_size * (block_size + 1)
        units += [(pair_cost, segment, i, full - 1 - i) for i in range(full // 2)]
        if full % 2:
            units.append((pair_cost // 2, segment, full // 2, full // 2))
        if rest:
            units.append((rest * full * block_size + rest * (rest + 1) // 2, segment, full, full))
    units.sort(key=lambda unit: -unit[0])
    heap = [(0, rank) for rank in range(ranks)]
    owned: dict[tuple[int, int], set[int]] = {}
    for cost, segment, low, high in units:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + cost, rank))
        owned.setdefault((segment, rank), set()).update((low, high))
    tokens = 0
    for (segment, _), blocks in owned.items():
        highest = max(blocks)
        pulled = highest + 1 - len(blocks)
        assert highest * block_size <= seqlens[segment]
        tokens += pulled * block_size
    return tokens


def planning_time(ranks: int) -> dict:
    """Times planning, everything included; median of 5."""
    seqlens = sample_seqlens("lognormal", num_ranks=ranks, tokens_per_rank=TOKENS, seed=0)
    config = fcp.PlanConfig(ranks, TOKENS, BLOCK)
    stats = [fcp.make_plan(seqlens, config).stats for _ in range(5)]
    seconds = [figures.planning_seconds for figures in stats if figures]
    print(ranks, "planning seconds", [round(x, 4) for x in seconds], flush=True)
    return {
        "case": f"planning_seconds_{ranks}",
        "value": statistics.median(seconds),
        "unit": "s",
        "kind": "measured",
    }


def coloring_time(ranks: int = 256, degree: int = 1112) -> dict:
    """Times `color_edges` on the union of random permutations; median of 5."""
    rng = np.random.default_rng(0)
    src = np.tile(np.arange(ranks), degree)
    dst = np.concatenate([rng.permutation(ranks) for _ in range(degree)])
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        color = color_edges(src, dst, ranks)
        seconds.append(time.perf_counter() - started)
    assert int(color.max()) == degree - 1
    print(ranks, degree, "coloring seconds", [round(x, 4) for x in seconds], flush=True)
    return {
        "case": f"edge_coloring_seconds_{ranks}_degree_{degree}",
        "value": statistics.median(seconds),
        "unit": "s",
        "kind": "measured",
    }


def _integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


if __name__ == "__main__":
    main()
