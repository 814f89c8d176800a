"""From how many tokens on does FlashComm pay? A sweep over prefill lengths of one layer."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flashcomm_jax.collective_matmul import compiler_options
from flashcomm_jax.context import FlashCommContext
from flashcomm_jax.model import FlashCommLlama
from flashcomm_jax.validate import variants


def sweep(
    model: FlashCommLlama, tokens: Sequence[int], *, rounds: int, mode: str
) -> dict[str, Any]:
    """Times one decoder layer off, on and on + MMRS at each prefill length.

    Args:
      model: a model of the shape in question; its first layer is timed.
      tokens: prefill lengths.
      rounds: measured rounds; variants take turns, so that drift hits all alike.
      mode: `mmrs_comm_mode`.

    Returns:
      A JSON-ready report. `recommended` is the smallest swept length from which on, with or
      without MMRS, was faster at every longer one too; None if at none.
    """
    graph, state = nnx.split(model.layers[0])
    hidden, parallel = model.config.hidden_size, model.parallel
    dtype = model.config.dtype or model.config.param_dtype

    def step(context, state, x):
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        return nnx.merge(graph, state)(x, context, positions)[0]

    run = jax.jit(step, static_argnums=0, compiler_options=compiler_options())
    rows = []
    for count in sorted(tokens):
        calls = {}
        for name, config in variants(1, mode).items():
            context = FlashCommContext.build(count, parallel, config, "prefill")
            axis = parallel.tp_axis if context.active else None
            x = np.random.default_rng(0).standard_normal(
                (1, context.padded_num_tokens, hidden), np.float32
            )
            x = jax.device_put(jnp.asarray(x, dtype), parallel.sharding(None, axis, None))
            if not context.active:
                x = x[:, :count]
            calls[name] = (context, state, x)
            jax.block_until_ready(run(*calls[name]))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, arguments in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(run(*arguments))
                samples[name].append((time.perf_counter() - start) * 1e3)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        rows.append({"tokens": count, "layer_ms": medians})

    recommended = {name: _recommend(rows, name) for name in ("on", "on+mmrs")}
    known = [value for value in recommended.values() if value is not None]
    return {
        "mesh": dict(parallel.mesh.shape) if parallel.mesh is not None else {},
        "device": jax.devices()[0].device_kind,
        "rows": rows,
        "recommended": min(known) if known else None,
        "recommended_by_variant": recommended,
    }


def _recommend(rows: list[dict[str, Any]], name: str) -> int | None:
    best = None
    for row in reversed(rows):
        if row["layer_ms"][name] >= row["layer_ms"]["off"]:
            break
        best = row["tokens"]
    return best


def format_sweep(report: dict[str, Any]) -> str:
    """The sweep as a table, the recommendation last."""
    names = list(report["rows"][0]["layer_ms"])
    lines = [f"{'tokens':>8}" + "".join(f"{name + ' (ms)':>16}" for name in names)]
    for row in report["rows"]:
        values = "".join(f"{row['layer_ms'][name]:>16.3f}" for name in names)
        lines.append(f"{row['tokens']:>8}{values}")
    best = report["recommended"]
    lines.append("")
    if best is None:
        lines.append("FlashComm was not faster at the longest prefill: leave it off.")
    else:
        lines.append(f"recommended: flashcomm1_min_prefill_tokens={best}")
    return "\n".join(lines)
