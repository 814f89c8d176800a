"""One rank of tp = 8 on one GPU: decoder layers with FlashComm off, on, and on with fusion.

    python -m benchmarks.flashcomm_layers --out benchmarks/results

The whole 8-rank program is compiled; its collectives are mocked (they move nothing), so a time is
the compute side of rank 0 alone ("mocked_rank"). Time on the wire is modelled from the bytes in
the compiled text and a stated bandwidth, and only ever reported as "modelled".
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import statistics
import sys
import time
from typing import Any

TP = 8
FLAGS = (
    "--xla_gpu_shard_autotuning=false",
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_experimental_parallel_collective_overlap_limit=4",
    "--xla_gpu_enable_triton_gemm=false",  # cuBLAS alone: minutes less of autotuning
)
# GB/s a rank can send, each direction. NVLink: 18 links of 25 GB/s (NVIDIA H200 datasheet:
# 900 GB/s both directions); PCIe: Gen5 x16, 63 GB/s (PCI-SIG 5.0 at 32 GT/s, 128b/130b).
LINKS = {"nvlink": 450.0, "pcie": 63.0}
SHAPES = {"8b": (4096, 14336, 32, 8, 32), "70b": (8192, 28672, 64, 8, 80)}
TINY = (64, 128, 16, 8, 2)


def main() -> None:
    """Measures, prints a table and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="70b,8b")
    parser.add_argument("--tokens", default="2048,8192,32768")
    parser.add_argument("--dtypes", default="bfloat16,int8")
    parser.add_argument("--modes", default="off,fc1,aiv,ring")
    parser.add_argument("--parts", default="products,layers")
    parser.add_argument("--seconds", type=float, default=400, help="start nothing after this")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--table", action="store_true", help="print the results file as tables")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args()
    if options.table:
        print_tables(pathlib.Path(options.out) / "flashcomm_layers.json")
        return
    flags = FLAGS
    if options.cpu:
        flags = (f"--xla_force_host_platform_device_count={TP}",)
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags)).strip()
    import jax

    if not options.cpu:
        jax.config.update("jax_mock_gpu_topology", f"1x{TP}x1")
    bench = Bench(options, time.monotonic() + options.seconds)
    if "products" in options.parts:
        bench.products()
    if "layers" in options.parts:
        bench.layers()
    bench.write(pathlib.Path(options.out))


class Bench:
    """Runs cases until time is up, keeping records."""

    def __init__(self, options, deadline: float):
        """Makes the mesh."""
        import jax
        import numpy as np
        from jax.sharding import Mesh

        self.options = options
        self.deadline = deadline
        self.mesh = Mesh(np.array(jax.devices()[:TP]), ("tp",))
        self.device = jax.devices()[0].device_kind
        self.records: list[dict] = []
        self.gate: list[dict] = []

    def cases(self):
        """(model, shape, tokens, dtype) combinations asked for."""
        for tokens in (int(n) for n in self.options.tokens.split(",")):
            for model in self.options.models.split(","):
                shape = TINY if self.options.cpu else SHAPES[model]
                for dtype in self.options.dtypes.split(","):
                    yield model, shape, tokens, dtype

    def record(self, benchmark, case, value, unit, reference, reference_value, kind):
        """Keeps and prints one record; the reference is what `value` should be below."""
        self.records.append(
            {
                "benchmark": benchmark,
                "case": case,
                "value": round(value, 6),
                "unit": unit,
                "reference": reference,
                "reference_value": round(reference_value, 6),
                "ratio": round(reference_value / value, 4),
                "kind": kind,
                "device": self.device,
                "versions": {"jax": importlib.metadata.version("jax")},
                "command": f"python -m benchmarks.flashcomm_layers --parts {self.options.parts}",
                "date": datetime.date.today().isoformat(),
            }
        )
        print(
            f"{benchmark:20} {case:38} {value:9.4f} {unit} {reference}={reference_value:.4f}",
            kind,
            flush=True,
        )

    def compile(self, programs: dict) -> dict:
        """Compiles {name: (function, arguments)}; in turn, so that autotuning is undisturbed."""
        import jax

        return {
            name: jax.jit(function).lower(*arguments).compile()
            for name, (function, arguments) in programs.items()
        }

    def time(self, compiled, *arguments) -> tuple[float, str]:
        """Median milliseconds of a call, and the compiled text."""
        import jax

        for _ in range(3):
            jax.block_until_ready(compiled(*arguments))
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        calls = max(2, min(20, int(0.03 / (time.perf_counter() - start))))
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready([compiled(*arguments) for _ in range(calls)])
            samples.append((time.perf_counter() - start) / calls * 1e3)
        return statistics.median(samples), compiled.as_text()

    def random(self, shape, dtype, *spec):
        """A random global array, made shard by shard."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))

        def shard(index):
            sizes = [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]
            rng = np.random.default_rng(0)
            count = min(math.prod(sizes), 1 << 20)
            if dtype == jnp.int8:
                values = rng.integers(-127, 127, count, np.int8)
            else:
                values = (rng.standard_normal(count, np.float32) / 8).astype(dtype)
            return np.resize(values, sizes)

        return jax.make_array_from_callback(shape, sharding, shard)

    def products(self) -> None:
        """Fused and unfused products of one rank: the gate's table."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        from flashcomm_jax.collective_matmul import (
            MAX_PIECES,
            all_gather_matmul,
            matmul_reduce_scatter,
        )
        from flashcomm_jax.hlo import collectives
        from flashcomm_jax.products import Quantized, quantize

        for model, shape, tokens, dtype in self.cases():
            hidden, intermediate, heads, kv_heads, _ = shape
            head_dim = 128 if not self.options.cpu else 8
            sides = {
                "o_proj": (True, heads * head_dim, hidden),
                "down": (True, intermediate, hidden),
                "qkv": (False, hidden, (heads + 2 * kv_heads) * head_dim),
                "gate_up": (False, hidden, 2 * intermediate),
            }
            for name, (row, in_features, out_features) in sides.items():
                if time.monotonic() > self.deadline:
                    print("out of time at", model, tokens, dtype, name, flush=True)
                    return
                int8 = dtype == "int8"
                kernel_axes = ("tp", None) if row else (None, "tp")
                if int8:
                    kernel = Quantized(
                        self.random((out_features, in_features), jnp.int8, *kernel_axes[::-1]),
                        self.random((out_features,), jnp.float32, kernel_axes[1]),
                    )
                    specs: Any = (P(*kernel_axes[::-1]), P(kernel_axes[1]))
                    kernel_spec = Quantized(*specs)
                else:
                    kernel = self.random((in_features, out_features), jnp.bfloat16, *kernel_axes)
                    kernel_spec = P(*kernel_axes)
                x_axes = (None, "tp") if row else ("tp", None)
                x = self.random((tokens, in_features), jnp.bfloat16, *x_axes)
                programs = {}
                for backend in ("none", "pallas", "ring"):

                    def local(x, kernel, backend=backend, int8=int8, row=row):
                        x = quantize(x) if int8 else x
                        options = dict(backend=backend, out_dtype=jnp.bfloat16)
                        if row:
                            return matmul_reduce_scatter(x, kernel, "tp", TP, **options)
                        return all_gather_matmul(x, [kernel], "tp", TP, **options)[0]

                    program = jax.shard_map(
                        local,
                        mesh=self.mesh,
                        in_specs=(P(*x_axes), kernel_spec),
                        out_specs=P(*x_axes[::-1]),
                        check_vma=False,
                    )
                    programs[backend] = program, (x, kernel)
                compiled = self.compile(programs)
                times = {name: self.time(c, x, kernel)[0] for name, c in compiled.items()}
                wire = sum(c.wire_bytes for c in collectives(compiled["none"].as_text()))
                flops = 2 * tokens * in_features * out_features / TP
                case = f"{model}_{name}_{tokens}_{dtype}"
                for backend, ms in times.items():
                    self.record(
                        "flashcomm_product",
                        f"{case}_{backend}",
                        ms,
                        "ms",
                        "unfused",
                        times["none"],
                        "mocked_rank",
                    )
                    print(f"    {flops / ms / 1e9:.0f} TFLOP/s", flush=True)
                    if backend != "none":
                        self.gate.append(
                            {
                                "device": self.device,
                                "dtype": dtype,
                                "row_parallel": row,
                                "backend": backend,
                                "tokens": tokens,
                                "in_features": in_features // (TP if row else 1),
                                "out_features": out_features // (1 if row else TP),
                                "whole_ms": round(times["none"], 5),
                                "parts_ms": round(ms, 5),
                                "stages": MAX_PIECES if backend == "pallas" else TP,
                                "wire_bytes": int(wire),
                                "link_gigabytes_per_second": LINKS["nvlink"],
                            }
                        )

    def layers(self) -> None:
        """One decoder layer; then the time to first token that it and the wire add up to."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from flashcomm_jax import (
            FlashCommAttention,
            FlashCommConfig,
            FlashCommContext,
            FlashCommDecoderLayer,
            FlashCommMLP,
            ParallelConfig,
            quantize_w8a8,
        )
        from flashcomm_jax.hlo import collectives

        configs = {
            "off": FlashCommConfig(),
            "fc1": FlashCommConfig(True, False, 1),
            "aiv": FlashCommConfig(True, True, 1, "aiv"),
            "ring": FlashCommConfig(True, True, 1, "ring"),
        }
        parallel = ParallelConfig(self.mesh)
        for model, shape, tokens, dtype in self.cases():
            hidden, intermediate, heads, kv_heads, num_layers = shape
            head_dim = 128 if not self.options.cpu else 8

            def build(dtype=dtype, shape=shape, head_dim=head_dim):
                hidden, intermediate, heads, kv_heads, _ = shape
                bf16 = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
                layer = FlashCommDecoderLayer(
                    FlashCommAttention(
                        hidden, heads, kv_heads, head_dim, parallel=parallel, **bf16
                    ),
                    FlashCommMLP(hidden, intermediate, parallel=parallel, **bf16),
                    hidden,
                    parallel=parallel,
                    **bf16,
                )
                return quantize_w8a8(layer) if dtype == "int8" else layer

            with nnx.use_eager_sharding(False):
                graph, abstract = nnx.split(nnx.eval_shape(build))
            specs = nnx.get_partition_spec(abstract)
            state = jax.tree.map(
                lambda leaf, spec: self.random(leaf.shape, leaf.dtype, *spec),
                nnx.as_pure(abstract),
                nnx.as_pure(specs),
            )
            programs = {}
            for mode in self.options.modes.split(","):
                context = FlashCommContext.build(tokens, parallel, configs[mode], "prefill")
                axis = "tp" if context.active else None
                x = self.random((1, tokens, hidden), jnp.bfloat16, None, axis, None)

                def step(state, x, context=context, graph=graph, tokens=tokens):
                    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
                    return nnx.merge(graph, state)(x, context, positions)[0]

                programs[mode] = step, (state, x)
            if time.monotonic() > self.deadline:
                print("out of time at", model, tokens, dtype, flush=True)
                return
            results = {}
            for mode, compiled in self.compile(programs).items():
                ms, text = self.time(compiled, *programs[mode][1])
                results[mode] = ms, collectives(text)
            case = f"{model}_{tokens}_{dtype}"
            off_ms = results["off"][0]
            for mode, (ms, found) in results.items():
                name = f"{case}_{mode}"
                self.record("flashcomm_layer", name, ms, "ms", "off", off_ms, "mocked_rank")
                wire = sum(c.wire_bytes for c in found)
                off_wire = sum(c.wire_bytes for c in results["off"][1])
                self.record(
                    "flashcomm_wire", name, wire / 1e6, "MB", "off", off_wire / 1e6, "measured"
                )
                fused = self.fused_products(mode, shape, head_dim, tokens, dtype)
                for link, rate in LINKS.items():
                    self.record(
                        "flashcomm_ttft",
                        f"{name}_{link}{rate:.0f}GBps",
                        num_layers * modelled_layer_ms(ms, wire, rate, fused),
                        "ms",
                        "off",
                        num_layers * modelled_layer_ms(off_ms, off_wire, rate, []),
                        "modelled",
                    )

    def fused_products(self, mode, shape, head_dim, tokens, dtype) -> list[tuple[float, int, int]]:
        """What the gate's table says of the products that a mode fuses."""
        from flashcomm_jax.gate import Product, fusion_pays, nearest

        backend = {"aiv": "pallas", "ring": "ring"}.get(mode)
        if backend is None:
            return []
        hidden, intermediate, heads, kv_heads, _ = shape
        found = []
        for row, in_features, out_features in (
            (True, heads * head_dim // TP, hidden),
            (True, intermediate // TP, hidden),
            (False, hidden, (heads + 2 * kv_heads) * head_dim // TP),
            (False, hidden, 2 * intermediate // TP),
        ):
            product = Product(tokens, in_features, out_features, TP, row, dtype, self.device)
            entry = nearest(product, backend)
            if entry is not None and fusion_pays(product, backend):
                found.append((entry["parts_ms"], entry["wire_bytes"], entry["stages"]))
        return found

    def write(self, out: pathlib.Path) -> None:
        """Writes the records and the gate's raw table."""
        out.mkdir(parents=True, exist_ok=True)
        name = "flashcomm_layers_cpu" if self.options.cpu else "flashcomm_layers"
        (out / f"{name}.json").write_text(json.dumps(self.records, indent=1) + "\n")
        if self.gate:
            (out / f"{name}_products.json").write_text(json.dumps(self.gate, indent=1) + "\n")
        print(f"{len(self.records)} records", file=sys.stderr)


def modelled_layer_ms(
    compute_ms: float, wire_bytes: float, rate: float, products: list[tuple[float, int, int]]
) -> float:
    """Compute and wire of a layer in turn, less what fused products hide.

    Args:
      compute_ms: measured time of the layer with mocked collectives.
      wire_bytes: bytes a rank sends.
      rate: GB/s of the link.
      products: (milliseconds in parts, wire bytes, stages) of each product that runs fused. A
        transfer hides behind its own product and nothing else.

    Returns:
      Milliseconds.
    """
    from flashcomm_jax.gate import overlapped_ms

    hidden = 0.0
    for parts_ms, product_bytes, stages in products:
        wire_ms = product_bytes / rate / 1e6
        hidden += parts_ms + wire_ms - overlapped_ms(parts_ms, wire_ms, stages)
    return compute_ms + wire_bytes / rate / 1e6 - hidden


def three_digits(value: float) -> str:
    """At least three significant digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_tables(path: pathlib.Path) -> None:
    """Prints layers (measured) and time to first token (modelled) as Markdown, apart."""
    records = json.loads(path.read_text())
    for benchmark, suffix in (
        ("flashcomm_layer", ""),
        *(("flashcomm_ttft", f"_{link}{rate:.0f}GBps") for link, rate in LINKS.items()),
    ):
        rows: dict[str, dict[str, float]] = {}
        for record in records:
            if record["benchmark"] == benchmark and record["case"].endswith(suffix):
                case, mode = record["case"].removesuffix(suffix).rsplit("_", 1)
                rows.setdefault(case, {})[mode] = record["value"]
        modes = list(next(iter(rows.values())))
        kind = "mocked_rank" if benchmark == "flashcomm_layer" else "modelled"
        print(f"\n| {benchmark}{suffix}, ms ({kind}) | {' | '.join(modes)} |")
        print("|---" * (len(modes) + 1) + "|")
        for case, values in rows.items():
            print(f"| {case} | {' | '.join(three_digits(values[mode]) for mode in modes)} |")


if __name__ == "__main__":
    main()
