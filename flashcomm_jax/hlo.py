"""Reads compiled programs: which collectives, how many bytes, in what order."""

import dataclasses
import math
import re

_BITS = {
    "pred": 8,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
}
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
_INSTRUCTION = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<kind>{'|'.join(_KINDS)})"
    r"(?P<start>-start)?\((?P<operands>.*?)\)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_DONE = re.compile(
    r"= .*? (?:[\w\-]*(?:all-reduce|all-gather|reduce-scatter|permute|async)-done)\("
)
# A product: XLA's dot, Triton GEMM fusions, cuBLAS and Pallas calls.
_PRODUCT = re.compile(
    r" dot\(|calls=%gemm_fusion|custom_call_target=\"(?:__cublas|mosaic_gpu|__onednn)"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all".
      group_size: ranks that take part together.
      buffer_bytes: bytes of the whole buffer on a rank: the input of an all-reduce or
        reduce-scatter, the output of an all-gather.
      wire_bytes: bytes a rank sends, by the ring algorithm: 2(n-1)/n of the buffer for an
        all-reduce, (n-1)/n for an all-gather, reduce-scatter or all-to-all, all of it for a
        permute.
    """

    kind: str
    group_size: int
    buffer_bytes: int

    @property
    def wire_bytes(self) -> float:
        """Bytes a rank sends."""
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return factor * self.buffer_bytes


def collectives(text: str) -> list[Collective]:
    """Collectives of a compiled program, in the order of its text.

    Args:
      text: `jax.jit(f).lower(...).compile().as_text()`, of any backend.

    Returns:
      One entry per instruction. One inside a loop body counts once, whatever its trip count.
    """
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        kind = match["kind"]
        sizes = [_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(match["shape"])]
        group = _group_size(line)
        if match["start"] and kind != "all-reduce":
            # Shape of the start: (operands, results, and for a permute two contexts).
            sizes = [size for size in sizes if size > 4]
            half = len(sizes) // 2
            buffer = sum(sizes[half:]) if half else sum(sizes)
        else:
            buffer = sum(sizes)
        if kind == "reduce-scatter":
            buffer *= group
        if kind == "collective-permute" or group > 1:
            found.append(Collective(kind, group, buffer))
    return found


def schedule(text: str) -> str:
    """The entry computation as a string: S start, D done, K product, C synchronous collective.

    `S..K..D` is a transfer behind a product.
    """
    entry = text[text.rindex("ENTRY") :]
    marks = []
    for line in entry.splitlines():
        if "=" not in line:
            continue
        if _DONE.search(line):
            marks.append("D")
        elif _starts(line):
            marks.append("S")
        elif _INSTRUCTION.match(line):
            marks.append("C")
        elif _PRODUCT.search(line):
            marks.append("K")
    return "".join(marks)


def _starts(line: str) -> bool:
    match = _INSTRUCTION.match(line)
    return bool(match and match["start"]) or bool(
        re.search(r" (?:async-start|reduce-scatter-start|all-to-all-start)\(", line)
    )


def _bytes(dtype: str, dims: str) -> int:
    if dtype not in _BITS:
        raise ValueError(f"unknown element type {dtype!r} in compiled text")
    return math.prod(int(d) for d in dims.split(",") if d) * _BITS[dtype] // 8


def _group_size(line: str) -> int:
    explicit = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    if explicit:
        return len(explicit[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if iota:
        return int(iota[2])
    named = re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    if "source_target_pairs" in line:
        return 2
    raise ValueError(f"no replica groups in: {line.strip()[:200]}")
