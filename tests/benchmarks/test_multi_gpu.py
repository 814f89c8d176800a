"""The script for several GPUs: all of it on host devices, its programs compiled for H200s."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import fcp_jax as fcp
from fcp_jax.workloads import sample_seqlens

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import multi_gpu

    return multi_gpu


def test_every_part_leaves_complete_records(script, tmp_path):
    script.run(script.parse_arguments(["--smoke", "--out", str(tmp_path)]))
    records = json.loads((tmp_path / "multi_gpu_smoke.json").read_text())
    assert {record["benchmark"] for record in records} == {
        "correctness",
        "transfer_bandwidth",
        "transfer_hidden",
        "attention_forward",
        "attention_backward",
        "flashcomm_layer",
        "trainer",
    }
    fields = "unit reference reference_value ratio kind device versions command date".split()
    assert all(record[field] is not None for record in records for field in fields)
    assert all(np.isfinite(record["value"]) for record in records)
    assert {record["kind"] for record in records} == {"measured"}


def test_time_is_kept_and_a_part_that_fails_does_not_take_the_others_along(
    script, tmp_path, monkeypatch, capsys
):
    def fail(bench):
        raise RuntimeError("broken")

    monkeypatch.setattr(script, "correctness", fail)
    parts = ["--parts", "correctness,transfers,attention,trainer"]
    options = ["--smoke", "--seconds", "0", "--out", str(tmp_path), *parts]
    with pytest.raises(SystemExit, match="failed: correctness"):
        script.run(script.parse_arguments(options))
    printed = capsys.readouterr()
    assert printed.out.count("out of time at") >= 3 and "broken" in printed.err
    assert json.loads((tmp_path / "multi_gpu_smoke.json").read_text()) == []
    with pytest.raises(SystemExit):
        script.parse_arguments(["--parts", "correctness,bandwidth"])


@functools.cache
def eight_h200s():
    target = (REPOSITORY / "tests" / "helpers" / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target, topology="1x1x8"
    )
    return Mesh(np.array(topology.devices), ("cp",), axis_types=(AxisType.Auto,))


def text_of(program):
    return program.compile(xla_gpu_autotune_level=0).as_text()


@pytest.mark.gpu_schedule
@pytest.mark.parametrize("transport", ["static", "xor", "ragged"])
@pytest.mark.parametrize("rounds", [1, 7])
def test_transfer_programs_compile_for_eight_h200s(script, transport, rounds):
    text = text_of(
        script.stage_program(eight_h200s(), transport, rounds, 4096, 2048, 10, size=8192)
    )
    name = "ragged-all-to-all" if transport == "ragged" else "collective-permute"
    assert text.count(f" {name}-start(") == (1 if transport == "ragged" else rounds)


@pytest.mark.gpu_schedule
@pytest.mark.parametrize("method", ["fcp", "ring", "all_gather", "magi"])
def test_attention_programs_compile_for_eight_h200s(script, method):
    size = dict(num_ranks=8, tokens_per_rank=32768)
    plan = fcp.make_plan(sample_seqlens("lognormal", **size), fcp.PlanConfig(**size, method=method))
    shape = dict(heads=64, kv_heads=8, dim=128)
    for program in script.attention_programs(eight_h200s(), plan, **shape):
        assert " collective-permute-start(" in text_of(program)
    assert jax.default_backend() == "cpu"
