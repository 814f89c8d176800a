"""Measures configurations of the attention kernels and keeps the fastest in a table.

    python -m pallas_kernels tune

What a batch looks like is data, unknown when a program is compiled, so an entry of the table serves
every mask: it is the configuration with the best geometric mean over one long causal segment, full
segments and many short causal ones. Candidates run in a process of their own that is replaced where
one does not answer; those that disagree with the first, the untuned default, are never chosen.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import operator
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_attention_mgpu, implementations
from pallas_kernels.work_list import TokenMask, WorkList

_PATTERNS = ("causal", "full", "short")
_ANSWER_SECONDS = 90
_LARGEST_DIFFERENCE = 0.02  # relative L2, between candidates on the same 16-bit inputs


@dataclasses.dataclass(frozen=True)
class Job:
    """Candidates for one entry of the table.

    Attributes:
      kernel: "forward" or "backward".
      head_dim: of the heads.
      group: query heads that share a kv head; entries tell even from odd.
      changes: fields to change in the untuned default, one dict a candidate; the first is empty.
    """

    kernel: str
    head_dim: int
    group: int
    changes: tuple[dict, ...]

    @property
    def name(self) -> str:
        """What `--only` is matched with."""
        return f"{self.kernel}_d{self.head_dim}_{'even' if self.group % 2 == 0 else 'odd'}"


_NO_TURNS = dict(ping_pong=False)
JOBS = (
    Job("backward", 128, 8, (
        {},
        dict(dq_warpgroup=False, compute_registers=240),
        dict(dq_warpgroup=False, compute_registers=232, copy_registers=40),
    )),
    Job("forward", 128, 8, (
        {},
        dict(kv_piece=64),
        dict(kv_piece=32),
        _NO_TURNS,
        dict(kv_piece=64) | _NO_TURNS,
        dict(tile_kv=64, kv_piece=64, stages=4),
        dict(tile_kv=64, kv_piece=64, stages=4) | _NO_TURNS,
        dict(stage_out=False),
        dict(pack=1, stage_out=False),
        dict(compute_registers=240, copy_registers=24),
    )),
    Job("forward", 256, 8, ({}, _NO_TURNS, dict(kv_piece=32))),
    Job("forward", 64, 8, (
        {},
        dict(kv_piece=64),
        dict(stages=4),
        dict(tile_kv=192, kv_piece=64),
        dict(tile_kv=192, kv_piece=64, stages=3) | _NO_TURNS,
        _NO_TURNS,
    )),
    Job("backward", 64, 8, ({}, dict(stages=3))),
    Job("backward", 256, 8, ({}, dict(compute_registers=232, copy_registers=40))),
    Job("forward", 128, 1, ({}, dict(kv_piece=64), _NO_TURNS)),
    Job("forward", 64, 1, ({}, dict(kv_piece=64), dict(tile_kv=192, kv_piece=64))),
    Job("forward", 256, 1, ({}, _NO_TURNS)),
)  # fmt: skip


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tune` to a parser."""
    parser.add_argument("--out", type=pathlib.Path, default=block_attention_mgpu.TUNED)
    parser.add_argument("--seconds", type=float, default=330, help="start no candidate after this")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measures the candidates and writes the table."""
    if options.worker:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line), options.tokens)), flush=True)
        return
    jobs = [job for job in JOBS if options.only in job.name]
    if not jobs:
        names = ", ".join(job.name for job in JOBS)
        raise SystemExit(f"--only {options.only!r} is in none of {names}")
    end, worker = time.monotonic() + options.seconds, Worker(options.tokens)
    stamp = worker.ask({"name": None})
    if "error" in stamp:
        worker.stop()
        raise SystemExit(f"python -m pallas_kernels tune cannot run here: {stamp['error']}")
    found: dict[Job, list[dict]] = {job: [] for job in jobs}
    # The first candidates of all entries come first, then the second ones.
    for place in range(max(len(job.changes) for job in jobs)):
        for job in jobs:
            if place < len(job.changes) and time.monotonic() < end:
                found[job].append(worker.ask({"name": job.name, "place": place}))
                print(json.dumps(found[job][-1]), flush=True)
    worker.stop()
    stamp |= {
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        "command": "python -m pallas_kernels " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }
    entries = [e | stamp for e in map(entry, found, found.values()) if e is not None]
    old = json.loads(options.out.read_text()) if options.out.exists() else []
    options.out.write_text(json.dumps(merge(old, entries), indent=1) + "\n")
    print(f"wrote {len(entries)} entries to {options.out}")


class Worker:
    """A process that measures; it is replaced where it does not answer."""

    def __init__(self, tokens: int):
        """Starts nothing yet."""
        self._command = [sys.executable, "-m", "pallas_kernels", "tune", "--worker"]
        self._command += ["--tokens", str(tokens)]
        self._process: Any = None

    def ask(self, question: dict) -> dict:
        """Returns the worker's answer, or what went wrong as "error"."""
        if self._process is None:
            pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = subprocess.Popen(self._command, text=True, **pipes)
        process: Any = self._process
        late = threading.Timer(_ANSWER_SECONDS, process.kill)
        late.start()
        try:
            print(json.dumps(question), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        late.cancel()
        if line:
            return json.loads(line)
        self.stop()
        return question | {"error": f"it died, or did not answer within {_ANSWER_SECONDS} s"}

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def answer(question: dict, tokens: int) -> dict:
    """What a worker says about a candidate, or about its device where the name is None."""
    if question["name"] is None:
        refusal = implementations.no_device()
        return {"error": refusal} if refusal else {"card": jax.devices()[0].device_kind}
    job = next(job for job in JOBS if job.name == question["name"])
    try:
        return question | measure(job, question["place"], tokens)
    except Exception as error:  # a candidate that does not compile must not end the others
        return question | {"error": str(error)[:300]}


def measure(
    job: Job,
    place: int,
    tokens: int,
    *,
    num_kv_heads: int = 8,
    block: int = 2048,
    timer: Callable[..., float] | None = None,
    interpret: bool = False,
) -> dict:
    """Measures one candidate.

    Args:
      job: what it is a candidate for.
      place: which of `job.changes` it is.
      tokens: length of a packed row, a multiple of `block`.
      num_kv_heads: kv heads; there are `job.group` times as many query heads.
      block: rows per block of the work list, a multiple of 128.
      timer: seconds a call of timer(function, *args); None for `median_seconds`.
      interpret: run in the Pallas interpreter.

    Returns:
      The configuration, TFLOP/s by pattern (backward counts 2.5 times forward), and the largest
      relative difference of a result to that of the first candidate.
    """
    timer = timer or median_seconds
    num_q_heads = job.group * num_kv_heads
    q, k, v, dout = _operands(job.head_dim, num_q_heads, num_kv_heads, tokens)
    default = block_attention_mgpu.untuned(job.kernel, q.shape, k.shape)
    config = dataclasses.replace(default, **job.changes[place])
    make = _forward if job.kernel == "forward" else _backward
    run, expected = (make(x, block, interpret) for x in (config, default))
    tflops, difference = {}, 0.0
    for pattern in _PATTERNS:
        mask, work, pairs = packed(*segments(pattern, tokens), block)
        args = q, k, v, mask, work
        if job.kernel == "backward":
            plain = block_attention_mgpu.untuned("forward", q.shape, k.shape)
            out, lse = _forward(plain, block, interpret)(*args)
            delta = jnp.einsum("qhd,qhd->hq", out, dout, preferred_element_type=jnp.float32)
            args = q, k, v, dout, lse, delta, mask, work
        for got, want in zip(run(*args), expected(*args), strict=True):
            difference = max(difference, _difference(got, want))
        flops = (4.0 if job.kernel == "forward" else 10.0) * num_q_heads * job.head_dim * pairs
        tflops[pattern] = flops / timer(run, *args) / 1e12
    return {"config": dataclasses.asdict(config), "tflops": tflops, "difference": difference}


def entry(job: Job, found: list[dict]) -> dict | None:
    """The table's entry for what was found, None where no candidate gave right results."""

    def speed(result: dict) -> float:
        return math.prod(result["tflops"].values()) ** (1 / len(_PATTERNS))

    right = [x for x in found if "error" not in x and x["difference"] < _LARGEST_DIFFERENCE]
    if not right:
        return None
    return {
        "kernel": job.kernel,
        "head_dim": job.head_dim,
        "even_group": job.group % 2 == 0,
        "config": max(right, key=speed)["config"],
        "candidates": found,
    }


def merge(
    old: list[dict], new: list[dict], fields: tuple[str, ...] = ("kernel", "head_dim", "even_group")
) -> list[dict]:
    """The entries of both, the new ones where `fields` are the same."""
    key = operator.itemgetter(*fields)
    return list(({key(x): x for x in old} | {key(x): x for x in new}).values())


def segments(pattern: str, tokens: int) -> tuple[list[int], bool]:
    """Lengths of the segments of a pattern, and whether it is causal."""
    if pattern == "causal":
        return [tokens], True
    if pattern == "full":
        return [tokens // 8] * 8, False
    shares = np.exp(0.7 * np.random.default_rng(0).normal(size=40))
    bounds = np.floor(tokens * np.cumsum(shares) / shares.sum()).astype(int)
    bounds[-1] = tokens
    return [int(n) for n in np.diff(bounds, prepend=0) if n], True


def packed(lengths: list[int], causal: bool, block: int) -> tuple[TokenMask, WorkList, int]:
    """A row of segments: its mask, its whole work list with room for any, its visible pairs."""
    tokens = sum(lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(tokens)
    last = index if causal else np.repeat(np.cumsum(lengths) - 1, lengths)
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (first, last, index)))
    work = work_list(block_pairs(first, last, block), tokens // block, (tokens // block) ** 2)
    return mask, work, int((last - first + 1).sum())


def block_pairs(first: np.ndarray, last: np.ndarray, block: int) -> np.ndarray:
    """(query block, kv block) pairs that hold a visible token pair, [n, 2]."""
    blocks = len(first) // block
    low = first.reshape(blocks, block).min(1) // block
    high = last.reshape(blocks, block).max(1) // block
    return np.concatenate([[(i, j) for j in range(low[i], high[i] + 1)] for i in range(blocks)])


def work_list(pairs: np.ndarray, rows: int, size: int) -> WorkList:
    """A `WorkList` of sorted pairs, padded to `size`."""
    starts = np.searchsorted(pairs[:, 0], np.arange(rows + 1))
    columns = np.resize(pairs[:, 1], size)
    return WorkList(jnp.asarray(starts, jnp.int32), jnp.asarray(columns, jnp.int32))


def median_seconds(function, *args, seconds: float = 0.4, groups: int = 5) -> float:
    """Median seconds a call, over groups of back-to-back calls."""
    jax.block_until_ready(function(*args))
    begin = time.perf_counter()
    jax.block_until_ready(function(*args))
    calls = max(1, int(seconds / groups / (time.perf_counter() - begin)))
    times = []
    for _ in range(groups):
        begin = time.perf_counter()
        for _ in range(calls - 1):
            function(*args)
        jax.block_until_ready(function(*args))
        times.append((time.perf_counter() - begin) / calls)
    return float(np.median(times))


@functools.cache
def _operands(head_dim: int, num_q_heads: int, num_kv_heads: int, tokens: int) -> tuple:
    """Random q, k, v and dout."""
    heads = num_q_heads, num_kv_heads, num_kv_heads, num_q_heads
    return tuple(
        jax.random.normal(jax.random.key(i), (tokens, n, head_dim), jnp.bfloat16)
        for i, n in enumerate(heads)
    )


@functools.cache
def _forward(config, block: int, interpret: bool):
    def run(q, k, v, mask, work):
        options = dict(block_size=block, scale=q.shape[2] ** -0.5, out_dtype=q.dtype)
        return block_attention_mgpu.forward(
            q, k, v, mask, work, None, config=config, interpret=interpret, **options
        )

    return jax.jit(run)


@functools.cache
def _backward(config, block: int, interpret: bool):
    def run(q, k, v, dout, lse, delta, mask, work):
        options = dict(block_size=block, scale=q.shape[2] ** -0.5)
        return block_attention_mgpu.backward(
            q, k, v, dout, lse, delta, mask, work, None,
            config=config, interpret=interpret, **options,
        )  # fmt: skip

    return jax.jit(run)


def _difference(a: jax.Array, b: jax.Array) -> float:
    """Relative L2 difference of the finite values; infinite where others are not the same."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    finite = jnp.isfinite(b)
    if not bool((finite == jnp.isfinite(a)).all()):
        return math.inf
    norm = float(jnp.linalg.norm(jnp.where(finite, b, 0)))
    return float(jnp.linalg.norm(jnp.where(finite, a - b, 0))) / norm if norm else 0.0
