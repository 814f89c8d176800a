"""One rank on one GPU: the script on host devices, its programs compiled for H200s."""

import json
import pathlib

import jax
import numpy as np
import pytest
from jax.experimental import topologies

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    monkeypatch.chdir(REPOSITORY)
    from benchmarks import mocked_rank

    return mocked_rank


def test_every_case_leaves_complete_records(script, tmp_path):
    script.main(["--smoke", "--jobs", "4", "--out", str(tmp_path)])
    records = json.loads((tmp_path / "mocked_rank_smoke.json").read_text())
    cases = ("xor_4x128_reserve0", "static_4x128_reserve0", "xor_4x128_reserve6")
    want = {(f"attention_{way}", case) for way in ("forward", "backward") for case in cases}
    found = {(x["benchmark"], x["case"]) for x in records if x["reference"] == "own kernels"}
    assert want < found and len(found) == 8
    fields = "unit reference target device versions command date seed rank stages".split()
    assert all(record[field] is not None for record in records for field in fields)
    assert {record["kind"] for record in records} == {"mocked_rank"}
    for record in records:
        assert 0 < record["ratio"] == record["value"] / record["reference_value"] < np.inf


def test_cases_that_are_late_are_named_and_the_file_is_written(script, tmp_path):
    options = ["--smoke", "--jobs", "4", "--seconds", "0", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="failed or out of time: xor_4_0, static_4_0"):
        script.main(options)
    assert json.loads((tmp_path / "mocked_rank_smoke.json").read_text()) == []


@pytest.mark.parametrize("transport", ["xor", "static"])
def test_work_lists_of_the_heaviest_rank_hold_all_its_pairs(script, transport):
    plan = script.Sizes(tokens=512, block=64).plan(8, transport)
    rank, pairs = script.heaviest_rank(plan)
    assert script.mesh_of(plan, jax.devices()).devices[rank] == jax.devices()[0]
    (mask, local), (stage_mask, stages) = script.own_tables(plan, rank)
    size, visible = plan.shape.block_size, 0
    lists = [(mask.kv_index, *local), *zip(stage_mask.kv_index, *stages, strict=True)]
    for kv, starts, columns in lists:
        for slot, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            own = slice(slot * size, (slot + 1) * size)
            lo, hi = mask.query_lo[own, None], mask.query_hi[own, None]
            for column in columns[first:end]:
                seen = kv[column * size : (column + 1) * size]
                visible += int(((lo <= seen) & (seen <= hi)).sum())
    assert visible == pairs > 0


@pytest.mark.parametrize("pairs", [32768 * 40, 32768 * 5000, 32768**2, 10**10])
def test_a_packed_batch_has_as_many_pairs(script, pairs):
    lengths = script.lengths_of(pairs, 32768)
    assert sum(n * (n + 1) // 2 for n in lengths) == pytest.approx(pairs, rel=0.001)
    longest = 32768**2 / 2
    assert len(lengths) <= 2 if pairs > longest else sum(lengths) == pytest.approx(32768, rel=0.1)


@pytest.mark.gpu_schedule
def test_programs_compile_for_eight_h200s(script):
    target = (REPOSITORY / "tests" / "helpers" / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", target_config=target, topology="1x8x1"
    )
    plan = script.Sizes().plan(8, "xor")
    programs = script.programs_of(plan, topology.devices, script.Sizes(), reserve_sms=6)
    compiled = script.compile_all(programs, plan)
    kernels = {name: x.as_text().count('"mosaic_gpu_v2"') for name, x in compiled.items()}
    assert kernels["rank"] == 0 and kernels["own forward"] == kernels["own backward"] == 2
    assert kernels["both"] > kernels["forward"] > len(plan.shape.groups)
