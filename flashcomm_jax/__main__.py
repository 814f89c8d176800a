"""Command line: `python -m flashcomm_jax validate | bench [--json]`."""

import argparse
import contextlib
import json
import os
import sys

SHAPES = {
    # hidden, intermediate, layers, heads, kv heads, head_dim, vocabulary
    "tiny": (256, 512, 2, 16, 8, 16, 512),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128, 128256),
}


def parser() -> argparse.ArgumentParser:
    """The arguments of both commands."""
    top = argparse.ArgumentParser(prog="python -m flashcomm_jax", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", choices=SHAPES, default="tiny", help="shape of the model")
    shared.add_argument("--layers", type=int, help="decoder layers, if not the shape's")
    shared.add_argument("--tp", type=int, default=8, help="tensor-parallel ranks")
    shared.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    shared.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32")
    shared.add_argument("--mmrs-comm-mode", default="aiv", help="aiv, ai_cpu or none")
    shared.add_argument("--rounds", type=int, default=5, help="measured rounds after warm-up")
    shared.add_argument("--json", action="store_true", help="print one JSON object, no table")
    check = commands.add_parser(
        "validate", parents=[shared], help="the five-point checklist: off, on, on + MMRS"
    )
    check.add_argument("--prompt-tokens", type=int, default=256)
    check.add_argument("--output-tokens", type=int, default=8)
    check.add_argument("--concurrency", type=int, default=2, help="requests served together")
    check.add_argument("--min-prefill-tokens", type=int, default=1)
    bench = commands.add_parser(
        "bench", parents=[shared], help="find flashcomm1_min_prefill_tokens for a model shape"
    )
    bench.add_argument("--tokens", default="64,128,256,512,1024", help="prefill lengths to sweep")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns the exit status (1 where a check failed)."""
    top = parser()
    options = top.parse_args(arguments)
    ranks = options.tp * options.dp
    import jax

    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A host without GPUs gets as many CPU devices as there are ranks, unless a caller has
        # used jax already.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", ranks)
    if len(jax.devices()) < ranks:
        top.error(
            f"--tp {options.tp} x --dp {options.dp} needs {ranks} devices, here are "
            f"{len(jax.devices())}"
        )
    try:
        model = make_model(options)
        return validate(options, model) if options.command == "validate" else bench(options, model)
    except ValueError as error:
        top.error(str(error))


def make_model(options):
    """A randomly initialized model on a (dp, tp) mesh."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import AxisType

    from flashcomm_jax import FlashCommLlama, LlamaConfig, ParallelConfig, quantize_w8a8

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab = SHAPES[options.model]
    layers = options.layers or (1 if options.command == "bench" else layers)
    float_type = jnp.float32 if options.dtype == "float32" else jnp.bfloat16
    if options.dtype == "int8" and jax.default_backend() == "cpu":
        float_type = jnp.float32
    config = LlamaConfig(
        vocab,
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        head_dim,
        dtype=float_type,
        param_dtype=float_type,
    )
    mesh = jax.make_mesh((options.dp, options.tp), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    model = FlashCommLlama(config, parallel=ParallelConfig(mesh), rngs=nnx.Rngs(0))
    return quantize_w8a8(model) if options.dtype == "int8" else model


def validate(options, model) -> int:
    """Prints the checklist."""
    from flashcomm_jax import validate as checklist

    checklist.show_fallbacks()
    report = checklist.validate(
        model,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        concurrency=options.concurrency,
        rounds=options.rounds,
        threshold=options.min_prefill_tokens,
        mode=options.mmrs_comm_mode,
        dtype=options.dtype,
    )
    print(json.dumps(report) if options.json else checklist.format_report(report))
    return 0 if report["passed"] else 1


def bench(options, model) -> int:
    """Prints the sweep."""
    from flashcomm_jax import sweep

    tokens = [int(count) for count in options.tokens.split(",")]
    report = sweep.sweep(model, tokens, rounds=options.rounds, mode=options.mmrs_comm_mode)
    report["model"] = options.model
    report["dtype"] = options.dtype
    print(json.dumps(report) if options.json else sweep.format_sweep(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
