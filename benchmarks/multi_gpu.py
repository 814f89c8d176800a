"""Everything that needs several GPUs of one host, within ten minutes, written as records.

    python -m benchmarks.multi_gpu --out benchmarks/results        # 8 GPUs; 4 or 2 do as well
    python -m benchmarks.multi_gpu --smoke --out /tmp              # 8 host devices, tiny shapes

Five parts, each with a share of the time; a part starts no case after its share, and the records
so far are written after every part.

1. correctness: attention and its gradients against dense float32 attention, by transport.
2. transfers: bandwidth of one round and one stage by transport and block size, and how much of a
   stage a product hides.
3. attention: TFLOP/s a GPU of FCP, ring, all-gather and MagiAttention-style plans, against the
   rate of the same kernel on one GPU.
4. flashcomm: decoder layers of tensor-parallel prefill with FlashComm off, FC1, and fused.
5. trainer: tokens/s of the 1B preset on dp x cp meshes, against one GPU.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fcp_jax as fcp
from fcp_jax.workloads import sample_seqlens

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
LINK = 450.0
"""GB/s a direction of an H200's NVLink: 18 links of 25 GB/s (NVIDIA H200 datasheet)."""

SHARES = {"correctness": 0.1, "transfers": 0.15, "attention": 0.3, "flashcomm": 0.2, "trainer": 0.2}


def main(argv: list[str]) -> None:
    """Sets the environment, which jax reads at its first import, and runs."""
    options = parse_arguments(argv)
    if options.smoke:
        flags: dict[str, Any] = {"xla_force_host_platform_device_count": 8}
        os.environ["JAX_PLATFORMS"] = "cpu"
    else:
        flags = compiler_options()
    given = [f"--{name}={str(value).lower()}" for name, value in flags.items()]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *given]).strip()
    run(options)


def compiler_options() -> dict[str, Any]:
    """What GPUs need for stages of as many rounds as a plan has by default."""
    config = fcp.PlanConfig(8, 64, block_size=64, transport="ragged")
    return fcp.gpu_compiler_options(fcp.make_plan([8], config))


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--seconds", type=float, default=570, help="of all parts together")
    parser.add_argument("--histogram", help="a file of segment lengths, see fcp_jax.workloads")
    parser.add_argument("--implementation", help="attention kernel; default: the best there is")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on 8 host devices")
    options = parser.parse_args(argv)
    unknown = set(options.parts.split(",")) - set(SHARES)
    if unknown:
        parser.error(f"--parts: {sorted(unknown)} are not among {list(SHARES)}")
    return options


def run(options: argparse.Namespace) -> list[dict]:
    """Runs the parts that are asked for; returns the records, which are also in a file."""
    bench = Bench(options)
    started = time.monotonic()
    for part in (part for part in SHARES if part in options.parts.split(",")):
        # What a part leaves of its share, the ones after it may use.
        share = sum(SHARES[p] for p in list(SHARES)[: list(SHARES).index(part) + 1])
        bench.deadline = started + share * options.seconds
        try:
            globals()[part](bench)
        except Exception as error:  # the other parts are worth having
            print(f"{part} failed: {error!r}", file=sys.stderr, flush=True)
            bench.failures.append(part)
        bench.write()
    if bench.failures:
        raise SystemExit(f"failed: {', '.join(bench.failures)}")
    return bench.records


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to compile.

    Attributes:
      function: of the operands.
      operands: `jax.ShapeDtypeStruct`s with shardings, or host arrays.
      on_gpu: whether the devices are GPUs.
    """

    function: Callable
    operands: tuple
    on_gpu: bool

    def compile(self, **more):
        """Compiles for the devices that the operands are placed on, with `more` options."""
        import jax

        lowered = jax.jit(self.function).lower(*self.operands)
        options = compiler_options() if self.on_gpu else {}
        return lowered.compile(compiler_options=options | more)


class Bench:
    """Devices, time and records."""

    def __init__(self, options: argparse.Namespace):
        """Takes the largest power of two of devices up to 8."""
        import jax

        self.options = options
        self.devices = jax.devices()[: 1 << (min(len(jax.devices()), 8).bit_length() - 1)]
        if len(self.devices) < 2:
            raise SystemExit(f"multi_gpu needs 2, 4 or 8 devices, there is {self.devices}")
        self.num_ranks = len(self.devices)
        self.deadline = float("inf")
        self.records: list[dict] = []
        self.failures: list[str] = []

    def mesh(self, sizes: dict[str, int]):
        """A mesh of the first devices."""
        import jax
        from jax.sharding import AxisType

        count = int(np.prod(list(sizes.values())))
        kinds = (AxisType.Auto,) * len(sizes)
        names = tuple(sizes)
        return jax.make_mesh(
            tuple(sizes.values()), names, axis_types=kinds, devices=self.devices[:count]
        )

    def late(self, case: str) -> bool:
        """Whether the part's time is up; says what is not run."""
        late = time.monotonic() > self.deadline
        if late:
            print("out of time at", case, flush=True)
        return late

    def seconds(self, program: Program) -> float:
        """Compiles and runs; returns the median of several runs on random operands."""
        import jax

        compiled, operands = program.compile(), jax.tree.map(random, program.operands)
        jax.block_until_ready(compiled(*operands))
        samples: list[float] = []
        began = time.perf_counter()
        while len(samples) < (2 if self.options.smoke else 5) or (
            len(samples) < 20 and time.perf_counter() - began < 0.3
        ):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*operands))
            samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    def record(self, benchmark, case, value, unit, reference, reference_value, less=False, **more):
        """Keeps and prints one record; `less` says that less is better."""
        a, b = (reference_value, value) if less else (value, reference_value)
        self.records.append(
            {
                "benchmark": benchmark,
                "case": case,
                "value": float(value),
                "unit": unit,
                "reference": reference,
                "reference_value": float(reference_value),
                "ratio": float(a / b) if b else float("inf"),
                "kind": "measured",
                "device": f"{self.num_ranks} x {self.devices[0].device_kind}",
                "versions": {"jax": importlib.metadata.version("jax")},
                "command": "python -m benchmarks.multi_gpu --parts " + self.options.parts,
                "date": datetime.date.today().isoformat(),
                **more,
            }
        )
        print(f"{benchmark:20} {case:42} {value:12.6g} {unit}  {reference} {reference_value:.6g}")
        sys.stdout.flush()

    def write(self) -> None:
        """Writes the records so far."""
        self.options.out.mkdir(parents=True, exist_ok=True)
        name = "multi_gpu_smoke" if self.options.smoke else "multi_gpu"
        text = json.dumps(self.records, indent=1)
        (self.options.out / f"{name}.json").write_text(text + "\n")


def random(operand):
    """An array for a `ShapeDtypeStruct`, made shard by shard; host arrays are taken as they are."""
    import jax

    if not isinstance(operand, jax.ShapeDtypeStruct):
        return operand

    def shard(index):
        sizes = [len(range(*s.indices(n))) for s, n in zip(index, operand.shape, strict=True)]
        rng = np.random.default_rng([s.start or 0 for s in index])
        values = rng.standard_normal(min(int(np.prod(sizes)), 1 << 20), np.float32)
        return np.resize(values, sizes).astype(operand.dtype)

    return jax.make_array_from_callback(operand.shape, operand.sharding, shard)


def transports(bench: Bench) -> list[str]:
    """The transports that these devices have."""
    gpus = bench.devices[0].platform != "cpu"
    return ["static", "xor", *(["ragged"] if gpus else [])]


# 1. correctness


def correctness(bench: Bench) -> None:
    """Relative errors of the output and the gradients."""
    import jax
    import jax.numpy as jnp

    ranks, mesh = bench.num_ranks, bench.mesh({"cp": bench.num_ranks})
    tokens, dim = (64, 16) if bench.options.smoke else (512, 128)
    size = ranks * tokens
    lengths = np.array([size // 2 + 3, 1, 63, 64, size // 8, size // 16])  # and some padding
    for transport in transports(bench):
        config = fcp.PlanConfig(ranks, tokens, block_size=64, transport=transport)
        plan = fcp.make_plan(lengths, config)
        rng = np.random.default_rng(0)
        args = [rng.standard_normal((size, n, dim), np.float32) for n in (8, 2, 2, 8)]
        args = [jnp.asarray(x, jnp.bfloat16) for x in args]
        attend = functools.partial(
            fcp.attention, plan=plan, mesh=mesh, implementation=bench.options.implementation
        )
        got = jax.jit(functools.partial(value_and_grads, attend))(*args)
        want = jax.jit(functools.partial(value_and_grads, functools.partial(dense, lengths)))(
            *(x.astype(jnp.float32) for x in args)
        )
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            x, y = np.asarray(x, np.float32), np.asarray(y)
            error = float(np.linalg.norm(x - y) / np.linalg.norm(y))
            case = f"{transport}_{name}"
            bench.record("correctness", case, error, "relative error", "limit", 1e-2, less=True)
            if not error <= 1e-2:
                raise AssertionError(f"{case} is wrong by {error}")


def value_and_grads(function, q, k, v, dout):
    """(out, dq, dk, dv)."""
    import jax

    out, pullback = jax.vjp(function, q, k, v)
    return out, *pullback(dout)


def dense(lengths, q, k, v):
    """Causal attention of packed segments with a whole score matrix, on one device."""
    import jax
    import jax.numpy as jnp

    ids = jnp.asarray(np.repeat(np.arange(len(lengths) + 1), [*lengths, len(q) - lengths.sum()]))
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    place = jnp.arange(len(q))
    seen = (ids[:, None] == ids) & (place[:, None] >= place) & (ids[:, None] < len(lengths))
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1), 0.0)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")


# 2. transfers


def transfers(bench: Bench) -> None:
    """Bandwidth, and what a product hides."""
    ranks, mesh = bench.num_ranks, bench.mesh({"cp": bench.num_ranks})
    smoke = bench.options.smoke
    repeats, size = (2, 32) if smoke else (10, 8192)
    features = 8 if smoke else 2 * 8 * 128
    for block in (64,) if smoke else (4096, 1024, 2048):
        for transport in transports(bench):
            for name, rounds in (("round", 1), ("stage", ranks - 1)):
                case = f"{name}_{transport}_{block}"
                if bench.late(case):
                    return
                build = functools.partial(
                    stage_program, mesh, transport, rounds, block, features, repeats
                )
                moving = bench.seconds(build(0)) / repeats
                moved = rounds * block * features * 2
                bench.record(
                    "transfer_bandwidth",
                    case,
                    moved / moving / 1e9,
                    "GB/s a GPU and direction",
                    "NVLink datasheet",
                    LINK,
                )
                if name == "round":
                    continue
                working = bench.seconds(build(size, moves=False)) / repeats
                both = bench.seconds(build(size)) / repeats
                bench.record(
                    "transfer_hidden",
                    case,
                    (moving + working - both) / min(moving, working),
                    "fraction of the shorter",
                    "all",
                    1.0,
                    milliseconds={
                        "moving": 1e3 * moving,
                        "working": 1e3 * working,
                        "both": 1e3 * both,
                    },
                )


def stage_program(
    mesh,
    transport: str,
    num_rounds: int,
    block: int,
    features: int,
    repeats: int,
    size: int = 0,
    moves: bool = True,
) -> Program:
    """A stage of `num_rounds` bfloat16 payloads [block, features], `repeats` times.

    Args:
      mesh: of one axis "cp", a power of two of devices.
      transport: as in a plan.
      num_rounds: payloads a rank sends at once, each to another rank.
      block: rows of a payload.
      features: of a row.
      repeats: how often.
      size: of a square product that runs at the same time; 0 for none.
      moves: whether anything is sent.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from fcp_jax.exchange import transfer
    from fcp_jax.mesh import Axes, spmd
    from fcp_jax.rounds import Round

    ranks = mesh.shape["cp"]
    plan = fcp.make_plan([8], fcp.PlanConfig(ranks, 64, block_size=64, transport=transport))
    axes = Axes(mesh, "cp", (), None)
    shifts = range(1, num_rounds + 1)
    rounds: list[Round] = list(shifts)
    if transport == "static":
        rounds = [tuple((i, i ^ s) for i in range(ranks)) for s in shifts]
    # Whom each rank receives from, in order, as a ragged stage wants it.
    sources = np.array([sorted(r ^ s for s in shifts) for r in range(ranks)], np.int32)

    def body(x, y, w):
        def once(_, state):
            x, y = state
            if moves:
                payloads = list(x.reshape(num_rounds, block, features))
                told = jnp.asarray(sources) if transport == "ragged" else None
                x = jnp.concatenate([*transfer(payloads, rounds, plan.shape, axes, told)])
            if size:
                y = (y @ w).astype(y.dtype)
            return lax.optimization_barrier((x, y))

        return lax.fori_loop(0, repeats, once, (x, y))

    def placed(rows, columns):
        sharding = NamedSharding(mesh, P("cp"))
        return jax.ShapeDtypeStruct((ranks * rows, columns), jnp.bfloat16, sharding=sharding)

    specs = P("cp")
    function = spmd(body, axes, (specs,) * 3, (specs,) * 2)
    square = placed(max(size, 1), max(size, 1))
    return Program(function, (placed(num_rounds * block, features), square, square), on_gpu(mesh))


def on_gpu(mesh) -> bool:
    """Whether a mesh is of GPUs, or of the idea of some."""
    return mesh.devices.flat[0].platform != "cpu"


# 3. attention


def attention(bench: Bench) -> None:
    """Forward and backward rates by method."""
    ranks, smoke = bench.num_ranks, bench.options.smoke
    mesh, one = bench.mesh({"cp": ranks}), bench.mesh({"cp": 1})
    heads, kv_heads, dim = (4, 2, 8) if smoke else (64, 8, 128)
    workloads = ["lognormal", *([bench.options.histogram] if bench.options.histogram else [])]
    build = functools.partial(
        attention_programs,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        implementation=bench.options.implementation,
    )

    def rates(mesh, config, seqlens) -> tuple[float, float]:
        """TFLOP/s a device, forward and backward."""
        pairs = float((seqlens.astype(np.float64) * (seqlens + 1) / 2).sum()) / config.num_ranks
        flops = 4.0 * heads * dim * pairs
        forward, both = map(bench.seconds, build(mesh, fcp.make_plan(seqlens, config)))
        return flops / forward / 1e12, 2.5 * flops / max(both - forward, 1e-9) / 1e12

    for tokens in (128,) if smoke else (32768, 16384):
        block: dict[str, Any] = dict(block_size=64) if smoke else {}
        for workload in workloads:
            name = "lognormal" if workload == "lognormal" else pathlib.Path(workload).stem
            if bench.late(f"{name}_{tokens}"):
                return
            alone = sample_seqlens(workload, num_ranks=1, tokens_per_rank=tokens)
            kernel = rates(one, fcp.PlanConfig(1, tokens, **block), alone)
            seqlens = sample_seqlens(workload, num_ranks=ranks, tokens_per_rank=tokens)
            for method in ("fcp",) if smoke else ("fcp", "ring", "all_gather", "magi"):
                case = f"{method}_{name}_{tokens}"
                if bench.late(case):
                    return
                config = fcp.PlanConfig(ranks, tokens, method=method, **block)
                for way, value, reference in zip(
                    ("forward", "backward"), rates(mesh, config, seqlens), kernel, strict=True
                ):
                    bench.record(
                        f"attention_{way}",
                        case,
                        value,
                        "TFLOP/s a GPU",
                        "the same kernel on one GPU",
                        reference,
                    )


def attention_programs(
    mesh, plan: fcp.Plan, *, heads: int, kv_heads: int, dim: int, implementation: str | None = None
) -> tuple[Program, Program]:
    """Attention in the plan's layout: forward alone, and with backward."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from fcp_jax.mesh import resolve_axes, table_specs

    def placed(n):
        rows = plan.shape.num_ranks * plan.shape.plan_rows_per_rank
        sharding = NamedSharding(mesh, P("cp"))
        return jax.ShapeDtypeStruct((rows, n, dim), jnp.bfloat16, sharding=sharding)

    def table(x, spec):
        if mesh.devices.flat[0] in jax.devices():
            return jax.device_put(x, NamedSharding(mesh, spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def forward(q, k, v, plan):
        kind = dict(mesh=mesh, layout="plan", implementation=implementation)
        return fcp.attention(q, k, v, plan, **kind)

    def both(q, k, v, dout, plan):
        out, pullback = jax.vjp(lambda q, k, v: forward(q, k, v, plan), q, k, v)
        return out, pullback(out + dout)

    q, k = placed(heads), placed(kv_heads)
    specs = table_specs(plan, resolve_axes(plan, mesh, "cp", "dp", "tp"))
    tables = jax.tree.map(table, plan, specs)
    gpu = on_gpu(mesh)
    return Program(forward, (q, k, k, tables), gpu), Program(both, (q, k, k, q, tables), gpu)


# 4. flashcomm


def flashcomm(bench: Bench) -> None:
    """The layers of `benchmarks.flashcomm_layers`, whose collectives are real here."""
    from benchmarks import flashcomm_layers

    if bench.num_ranks < flashcomm_layers.TP:
        print(f"flashcomm needs {flashcomm_layers.TP} devices", flush=True)
        return

    class Layers(flashcomm_layers.Bench):
        def record(self, benchmark, case, value, unit, reference, reference_value, kind):
            if kind == "mocked_rank":
                bench.record(benchmark, case, value, unit, reference, reference_value, less=True)

    smoke = bench.options.smoke
    options = argparse.Namespace(
        cpu=smoke,
        models="8b" if smoke else "70b,8b",
        tokens="64" if smoke else "8192,2048,32768",
        dtypes="bfloat16" if smoke else "bfloat16,int8",
        modes="off,ring" if smoke else "off,fc1,ring,aiv",
    )
    Layers(options, bench.deadline).layers()


# 5. trainer


def trainer(bench: Bench) -> None:
    """Tokens a second by mesh; a step of the 1B preset, or of a tiny model."""
    sys.path.append(str(EXAMPLES))
    from packed_lm.data import PackedCorpus, standard_library
    from packed_lm.model import ModelConfig
    from packed_lm.training import TrainConfig, Trainer
    from train_packed_lm import PRESETS

    ranks, smoke = bench.num_ranks, bench.options.smoke
    preset: dict[str, Any] = PRESETS["1b"]
    if smoke:
        small = dict(features=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
        preset = dict(model=small | dict(layout="plan"), plan=dict(tokens_per_rank=128))
        preset["plan"] |= dict(block_size=64)
    meshes = [(1, 1), (1, ranks), (2, ranks // 2), (4, ranks // 4), (ranks, 1)]
    one = None
    for dp, cp in (meshes[:1] + meshes[2:3]) if smoke else dict.fromkeys(meshes):
        if dp * cp > ranks or not cp or bench.late(f"dp{dp}_cp{cp}"):
            continue
        model = ModelConfig(**preset["model"])
        config = fcp.PlanConfig(
            num_ranks=cp,
            num_q_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_dtype=model.dtype,
            **preset["plan"],
        )
        corpus = PackedCorpus(
            standard_library(),
            num_rows=dp,
            capacity=config.capacity,
            long_segment=min(2 * config.tokens_per_rank + 1, config.capacity),
        )
        steps = 2 if smoke else 6
        mesh = bench.mesh({"dp": dp, "cp": cp})
        run = Trainer(model, TrainConfig(steps, plan_ahead=4), config, corpus, mesh)
        steady = [r.tokens_per_second for r in run.run(steps) if not r.compiled]
        value = statistics.median(steady)
        one = one or value  # the first mesh is one device
        case = f"{'tiny' if smoke else '1b'}_dp{dp}_cp{cp}"
        reference = "one device times devices"
        bench.record("trainer", case, value, "tokens/s", reference, one * dp * cp)


if __name__ == "__main__":
    main(sys.argv[1:])
