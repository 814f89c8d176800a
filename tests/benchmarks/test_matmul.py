"""The benchmark of products: all of it on a CPU, in one small case."""

import json
import pathlib
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("switch", [[], ["--sweep"]])
def test_smoke_leaves_complete_records(switch, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY)
    monkeypatch.chdir(REPOSITORY)
    from benchmarks import matmul

    monkeypatch.setattr(sys, "argv", ["matmul", "--smoke", "--out", str(tmp_path), *switch])
    matmul.main()
    (file,) = tmp_path.iterdir()
    records = json.loads(file.read_text())
    names = [record["case"].removeprefix(f"{matmul.SMOKE}_") for record in records]
    if switch:
        assert set(names) == {f"{a}_{b}" for a in ("bf16", "int8") for b in ("whole", "piece")}
    else:
        both = "bf16_{} bf16_{}_pieces int8_{} int8_{}_pieces int8_{}_product quantize_{}"
        expected = {name.format(*[who] * 6) for who in ("ours", "xla") for name in [both]}
        assert set(names) == {
            *" ".join(expected).split(),
            "int8_xla_without_scales",
            f"bf16_ours_pieces_reserve{matmul.RESERVED}",
        }
        reference = {record["case"] for record in records if "ratio" not in record}
        assert reference == {f"{matmul.SMOKE}_{name}" for name in ("bf16_xla", "quantize_xla")}
    for record in records:
        assert record["value"] > 0 and record["kind"] == "measured"
        fields = "benchmark unit device versions command date".split()
        assert all(record[field] for field in fields)
        assert record.get("checks", {}).get("difference to xla", 0) < 1e-6
