"""Block attention on one GPU beside FlashAttention-3 and cuDNN, in one run.

    python -m benchmarks.attention --out benchmarks/results

64 query heads, 8 kv heads, bfloat16, random data; TFLOP/s counts the visible pairs only (backward
2.5 times forward). Ours includes everything from the work list on: the tile schedule, delta, and
gradients in bfloat16. FlashAttention-3 is the `flash-attn3-jax` package, used where it is
installed; cuDNN serves rows of equal segments. Each case runs in a process of its own. `ptxas`
says what registers default configurations spill, `errors_*` compare with float64; the run fails
where any are spilled, products are serialized, or an error is above 1.3 times that of cuDNN.

    python -m benchmarks.attention --cases unmeasured     # what no record has yet, in one call
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np

from pallas_kernels.tune import block_pairs, median_seconds, merge, work_list

HEADS, KV_HEADS, TOKENS, BLOCK = 64, 8, 32768, 4096
# Drawn once from a log-normal of the documents' kind, then fixed.
PACKED = {
    "packed_lognormal_32k": [10240, 7168, 5120, 4096, 3072, 2048, 1024],
    "packed_short_32k": [
        856, 1324, 299, 1019, 1188, 441, 213, 3016, 508, 628, 1411, 246, 365, 1077, 802, 1503, 594,
        322, 2104, 187, 933, 455, 668, 1290, 277, 911, 389, 1102, 540, 724, 1650, 310, 845, 476,
        980, 1212, 1903,
    ],
}  # fmt: skip
EQUAL = {"8x4k": [4096] * 8, "2x16k": [16384] * 2, "1x32k": [32768]}
CASES = (
    *(f"{kind}_{name}" for kind in ("causal", "full") for name in EQUAL),
    *PACKED,
    *(f"blocks_{size}" for size in (512, 1024, 2048, 4096)),
    "staged_8",
    *(f"{kind}_8x4k_d{dim}" for dim in (64, 256) for kind in ("causal", "full")),
    "causal_1x32k_d64",
    "causal_1x32k_d256",
    "causal_1x32k_reserve6",
    "causal_1x32k_reserve8",
)
MATMUL, PTXAS = "matmul_8192", "ptxas"
ERRORS = tuple(f"errors_{kind}_d{dim}" for kind in ("causal", "full") for dim in (64, 128, 256))


def main() -> None:
    """Runs the cases, prints a table and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="all", help="all, unmeasured, or names with commas")
    parser.add_argument("--seconds", type=float, default=400, help="start nothing after this")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--one", help="a single case in this process; prints JSON lines")
    options = parser.parse_args()
    if options.one:
        for record in measure(options.one):
            print("RECORD " + json.dumps(record), flush=True)
        return
    path = pathlib.Path(options.out) / "attention.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else []
    begin, records = time.monotonic(), []
    stamp = {
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flash-attn3-jax")},
        "command": "python -m benchmarks.attention " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }
    for case in cases_of(options.cases, old):
        if time.monotonic() - begin > options.seconds:
            print(f"{case}: not run, out of time")
            continue
        command = [sys.executable, "-m", "benchmarks.attention", "--one", case]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            print(f"{case}: no result within 120 s")
            continue
        lines = [x[7:] for x in done.stdout.splitlines() if x.startswith("RECORD ")]
        if done.returncode:
            print(f"{case}: failed\n{done.stderr[-600:]}")
        for record in map(json.loads, lines):
            records.append(record | stamp)
            print(row(record), flush=True)
        path.write_text(json.dumps(merge(old, records, ("benchmark", "case")), indent=1) + "\n")
    if bad := [record["case"] for record in records if not record.get("good", True)]:
        raise SystemExit(f"spilled registers, or errors above 1.3 times those of cuDNN: {bad}")


def cases_of(names: str, records: list[dict]) -> list[str]:
    """The cases that `--cases` asks for."""
    everything = [PTXAS, MATMUL, *ERRORS, *CASES]
    if names == "unmeasured":
        known = {record["case"].removesuffix("_gqa8") for record in records}
        known |= {record["case"].rpartition("_")[0] for record in records}
        return [case for case in everything if case not in known]
    return everything if names == "all" else names.split(",")


def version(name: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def row(record: dict) -> str:
    """One line of the table."""
    value = f"{record['value']:7.1f}" if record["value"] >= 1 else f"{record['value']:7.5f}"
    text = f"{record['benchmark']:19} {record['case']:24} {value} {record['unit']}"
    for name in ("fa3", "cudnn"):
        if name in record:
            text += f"  {name} {record[name]:.1f}"
    if "ratio" in record:
        text += f"  ratio {record['ratio']:.3f} to {record['reference']}"
    return text + "".join(f"  {k} {v}" for k, v in record.get("checks", {}).items())


def measure(case: str) -> list[dict]:
    """Measures one case; returns its records."""
    import jax
    import jax.numpy as jnp

    if case == PTXAS:
        return measure_ptxas()
    if case in ERRORS:
        return measure_errors(case)
    device = {"device": jax.devices()[0].device_kind, "kind": "measured", "unit": "TFLOP/s"}
    if case == MATMUL:
        x, y = (jax.random.normal(jax.random.key(i), (8192, 8192), jnp.bfloat16) for i in range(2))
        seconds = median_seconds(jax.jit(jnp.matmul), x, y)
        return [device | dict(benchmark="matmul", case=case, value=2 * 8192**3 / seconds / 1e12)]

    from pallas_kernels import TokenMask, block_attention, block_attention_grad

    dim = dim_of(case)
    lengths, causal, block = segments_of(case)
    tokens = sum(lengths)
    reserve = int(case.rpartition("reserve")[2]) if "reserve" in case else 0
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (tokens, heads, dim), jnp.bfloat16)
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True)
    )
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    index = np.arange(tokens)
    last = index if causal else np.repeat(np.cumsum(lengths) - 1, lengths)
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (first, last, index)))
    pairs = block_pairs(first, last, block)
    stages = stages_of(case, pairs)
    works = [work_list(part, tokens // block, max(map(len, stages))) for part in stages]
    options: dict[str, Any] = dict(block_size=block, scale=dim**-0.5, reserve_sms=reserve)
    options |= dict(implementation="mosaic_gpu")
    flops = 4.0 * HEADS * dim * sum(n * (n + 1) / 2 if causal else n * n for n in lengths)

    @jax.jit
    def ours(q, k, v, mask, works):
        if len(works) == 1:
            return block_attention(q, k, v, mask, works[0], out_dtype=q.dtype, **options)
        state = None
        for work in works:
            state = block_attention(q, k, v, mask, work, state, **options)
        return state

    @jax.jit
    def ours_backward(q, k, v, out, lse, dout, mask, works):
        delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).T
        operands = q, k, v, dout, lse, delta, mask
        dq, dk, dv = block_attention_grad(*operands, works[0], **options)
        for work in works[1:]:
            dq, *parts = block_attention_grad(*operands, work, dq, **options)
            dk, dv = dk + parts[0], dv + parts[1]
        return tuple(x.astype(q.dtype) for x in (dq, dk, dv))

    out, lse = ours(q, k, v, mask, works)
    forward = flops / median_seconds(ours, q, k, v, mask, works) / 1e12
    backward_args = q, k, v, out, lse, dout, mask, works
    grads, again = ours_backward(*backward_args), ours_backward(*backward_args)
    backward = 2.5 * flops / median_seconds(ours_backward, *backward_args) / 1e12
    same = all(bool((a == b).all()) for a, b in zip(grads, again, strict=True))
    found: dict[str, dict[str, Any]] = {
        "attention_forward": {"value": forward, "checks": {}},
        "attention_backward": {"value": backward, "checks": {"deterministic": same}},
    }
    if case == "staged_8":
        one = [work_list(pairs, tokens // block, len(pairs))]
        found["attention_forward"] |= {
            "reference": "one call",
            "reference_value": flops / median_seconds(ours, q, k, v, mask, one) / 1e12,
        }
    references = {} if case == "staged_8" else dict(fa3=fa3, cudnn=cudnn)
    for name, make in references.items():
        try:
            got = make(lengths, causal, dim)
            if got is None:
                continue
            run, run_backward = got
            want = run(q, k, v)
            seconds = median_seconds(run, q, k, v)
            found["attention_forward"][name] = flops / seconds / 1e12
            found["attention_forward"]["checks"][f"difference to {name}"] = difference(out, want[0])
            want_grads = run_backward(q, k, v, *want, dout)
            both = median_seconds(run_backward, q, k, v, *want, dout)
            if name == "cudnn":  # its backward is timed with a forward
                both -= seconds
            found["attention_backward"][name] = 2.5 * flops / both / 1e12
            found["attention_backward"]["checks"][f"difference to {name}"] = [
                difference(a, b) for a, b in zip(grads, want_grads, strict=True)
            ]
        except Exception as error:
            found["attention_forward"]["checks"][name] = f"failed: {str(error)[:200]}"
    records = []
    for benchmark, record in found.items():
        best = max(((record[n], n) for n in references if n in record), default=None)
        if best:
            record |= {"reference": best[1], "reference_value": best[0]}
        if "reference_value" in record:
            record["ratio"] = record["value"] / record["reference_value"]
        records.append(device | dict(benchmark=benchmark, case=f"{case}_gqa8") | record)
    return records


def measure_ptxas() -> list[dict]:
    """Bytes of registers that default configurations spill."""
    import jax

    from pallas_kernels import ptxas

    kernels = ("forward", "continue", "backward")
    served = [(kernel, dim) for kernel in kernels for dim in (64, 128, 256)]
    stamp = dict(device=jax.devices()[0].device_kind, kind="measured", unit="bytes")
    records = []
    for kernel, dim in served:
        found = ptxas.report(kernel, dim, HEADS // KV_HEADS)
        record = stamp | dict(benchmark="attention_spills", case=f"ptxas_{kernel}_d{dim}")
        allowed = ptxas.SPILLS_ALLOWED.get((kernel, dim), 0)
        good = not found["serialized"] and found["spilled"] <= allowed
        records.append(record | dict(value=found["spilled"], good=good, checks=found))
    return records


def measure_errors(case: str) -> list[dict]:
    """Relative L2 errors against float64, of ours and of cuDNN, on one segment of 2048 tokens."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import TokenMask, block_attention, block_attention_grad

    dim, causal, tokens, heads = dim_of(case), "causal" in case, 2048, (8, 1, 1, 8)
    q, k, v, dout = (
        jax.random.normal(jax.random.key(i), (tokens, n, dim), jnp.bfloat16)
        for i, n in enumerate(heads)
    )
    index = np.arange(tokens)
    last = index if causal else np.full(tokens, tokens - 1)
    mask = TokenMask(*(jnp.asarray(x, jnp.int32) for x in (np.zeros(tokens), last, index)))
    work = work_list(np.zeros((1, 2), int), 1, 1)
    options: dict[str, Any] = dict(block_size=tokens, scale=dim**-0.5, implementation="mosaic_gpu")
    out, lse = block_attention(q, k, v, mask, work, out_dtype=q.dtype, **options)
    delta = jnp.einsum("qhd,qhd->hq", out, dout, preferred_element_type=jnp.float32)
    grads = block_attention_grad(q, k, v, dout, lse, delta, mask, work, **options)
    results = {"ours": [out, *(x.astype(q.dtype) for x in grads)]}
    for name, make in dict(fa3=fa3, cudnn=cudnn).items():
        try:
            made: Any = make([tokens], causal, dim)
            run, run_backward = made
            want = run(q, k, v)
            results[name] = [want[0], *run_backward(q, k, v, *want, dout)]
        except Exception as error:  # cuDNN does not serve every head_dim; FA3 may be missing
            print(f"{name}: {str(error)[:200]}", file=sys.stderr)
    exact = float64_attention(q, k, v, dout, causal)
    stamp = dict(device=jax.devices()[0].device_kind, kind="measured", unit="relative L2")
    records = []
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        errors = {who: error_of(x[i], exact[i]) for who, x in results.items()}
        record = stamp | dict(benchmark="attention_error", case=f"{case}_{name}")
        record |= dict(value=errors["ours"], checks=errors)
        if "cudnn" in errors:
            ratio = errors["cudnn"] / errors["ours"]
            record |= dict(reference="cudnn", reference_value=errors["cudnn"], ratio=ratio)
            record |= dict(good=ratio >= 1 / 1.3)
        records.append(record)
    return records


def float64_attention(q, k, v, dout, causal: bool) -> list[np.ndarray]:
    """Out, dq, dk and dv of heads that share one kv head, [tokens, heads, head_dim] in float64."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    k, v, scale = k[:, 0], v[:, 0], q.shape[2] ** -0.5
    parts = []
    for head in range(q.shape[1]):
        scores = scale * q[:, head] @ k.T
        if causal:
            scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out, do = weights @ v, dout[:, head]
        dscores = scale * weights * (do @ v.T - (out * do).sum(1, keepdims=True))
        parts.append((out, dscores @ k, dscores.T @ q[:, head], weights.T @ do))
    out, dq, dk, dv = (np.stack(x, axis=1) for x in zip(*parts, strict=True))
    return [out, dq, dk.sum(1, keepdims=True), dv.sum(1, keepdims=True)]


def error_of(got, want: np.ndarray) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def dim_of(case: str) -> int:
    """The head_dim of a case."""
    return next((dim for dim in (64, 256) if f"_d{dim}" in case), 128)


def segments_of(case: str) -> tuple[list[int], bool, int]:
    """Segment lengths, whether causal, and block size of a case."""
    kind, _, rest = case.partition("_")
    if kind == "blocks":
        return [int(rest)] * 64, False, int(rest)
    if kind == "staged":
        return [TOKENS], True, BLOCK
    if kind == "packed":
        return PACKED[case], True, BLOCK
    return EQUAL[rest.partition("_")[0]], kind == "causal", BLOCK


def stages_of(case: str, pairs: np.ndarray) -> list[np.ndarray]:
    """The pairs of each call: one call, or eight by kv block."""
    if case != "staged_8":
        return [pairs]
    return [pairs[pairs[:, 1] == column] for column in np.unique(pairs[:, 1])]


def fa3(lengths: list[int], causal: bool, dim: int):
    """FlashAttention-3 on packed rows: forward -> (out, lse), and backward."""
    import jax
    import jax.numpy as jnp
    from flash_attn3_jax.flash import (  # pyrefly: ignore[missing-import]
        _flash_mha_bwd,
        _flash_mha_fwd,
    )
    from flash_attn3_jax.varlen_bwd import (  # pyrefly: ignore[missing-import]
        flash_mha_varlen_bwd,
    )
    from flash_attn3_jax.varlen_fwd import (  # pyrefly: ignore[missing-import]
        flash_mha_varlen_fwd,
    )

    scale = dim**-0.5
    if len(set(lengths)) == 1:
        call = dict(softmax_scale=scale, is_causal=causal, window_size=(-1, -1))
        rows = functools.partial(split_rows, length=lengths[0])

        def forward(q, k, v):
            out, lse = _flash_mha_fwd(*map(rows, (q, k, v)), **call)
            return out.reshape(q.shape), lse

        def backward(q, k, v, out, lse, dout):
            grads = _flash_mha_bwd(*map(rows, (dout, q, k, v, out)), lse, **call)
            return tuple(g.reshape(-1, *g.shape[2:]) for g in grads)

        return jax.jit(forward), jax.jit(backward)
    bounds = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    longest = dict(max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
    call = dict(softmax_scale=scale, is_causal=causal) | longest
    return (
        jax.jit(lambda q, k, v: flash_mha_varlen_fwd(q, k, v, bounds, bounds, **call)[:2]),
        jax.jit(
            lambda q, k, v, out, lse, dout: flash_mha_varlen_bwd(
                dout, q, k, v, out, lse, bounds, bounds, **call
            )
        ),
    )


def cudnn(lengths: list[int], causal: bool, dim: int):
    """The same by cuDNN, on equal segments only; its backward runs a forward too."""
    import jax

    if len(set(lengths)) != 1:
        return None

    def forward(q, k, v):
        rows = functools.partial(split_rows, length=lengths[0])
        out = jax.nn.dot_product_attention(
            *map(rows, (q, k, v)), is_causal=causal, scale=dim**-0.5, implementation="cudnn"
        )
        return (out.reshape(q.shape),)

    def backward(q, k, v, out, dout):
        del out
        return jax.vjp(lambda *x: forward(*x)[0], q, k, v)[1](dout)

    return jax.jit(forward), jax.jit(backward)


def split_rows(x, length: int):
    """[tokens, heads, dim] to [rows, length, heads, dim]."""
    return x.reshape(-1, length, *x.shape[1:])


def difference(a, b) -> float:
    """Relative L2 difference."""
    import jax.numpy as jnp

    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return round(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), 5)


if __name__ == "__main__":
    main()
