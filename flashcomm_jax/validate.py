"""The validation checklist: off against on against on + MMRS, everything else the same."""

import dataclasses
import logging
import statistics
from typing import Any

import numpy as np

from flashcomm_jax import hlo
from flashcomm_jax.config import FlashCommConfig
from flashcomm_jax.model import FlashCommLlama
from flashcomm_jax.reasons import FallbackReason, fallback_counts, reset_fallback_counts
from flashcomm_jax.serving import Engine, Generation

METRICS = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "latency_ms": "request latency",
    "prompt_tokens_per_s": "prompt throughput",
    "decode_tokens_per_s": "decode throughput",
    "requests_per_s": "request throughput",
}
# Off and on differ by the order of a sum over ranks; int8 and bfloat16 round it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 1e-2}


def variants(threshold: int, mode: str) -> dict[str, FlashCommConfig]:
    """The three configurations that the checklist compares."""
    on = FlashCommConfig(enable_flashcomm1=True, flashcomm1_min_prefill_tokens=threshold)
    fused = dataclasses.replace(on, enable_mmrs_fusion=True, mmrs_comm_mode=mode)
    return {"off": FlashCommConfig(), "on": on, "on+mmrs": fused}


def validate(
    model: FlashCommLlama,
    *,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    rounds: int,
    threshold: int,
    mode: str,
    dtype: str,
) -> dict[str, Any]:
    """Serves the same prompts under each variant and compares.

    Args:
      model: the model.
      prompt_tokens: length of each prompt.
      output_tokens: tokens generated for each.
      concurrency: prompts served together.
      rounds: measured rounds, after one that warms up.
      threshold: `flashcomm1_min_prefill_tokens`.
      mode: `mmrs_comm_mode`.
      dtype: "float32", "bfloat16" or "int8": sets the tolerance of the comparison.

    Returns:
      A JSON-ready report: metrics (medians over rounds), checks and their reasons.
    """
    rng = np.random.default_rng(0)
    vocab = model.config.vocab_size
    prompts = rng.integers(0, vocab, (concurrency, prompt_tokens)).astype(np.int32)
    lengths = np.full(concurrency, prompt_tokens, np.int32)
    report: dict[str, Any] = {
        "same_for_all": {
            "model": dataclasses.asdict(model.config) | {"dtype": dtype, "param_dtype": None},
            "mesh": dict(model.parallel.mesh.shape) if model.parallel.mesh is not None else {},
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "concurrency": concurrency,
            "rounds": rounds,
            "flashcomm1_min_prefill_tokens": threshold,
        },
        "variants": {},
    }
    results: dict[str, Generation] = {}
    for name, config in variants(threshold, mode).items():
        reset_fallback_counts()
        engine = Engine(model, config)
        results[name] = engine.generate(prompts, lengths, output_tokens)  # compiles: warm-up
        counts = fallback_counts()
        text = engine.prefill_text(concurrency, prompt_tokens, prompt_tokens + output_tokens)
        served = [engine.generate(prompts, lengths, output_tokens) for _ in range(rounds)]
        kinds: dict[str, int] = {}
        for collective in hlo.collectives(text):
            kinds[collective.kind] = kinds.get(collective.kind, 0) + 1
        report["variants"][name] = {
            "metrics": _metrics(served, prompt_tokens, output_tokens, concurrency),
            "prefill_collectives": kinds,
            "fallbacks": {str(reason): count for reason, count in counts.items()},
        }
    report["checks"] = _checks(report, results, TOLERANCE[dtype])
    report["passed"] = all(check["passed"] for check in report["checks"])
    return report


def _metrics(served, prompt_tokens, output_tokens, concurrency) -> dict[str, float]:
    prefill = statistics.median(g.prefill_seconds for g in served)
    decode = statistics.median(g.decode_seconds for g in served)
    steps = max(output_tokens - 1, 1)
    total = prefill + decode
    return {
        "ttft_ms": prefill * 1e3,
        "tpot_ms": decode / steps * 1e3,
        "latency_ms": total * 1e3,
        "prompt_tokens_per_s": concurrency * prompt_tokens / prefill,
        "decode_tokens_per_s": concurrency * (output_tokens - 1) / decode if decode else 0.0,
        "requests_per_s": concurrency / total,
    }


def _checks(report, results: dict[str, Generation], tolerance: float) -> list[dict[str, Any]]:
    kinds = {name: v["prefill_collectives"] for name, v in report["variants"].items()}
    falls = {name: dict(v["fallbacks"]) for name, v in report["variants"].items()}
    for name in ("on", "on+mmrs"):
        falls[name].pop(FallbackReason.DECODE, None)  # as it should be
        falls[name].pop(FallbackReason.FUSION_DISABLED, None)
    reference = results["off"]
    scale = np.linalg.norm(reference.prompt_logits)
    errors = {
        name: float(np.linalg.norm(g.prompt_logits - reference.prompt_logits) / scale)
        for name, g in results.items()
    }
    equal = {name: bool((g.tokens == reference.tokens).all()) for name, g in results.items()}
    sharded = all("all-reduce" not in kinds[n] and kinds[n] for n in ("on", "on+mmrs"))

    def check(title, passed, detail):
        return {"check": title, "passed": bool(passed), "detail": detail}

    return [
        check(
            "1. off, on and on + MMRS compared; on without all-reduce",
            sharded and "all-reduce" in kinds["off"],
            f"prefill collectives: {kinds}",
        ),
        check(
            "2. same model, parallelism, lengths and concurrency",
            len({g.tokens.shape for g in results.values()}) == 1,
            str({k: v for k, v in report["same_for_all"].items() if k != "model"}),
        ),
        check(
            "3. TTFT, TPOT, throughputs and latency recorded",
            all(v["metrics"].keys() == METRICS.keys() for v in report["variants"].values()),
            "medians over rounds after warm-up",
        ),
        check(
            "4. fused path taken: no 'FC1 MMRS skipped' in a prefill",
            not falls["on+mmrs"],
            f"fallbacks: {falls['on+mmrs'] or 'none'}",
        ),
        check(
            "5. numerically consistent on and off",
            max(errors.values()) < tolerance,
            f"relative error of prompt logits {errors}, limit {tolerance}; same tokens {equal}",
        ),
    ]


def format_report(report: dict[str, Any]) -> str:
    """The report as a table."""
    names = list(report["variants"])
    lines = [f"{'':28}" + "".join(f"{name:>12}" for name in names)]
    for metric, title in METRICS.items():
        row = (report["variants"][name]["metrics"][metric] for name in names)
        unit = " (ms)" if metric.endswith("_ms") else " (/s)"
        lines.append(f"{title + unit:28}" + "".join(f"{value:>12.2f}" for value in row))
    lines.append("")
    for check in report["checks"]:
        lines.append(f"[{'ok' if check['passed'] else 'FAILED'}] {check['check']}")
        lines.append(f"     {check['detail']}")
    return "\n".join(lines)


def show_fallbacks() -> None:
    """Sends fallback lines to stderr, where a user of the command line sees them."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
