"""Row-parallel products of one rank of tp = 8 on one GPU: whole, in pieces, bfloat16 and int8.

    python -m benchmarks.matmul --out benchmarks/results
    python -m benchmarks.matmul --sweep --cases 70b_down_8192,8b_down_8192

TFLOP/s are 2 * tokens * k * n over the median time, also where that time has quantizing in it.
"pieces" are the four column pieces that are reduced one by one, back to back in one program, so
their value is that of the sum of their times. Each case runs in a process of its own.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from benchmarks.attention import difference, median_seconds, version

# k and n of one rank's row-parallel products at tp = 8.
PRODUCTS = {"70b_o_proj": (1024, 8192), "70b_down": (3584, 8192), "8b_down": (1792, 4096)}
TOKENS = (8192, 32768, 2048)
# 8200 tokens leave a last row tile that overlaps its neighbor.
CASES = (*(f"{name}_{tokens}" for tokens in TOKENS for name in PRODUCTS), "70b_o_proj_8200")
SMOKE = "smoke_136"
PIECES = 4
RESERVED = 16  # multiprocessors left to a transfer beside the pieces
REFERENCE = "bf16_xla"
# cuBLAS alone: minutes less of autotuning.
FLAGS = "--xla_gpu_enable_triton_gemm=false"


def main() -> None:
    """Runs the cases, prints a table and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=270, help="start nothing after this")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--sweep", action="store_true", help="try tiles instead")
    parser.add_argument("--smoke", action="store_true", help="a tiny case on any machine")
    parser.add_argument("--one", help="a single case in this process; prints JSON lines")
    options = parser.parse_args()
    if options.one:
        run = sweep if options.sweep else measure
        for record in run(options.one, smoke=options.smoke):
            print("RECORD " + json.dumps(record), flush=True)
        return
    name = "matmul_sweep" if options.sweep else "matmul"
    stamp = {
        "versions": {package: version(package) for package in ("jax", "jaxlib")},
        "command": "python -m benchmarks.matmul " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"}
    switches = ["--sweep"] * options.sweep + ["--smoke"] * options.smoke
    begin, records = time.monotonic(), []
    for case in [SMOKE] if options.smoke else options.cases.split(","):
        if time.monotonic() - begin > options.seconds:
            print(f"{case}: not run, out of time")
            continue
        command = [sys.executable, "-m", "benchmarks.matmul", *switches, "--one", case]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=120, env=environment
            )
        except subprocess.TimeoutExpired:
            print(f"{case}: no result within 120 s")
            continue
        if done.returncode:
            print(f"{case}: failed\n{done.stderr[-600:]}")
        lines = [x[7:] for x in done.stdout.splitlines() if x.startswith("RECORD ")]
        for record in map(json.loads, lines):
            records.append(record | stamp)
            print(row(record), flush=True)
        folder = pathlib.Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")


def row(record: dict) -> str:
    """One line of the table."""
    text = f"{record['case']:48} {record['value']:8.1f} {record['unit']}"
    if "ratio" in record:
        text += f"  ratio {record['ratio']:.3f} to {record['reference']}"
    return text + "".join(f"  {k} {v}" for k, v in record.get("checks", {}).items())


def shape_of(case: str) -> tuple[int, int, int]:
    """Tokens, k and n of a case."""
    name, _, tokens = case.rpartition("_")
    k, n = (128, 256) if case == SMOKE else PRODUCTS[name]
    return int(tokens), k, n


def random_operands(case: str) -> tuple[Any, Any, Any, Any]:
    """Operands x [m, k] and w [k, n] in bfloat16, and w as int8 [n, k] with its scales."""
    import jax
    import jax.numpy as jnp

    from flashcomm_jax.products import quantize_kernel

    m, k, n = shape_of(case)
    keys = jax.random.split(jax.random.key(0))
    x, w = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (k, n)), strict=True)
    )
    return x, w, *quantize_kernel(w)


def programs(case: str, kernels: str | None) -> dict[str, tuple[Any, tuple]]:
    """What is measured in a case: {name: (function, arguments)}.

    Args:
      case: its name.
      kernels: the implementation that "ours" stands for.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    from pallas_kernels import matmul, quantize_rows, quantized_matmul

    x, w, w_int8, w_scale = random_operands(case)
    n = w.shape[1]
    ranges = [(i * n // PIECES, (i + 1) * n // PIECES) for i in range(PIECES)]

    def in_pieces(product, x, *kernel):
        """All pieces in turn; the barrier keeps the compiler from merging them."""
        parts = []
        for columns in ranges:
            part = product(x, *kernel, columns=columns)
            x, part = lax.optimization_barrier((x, part))
            parts.append(part)
        return parts

    def int8(x, w_int8, w_scale, columns=None, implementation=None):
        values, scale = x
        options = dict(out_dtype=jnp.bfloat16, columns=columns, implementation=implementation)
        return quantized_matmul(values, scale, w_int8, w_scale, **options)

    def bare_int8(values, w_int8):
        return lax.dot_general(
            values, w_int8, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )

    quantized = jax.jit(functools.partial(quantize_rows, implementation="xla"))(x)
    found: dict[str, tuple[Any, tuple]] = {
        "int8_xla_without_scales": (bare_int8, (quantized[0], w_int8))
    }
    for name, implementation in (("xla", "xla"), ("ours", kernels)):
        rounds = functools.partial(quantize_rows, implementation=implementation)
        whole = functools.partial(matmul, implementation=implementation)
        scaled = functools.partial(int8, implementation=implementation)

        def whole_int8(x, w_int8, w_scale, rounds=rounds, scaled=scaled):
            return scaled(rounds(x), w_int8, w_scale)

        def pieces_int8(x, w_int8, w_scale, rounds=rounds, scaled=scaled):
            return in_pieces(scaled, rounds(x), w_int8, w_scale)

        found |= {
            f"bf16_{name}": (whole, (x, w)),
            f"bf16_{name}_pieces": (functools.partial(in_pieces, whole), (x, w)),
            f"quantize_{name}": (rounds, (x,)),
            f"int8_{name}_product": (scaled, (quantized, w_int8, w_scale)),
            f"int8_{name}": (whole_int8, (x, w_int8, w_scale)),
            f"int8_{name}_pieces": (pieces_int8, (x, w_int8, w_scale)),
        }
    reserving = functools.partial(matmul, implementation=kernels, reserve_sms=RESERVED)
    found[f"bf16_ours_pieces_reserve{RESERVED}"] = functools.partial(in_pieces, reserving), (x, w)
    return found


def compile_all(functions: dict[Any, tuple[Any, tuple]]) -> dict[Any, Any]:
    """Compiles {name: (function, arguments)}; the kernels side by side, as they are not tuned."""
    import jax

    lowered = {name: jax.jit(f).lower(*arguments) for name, (f, arguments) in functions.items()}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        side_by_side = {
            name: pool.submit(program.compile)
            for name, program in lowered.items()
            if "xla" not in name
        }
        compiled = {name: program.compile() for name, program in lowered.items() if "xla" in name}
        return compiled | {name: result.result() for name, result in side_by_side.items()}


def measure(case: str, *, smoke: bool) -> list[dict]:
    """Measures one case; returns its records, of which the whole bfloat16 product is reference."""
    functions = programs(case, None if smoke else "mosaic_gpu")
    m, k, n = shape_of(case)
    compiled = compile_all(functions)
    results = {name: run(*functions[name][1]) for name, run in compiled.items()}
    checks = {name: compare(name, results) for name in results}
    del results
    timing: dict[str, Any] = dict(seconds=0, groups=1) if smoke else dict(seconds=0.3)
    records = {}
    for name, run in compiled.items():
        seconds = median_seconds(run, *functions[name][1], **timing)
        quantizing = name.startswith("quantize")
        records[name] = base_record("matmul", f"{case}_{name}") | {
            "value": (3 * m * k / 1e9 if quantizing else 2 * m * k * n / 1e12) / seconds,
            "unit": "GB/s" if quantizing else "TFLOP/s",
            "milliseconds": seconds * 1e3,
            "checks": checks[name],
        }
    for name, record in records.items():
        reference = "quantize_xla" if name.startswith("quantize") else REFERENCE
        value = records[reference]["value"]
        if name != reference:
            ratio = record["value"] / value
            record |= {"reference": reference, "reference_value": value, "ratio": ratio}
    return list(records.values())


def compare(name: str, results: dict) -> dict:
    """How far a result of ours is from XLA's whole one."""
    import jax.numpy as jnp

    result = results[name]
    if name == "quantize_ours":
        pairs = zip(result, results["quantize_xla"], strict=True)
        return {
            "share of values and scales that differ": [float((a != b).mean()) for a, b in pairs]
        }
    if "ours" not in name:
        return {}
    if isinstance(result, list):
        result = jnp.concatenate(result, axis=1)
    reference = name.partition("_pieces")[0].replace("ours", "xla")
    return {"difference to xla": difference(result, results[reference])}


def configurations(smoke: bool) -> list:
    """Tiles to try: the default, and what differs from it in one or two places."""
    from pallas_kernels.matmul_mgpu import MatmulConfig

    default = MatmulConfig()
    if smoke:
        return [dataclasses.replace(default, tile_n=64)]
    changes: tuple[dict[str, Any], ...] = (
        *({"group": group} for group in (4, 8, 32)),
        {"cluster": 2},
        *({"cluster": 2, "group": group} for group in (4, 8)),
        {"take_turns": False},
        {"take_turns": False, "cluster": 2},
        {"stages": 3},
        {"tile_n": 192},
        {"tile_n": 128, "stages": 6},
        {"tile_n": 128, "stages": 6, "cluster": 2},
    )
    return [default, *(dataclasses.replace(default, **change) for change in changes)]


def sweep(case: str, *, smoke: bool) -> list[dict]:
    """Measures the kernel with many configurations: the whole product and its first piece."""
    import jax.numpy as jnp

    from pallas_kernels import matmul_mgpu, quantize_rows

    m, k, n = shape_of(case)
    x, w, w_int8, w_scale = random_operands(case)
    values, scale = quantize_rows(x, implementation="xla")
    functions: dict[Any, tuple[Any, tuple]] = {}
    for config in configurations(smoke):
        for part, width in (("whole", n), ("piece", n // PIECES)):
            run = functools.partial(
                matmul_mgpu.matmul,
                columns=(0, width),
                out_dtype=jnp.bfloat16,
                config=config,
                interpret=smoke,
            )
            functions["bf16", part, config] = run, (x, w)
            functions["int8", part, config] = run, (values, w_int8, (scale, w_scale))
    compiled = compile_all(functions)
    timing: dict[str, Any] = dict(seconds=0, groups=1) if smoke else dict(seconds=0.12)
    records = []
    for (dtype, part, config), run in compiled.items():
        arguments = functions[dtype, part, config][1]
        width = n if part == "whole" else n // PIECES
        seconds = median_seconds(run, *arguments, **timing)
        records.append(
            base_record("matmul_sweep", f"{case}_{dtype}_{part}")
            | {
                "value": 2 * m * k * width / seconds / 1e12,
                "unit": "TFLOP/s",
                "checks": {"config": dataclasses.asdict(config)},
            }
        )
    return sorted(records, key=lambda record: (record["case"], -record["value"]))


def base_record(benchmark: str, case: str) -> dict:
    """What every record says."""
    import jax

    device = jax.devices()[0].device_kind
    return {"benchmark": benchmark, "case": case, "device": device, "kind": "measured"}


if __name__ == "__main__":
    main()
