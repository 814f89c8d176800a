"""One rank of 8, 64 and 256 on one GPU: attention with its pipeline, and what the pipeline costs.

    python -m benchmarks.mocked_rank --out benchmarks/results      # one Hopper GPU, six minutes
    python -m benchmarks.mocked_rank --smoke --out /tmp            # host devices, tiny shapes

The program of all ranks is compiled and one rank of it runs, the one with most token pairs; its
collectives are mocked: they move nothing, take no time, and what "arrives" is what was in the
buffer. So the records ("mocked_rank") tell nothing about transfers. They tell what stages, work
lists and packing cost beside

- fa3: one FlashAttention-3 call on a packed batch of as many token pairs;
- own kernels: the same kernels on the same work lists, one after the other, and nothing else.

Every case runs in a process of its own. Those of a batch compile at the same time and are then
measured one by one.
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
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fcp_jax as fcp
from benchmarks.attention import fa3, median_seconds, version
from benchmarks.multi_gpu import random
from fcp_jax.workloads import sample_seqlens

SEED = 0
"""Of the lognormal batch."""

TARGETS = {
    ("forward", "fa3"): 0.90,
    ("backward", "fa3"): 0.90,
    ("forward", "own kernels"): 1 / 1.05,
    ("backward", "own kernels"): 1 / 1.08,
}
"""The least ratio that is wanted."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Shapes of a run.

    Attributes:
      ranks: numbers of ranks.
      tokens: tokens a rank.
      block: rows a block, as asked for.
      heads: query heads.
      kv_heads: key and value heads.
      dim: head_dim.
      implementation: of the attention kernel.
    """

    ranks: tuple[int, ...] = (8, 64, 256)
    tokens: int = 32768
    block: int = 4096
    heads: int = 64
    kv_heads: int = 8
    dim: int = 128
    implementation: str = "mosaic_gpu"

    def plan(self, num_ranks: int, transport: str) -> fcp.Plan:
        """The plan of the lognormal batch."""
        size = dict(num_ranks=num_ranks, tokens_per_rank=self.tokens)
        seqlens = sample_seqlens("lognormal", seed=SEED, **size)
        config = fcp.PlanConfig(**size, block_size=self.block, transport=transport)
        return fcp.make_plan(seqlens, config)

    def flops(self, pairs: int, way: str) -> float:
        """Operations of visible token pairs; backward has five products for two."""
        return {"forward": 4.0, "backward": 10.0}[way] * self.heads * self.dim * pairs


SMOKE = Sizes((4,), 128, 64, 4, 2, 8, "xla")


def main(argv: list[str]) -> None:
    """Runs a case, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--seconds", type=float, default=345, help="a case ends at this time")
    parser.add_argument("--jobs", type=int, default=7, help="cases that compile at a time")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on host devices")
    parser.add_argument("--one", help="a single case in this process")
    options = parser.parse_args(argv)
    sizes = SMOKE if options.smoke else Sizes()
    if options.one:
        run_case(options.one, sizes, options.smoke)
        return
    deadline = time.monotonic() + options.seconds
    found, failed, cases = [], [], case_names(sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"mocked_rank{'_smoke' if options.smoke else ''}.json"
    for first in range(0, len(cases), options.jobs):
        batch = run_batch(cases[first : first + options.jobs], options.smoke, deadline)
        found, failed = found + batch[0], failed + batch[1]
        records = records_of(found, sizes, " ".join(argv))
        file.write_text(json.dumps(records, indent=1) + "\n")
    for record in json.loads(file.read_text()):
        print(row(record), flush=True)
    if failed:
        raise SystemExit(f"failed or out of time: {', '.join(failed)}")


def case_names(sizes: Sizes) -> list[str]:
    """transport_ranks_reserved, what matters most first; "fa3" is the reference."""
    names = [f"xor_{ranks}_0" for ranks in sizes.ranks]
    names += ["fa3"] if version("flash-attn3-jax") else []
    names += [f"static_{ranks}_0" for ranks in sizes.ranks]
    return names + [f"xor_{ranks}_{n}" for n in (6, 8) for ranks in sizes.ranks]


def run_batch(cases: list[str], smoke: bool, deadline: float) -> tuple[list[dict], list[str]]:
    """Lets cases compile side by side and measure in turn; returns (results, failed cases)."""
    command = [sys.executable, "-m", "benchmarks.mocked_rank", *(["--smoke"] if smoke else [])]
    children, found, failed = [], [], []
    for case in cases:
        errors = tempfile.TemporaryFile("w+")
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        child = subprocess.Popen([*command, "--one", case], text=True, **pipes)
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), child.kill)
        timer.start()
        children.append((case, child, errors, timer))
    for _, child, _, _ in children:
        wait_for(child.stdout, "COMPILED")
    for case, child, errors, timer in children:
        output, _ = child.communicate("go\n")
        timer.cancel()
        found += [json.loads(x[7:]) for x in output.splitlines() if x.startswith("RECORD ")]
        if child.returncode:
            errors.seek(0)
            failed.append(case)
            print(f"{case}:\n{errors.read()[-800:]}", file=sys.stderr, flush=True)
        errors.close()
    return found, failed


def wait_for(lines, text: str) -> None:
    """Reads lines up to one of a text, or to the end."""
    for line in lines:
        if line.strip() == text:
            return


def run_case(case: str, sizes: Sizes, smoke: bool) -> None:
    """Compiles a case, waits for a line on stdin, measures and prints what it found."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # cases share the GPU
    if case == "fa3":
        measure = functools.partial(measure_fa3, sizes)
    else:
        transport, *numbers = case.split("_")
        num_ranks, reserve_sms = map(int, numbers)
        flags = ["--xla_gpu_shard_autotuning=false"]
        if smoke:
            os.environ["JAX_PLATFORMS"] = "cpu"
            flags = [f"--xla_force_host_platform_device_count={num_ranks}"]
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
        import jax

        if not smoke:
            jax.config.update("jax_mock_gpu_topology", f"1x{num_ranks}x1")
        plan = sizes.plan(num_ranks, transport)
        programs = programs_of(plan, jax.devices(), sizes, reserve_sms)
        measure = functools.partial(measure_rank, compile_all(programs, plan), programs, plan)
    print("COMPILED", flush=True)
    sys.stdin.readline()
    for record in measure():
        print("RECORD " + json.dumps({"case": case} | record), flush=True)


# One rank


def heaviest_rank(plan: fcp.Plan) -> tuple[int, int]:
    """(rank, token pairs) of the rank of a causal plan that computes most."""
    length = plan.fragment_length[0].astype(np.int64)
    before = plan.fragment_start[0] - plan.fragment_lo[0]
    pairs = length * before + length * (length + 1) // 2
    rank = plan.fragment_row[0] // plan.shape.plan_rows_per_rank
    by_rank = np.bincount(rank, pairs, plan.shape.num_ranks + 1)  # padding is behind all ranks
    return int(by_rank.argmax()), int(by_rank.max())


def mesh_of(plan: fcp.Plan, devices):
    """A mesh whose first device, the one that is here, is the heaviest rank of the plan."""
    from jax.sharding import AxisType, Mesh

    order = np.arange(plan.shape.num_ranks)
    rank, _ = heaviest_rank(plan)
    order[[0, rank]] = order[[rank, 0]]
    return Mesh(np.array(devices)[order], ("cp",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and what to call it with.

    Attributes:
      function: of the operands.
      operands: `jax.ShapeDtypeStruct`s with shardings, or arrays.
    """

    function: Callable
    operands: tuple


def programs_of(plan: fcp.Plan, devices, sizes: Sizes, reserve_sms: int) -> dict[str, Program]:
    """What a case runs, for real devices or for the idea of some.

    Returns:
      "rank", which tells every device's index on the mesh; "forward" of the whole mesh, and "both"
      with backward; "own forward" and "own backward", the kernels of the heaviest rank alone.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, SingleDeviceSharding
    from jax.sharding import PartitionSpec as P

    from fcp_jax.mesh import resolve_axes, table_specs

    mesh = mesh_of(plan, devices)
    kind: dict[str, Any] = dict(implementation=sizes.implementation, reserve_sms=reserve_sms)

    def forward(q, k, v, plan):
        return fcp.attention(q, k, v, plan, mesh=mesh, layout="plan", **kind)

    def both(q, k, v, dout, plan):
        out, pullback = jax.vjp(functools.partial(forward, plan=plan), q, k, v)
        return out, pullback(out + dout)  # as after a loss: backward cannot start before the end

    def table(x, spec):
        sharding = NamedSharding(mesh, spec)
        if mesh.devices.flat[0] not in jax.devices():
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def placed(sharding, dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rank, _ = heaviest_rank(plan)
    rows, size = plan.shape.plan_rows_per_rank, plan.shape.block_size
    whole = functools.partial(placed, NamedSharding(mesh, P("cp")), jnp.bfloat16)
    q, k = (whole(len(devices) * rows, n, sizes.dim) for n in (sizes.heads, sizes.kv_heads))
    tables = jax.tree.map(table, plan, table_specs(plan, resolve_axes(plan, mesh, "cp", "", "")))
    index = jax.shard_map(
        lambda: jax.lax.axis_index("cp")[None], mesh=mesh, in_specs=(), out_specs=P("cp")
    )
    here = SingleDeviceSharding(devices[0])
    alone = functools.partial(placed, here, jnp.bfloat16)
    own_q, own_k = (alone(rows, n, sizes.dim) for n in (sizes.heads, sizes.kv_heads))
    arrivals = alone(plan.recv_block.shape[3] * size + rows, sizes.kv_heads, sizes.dim)
    sums = placed(here, jnp.float32, sizes.heads, rows)
    own = own_tables(plan, rank), own_q, own_k, own_k, (arrivals, arrivals)
    own_forward, own_backward = own_kernels(size, sizes.dim, kind)
    return {
        "rank": Program(index, ()),
        "forward": Program(forward, (q, k, k, tables)),
        "both": Program(both, (q, k, k, q, tables)),
        "own forward": Program(own_forward, own),
        "own backward": Program(own_backward, (*own, own_q, sums, sums)),
    }


def compile_all(programs: dict[str, Program], plan: fcp.Plan) -> dict[str, Callable]:
    """Compiles programs side by side."""
    import jax

    devices = programs["forward"].operands[0].sharding.device_set
    on_gpu = next(iter(devices)).platform != "cpu"
    options = fcp.gpu_compiler_options(plan) | {"xla_gpu_autotune_level": 0} if on_gpu else {}
    lowered = [jax.jit(x.function).lower(*x.operands) for x in programs.values()]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda x: x.compile(compiler_options=options), lowered)
        return dict(zip(programs, compiled, strict=True))


def own_tables(plan: fcp.Plan, rank: int) -> tuple:
    """Masks and work lists of one rank: before the first stage, and stacked those of all stages."""
    from pallas_kernels import TokenMask, WorkList

    size, rows = plan.shape.block_size, plan.shape.plan_rows_per_rank
    lengths = plan.fragment_length[0]
    fragment = np.repeat(np.arange(len(lengths)), lengths)
    inside = np.arange(len(fragment)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    # One block more, which holds nothing, for rounds in which nothing arrives.
    place = np.full((plan.shape.num_ranks * plan.shape.num_slots + 1) * size, -1, np.int32)
    row = plan.fragment_row[0][fragment] + inside
    place[row] = plan.fragment_start[0][fragment] + inside
    first = np.ones_like(place)
    first[row] = plan.fragment_lo[0][fragment]
    own = slice(rank * rows, (rank + 1) * rows)
    own_mask: Any = first[own], np.maximum(place[own], 0), place[own]
    mask = TokenMask(*own_mask)
    stages = int(plan.trips.sum())
    arrived = place.reshape(-1, size)[plan.recv_block[0, rank, :stages]].reshape(stages, -1)
    behind: Any = np.concatenate([arrived, np.tile(place[own], (stages, 1))], axis=1)
    starts, columns = (
        table[0, rank, :stages] for table in (plan.stage_row_starts, plan.stage_columns)
    )
    local = WorkList(plan.local_row_starts[0, rank], plan.local_columns[0, rank])
    return (mask, local), (mask._replace(kv_index=behind), WorkList(starts, columns))


def own_kernels(block_size: int, dim: int, kind: dict) -> tuple[Callable, Callable]:
    """The attention kernels on `own_tables`, one call after the other: forward and backward.

    Keys and values that arrive are the same in every stage.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels import block_attention, block_attention_grad

    options: dict[str, Any] = dict(block_size=block_size, scale=dim**-0.5, **kind)

    def each_stage(tables, body, carry):
        mask, work = tables

        def stage(i, carry):
            now = mask._replace(kv_index=mask.kv_index[i]), type(work)(*(x[i] for x in work))
            return body(*now, carry)

        return jax.lax.fori_loop(0, len(work.columns), stage, carry)

    def forward(tables, q, k, v, arrivals):
        def later(mask, work, state):
            k, v = arrivals
            return block_attention(q, k, v, mask, work, state, **options)

        local, stages = tables
        return each_stage(stages, later, block_attention(q, k, v, *local, **options))

    def backward(tables, q, k, v, arrivals, dout, lse, delta):
        def later(mask, work, sums):
            operands = q, *arrivals, dout, lse, delta, mask, work, sums[0]
            return block_attention_grad(*operands, **options)

        local, stages = tables
        dq, *dkv = block_attention_grad(q, k, v, dout, lse, delta, *local, **options)
        zeros = (jnp.zeros(x.shape, jnp.float32) for x in arrivals)
        return dkv, each_stage(stages, later, (dq, *zeros))

    return forward, backward


def measure_rank(compiled: dict[str, Callable], programs: dict[str, Program], plan: fcp.Plan):
    """Yields one record: milliseconds of the rank and of its kernels alone."""
    import jax

    rank, pairs = heaviest_rank(plan)
    index = int(compiled["rank"]().addressable_shards[0].data[0])
    if index != rank:
        raise AssertionError(f"this device is rank {index}, not the heaviest, {rank}")

    def seconds(name, operands):
        return median_seconds(compiled[name], *operands)

    q, k, v, dout, tables = jax.tree.map(random, programs["both"].operands)
    forward = seconds("forward", (q, k, v, tables))
    found = {"forward": forward, "backward": seconds("both", (q, k, v, dout, tables)) - forward}
    del q, k, v, dout, tables
    own = jax.tree.map(random, programs["own backward"].operands)
    own = jax.device_put(own, jax.local_devices()[0])
    found["own forward"] = seconds("own forward", own[:5])
    # The log-sum-exp must be that of the scores, or probabilities overflow.
    lse = compiled["own forward"](*own[:5]).lse
    found["own backward"] = seconds("own backward", (*own[:6], lse, own[7]))
    yield {
        "device": jax.devices()[0].device_kind,
        "rank": rank,
        "token_pairs": pairs,
        "stages": int(plan.trips.sum()),
        "rounds": plan.stats and plan.stats.num_rounds,
        "milliseconds": {name: 1e3 * time for name, time in found.items()},
    }


# FlashAttention-3


def lengths_of(pairs: int, tokens: int) -> list[int]:
    """Causal segments of as many token pairs, together about as many tokens if those hold enough.

    Equal ones, or a single longer one, and a short one for what is left.
    """
    count = max(tokens * tokens // (2 * pairs), 1)
    length = int((2 * pairs / count) ** 0.5)
    length -= count * length * (length + 1) > 2 * pairs
    left = pairs - count * length * (length + 1) // 2
    return [length] * count + ([round((2 * left) ** 0.5)] if left else [])


def measure_fa3(sizes: Sizes):
    """Yields a record for each number of ranks: milliseconds of FlashAttention-3."""
    import jax
    import jax.numpy as jnp

    for num_ranks in sizes.ranks:
        _, pairs = heaviest_rank(sizes.plan(num_ranks, "xor"))
        lengths = lengths_of(pairs, sizes.tokens)
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, dout = (
            jax.random.normal(key, (sum(lengths), heads, sizes.dim), jnp.bfloat16)
            for key, heads in zip(
                keys, (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads), strict=True
            )
        )
        run, run_backward = fa3(lengths, True, sizes.dim)
        out = run(q, k, v)
        found = {
            "forward": median_seconds(run, q, k, v),
            "backward": median_seconds(run_backward, q, k, v, *out, dout),
        }
        yield {
            "ranks": num_ranks,
            "token_pairs": sum(n * (n + 1) // 2 for n in lengths),
            "lengths": lengths,
            "milliseconds": {name: 1e3 * seconds for name, seconds in found.items()},
        }


# Records


def records_of(found: list[dict], sizes: Sizes, arguments: str) -> list[dict]:
    """Compares what was measured: a record for each case, direction and reference."""
    stamp = {
        "kind": "mocked_rank",
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flash-attn3-jax")},
        "command": f"python -m benchmarks.mocked_rank {arguments}".strip(),
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
    }

    def rate(measured: dict, name: str) -> float:
        """TFLOP/s of visible pairs."""
        flops = sizes.flops(measured["token_pairs"], name.split()[-1])
        return flops / measured["milliseconds"][name] / 1e9

    fa3_of = {x["ranks"]: x for x in found if x["case"] == "fa3"}
    records = []
    for measured in (x for x in found if x["case"] != "fa3"):
        transport, num_ranks, reserve_sms = measured["case"].split("_")
        case = f"{transport}_{num_ranks}x{sizes.tokens}_reserve{reserve_sms}"
        for way in ("forward", "backward"):
            references = {"own kernels": rate(measured, f"own {way}")}
            if int(num_ranks) in fa3_of:
                references["fa3"] = rate(fa3_of[int(num_ranks)], way)
            value = rate(measured, way)
            for reference, reference_value in references.items():
                details = {k: v for k, v in measured.items() if k != "case"}
                records.append(
                    {
                        "benchmark": f"attention_{way}",
                        "case": case,
                        "value": value,
                        "unit": "TFLOP/s",
                        "reference": reference,
                        "reference_value": reference_value,
                        "ratio": value / reference_value,
                        "target": TARGETS[way, reference],
                        **details,
                        **stamp,
                    }
                )
    return records


def row(record: dict) -> str:
    """One line of the table."""
    met = "met" if record["ratio"] >= record["target"] else "MISSED"
    return (
        f"{record['benchmark']:19} {record['case']:24} {record['value']:7.1f} TFLOP/s, "
        f"{record['reference']} {record['reference_value']:.1f}: {record['ratio']:.3f}, "
        f"target {record['target']:.3f} {met}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
