"""Does fusing this product pay? Answered from measured tables, per shape."""

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

# Products near break-even stay unfused: transfers also take multiprocessors from the products.
MARGIN = 0.05


@dataclasses.dataclass(frozen=True)
class Product:
    """One rank's product, and where it runs.

    Attributes:
      tokens: rows, over all ranks.
      in_features: columns of this rank's activations.
      out_features: columns of this rank's result.
      tp: ranks that reduce or gather.
      row_parallel: reduce-scatter after the product, or all-gather before it.
      dtype: "bfloat16", "int8", ...
      device: device kind.
    """

    tokens: int
    in_features: int
    out_features: int
    tp: int
    row_parallel: bool
    dtype: str
    device: str

    @classmethod
    def of(cls, shape: Sequence[int], in_features, out_features, layer, context, dtype):
        """The product of a layer on inputs of a (global) shape."""
        parallel = context.parallel
        rows = 1 if len(shape) == 2 else shape[0] // parallel.num_rows(shape[0])
        name = "int8" if layer.quantized else jnp.dtype(dtype).name
        device = device_kind(parallel.mesh)
        return cls(
            rows * shape[-2],
            in_features,
            out_features,
            parallel.tp,
            layer._row_parallel,
            name,
            device,
        )

    def __str__(self):
        """Shape first: what a log line needs."""
        return f"tokens={self.tokens}, in={self.in_features}, out={self.out_features}, tp={self.tp}"


def device_kind(mesh: Any) -> str:
    """Kind of the devices of a mesh; "" where an abstract mesh does not say."""
    devices = getattr(mesh, "devices", None)
    return "" if devices is None else devices.flat[0].device_kind


@functools.cache
def _table() -> list[dict[str, Any]]:
    file = importlib.resources.files("flashcomm_jax") / "mmrs_measured.json"
    return json.loads(file.read_text()) if file.is_file() else []


def overlapped_ms(parts_ms: float, wire_ms: float, stages: int) -> float:
    """Time of a product in equal stages whose transfers hide behind the next (or last) stage.

    Args:
      parts_ms: time of all partial products.
      wire_ms: time of all transfers.
      stages: parts; a first (or last) transfer has nothing to hide behind.

    Returns:
      parts + wire, less what overlaps.
    """
    return parts_ms + wire_ms - (stages - 1) / stages * min(parts_ms, wire_ms)


def nearest(product: Product, backend: str) -> dict[str, Any] | None:
    """The measured entry nearest in shape (in log space); None if nothing alike was measured.

    Alike is the same device kind, dtype, side and backend.
    """
    measured = [
        entry
        for entry in _table()
        if entry["device"] == product.device
        and entry["dtype"] == product.dtype
        and entry["row_parallel"] == product.row_parallel
        and entry["backend"] == backend
    ]

    def distance(entry):
        return sum(
            math.log(entry[key] / getattr(product, key)) ** 2
            for key in ("tokens", "in_features", "out_features")
        )

    return min(measured, key=distance, default=None)


def fusion_pays(product: Product, backend: str) -> bool:
    """Whether the fused form of a product is faster than product and collective in turn.

    The time of the products is measured (whole, and in parts) at the nearest shape; the time on
    the wire is that of the table's link. Fusion must win by more than `MARGIN`.

    Args:
      product: its shape, dtype and device.
      backend: "pallas" or "ring".

    Returns:
      True also where nothing alike was measured: then the switch decides.
    """
    entry = nearest(product, backend)
    if entry is None:
        return True
    wire_ms = entry["wire_bytes"] / entry["link_gigabytes_per_second"] / 1e6
    fused_ms = overlapped_ms(entry["parts_ms"], wire_ms, entry["stages"])
    return fused_ms * (1 + MARGIN) < entry["whole_ms"] + wire_ms
