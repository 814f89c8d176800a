"""Fits the kernel models of `fcp_jax.simulate` to the measured attention cases.

    python -m benchmarks.calibrate

Prints the figures of forward and backward, and what they predict for each case.
"""

import json
import pathlib

import numpy as np

from benchmarks.attention import segments_of
from fcp_jax.kernel_model import KernelModel

RECORDS = pathlib.Path(__file__).parent / "results" / "attention.json"


def main() -> None:
    """Prints the fits."""
    for benchmark in ("attention_forward", "attention_backward"):
        cases = measured(benchmark)
        model = fit(cases)
        print(
            f"{benchmark}: {model.tflops:.0f} TFLOP/s, {model.row:.0f} pairs a row, "
            f"{model.diagonal:.0f} more on a diagonal"
        )
        for case, value in cases.items():
            predicted = predict(model, case)
            print(f"  {case:24} {value:6.1f}  model {predicted:6.1f}  {predicted / value - 1:+.3f}")


def measured(benchmark: str) -> dict[str, float]:
    """TFLOP/s by case, of one call over all multiprocessors with head_dim 128."""
    special = ("staged", "_d64", "_d256", "reserve")
    return {
        record["case"].removesuffix("_gqa8"): record["value"]
        for record in json.loads(RECORDS.read_text())
        if record["benchmark"] == benchmark and not any(x in record["case"] for x in special)
    }


def fit(cases: dict[str, float]) -> KernelModel:
    """The kernel model with the least squares of relative errors of time."""
    rows = np.array([[rate * x for x in work(case)] for case, rate in cases.items()])
    rows /= [[work(case)[0]] for case in cases]
    inverse, row, diagonal = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return KernelModel(*(float(x) for x in (1 / inverse, row / inverse, diagonal / inverse)))


def predict(model: KernelModel, case: str) -> float:
    """TFLOP/s of a case."""
    visible, rows, diagonal = work(case)
    return model.tflops * visible / (visible + model.row * rows + model.diagonal * diagonal)


def work(case: str) -> tuple[float, float, float]:
    """Visible token pairs of a case, its rows, and those that meet a causal diagonal."""
    lengths, causal, _ = segments_of(case)
    length = np.array(lengths, float)
    seen = (length + 1) / 2 if causal else length
    return float((length * seen).sum()), float(length.sum()), float(length.sum() * causal)


if __name__ == "__main__":
    main()
