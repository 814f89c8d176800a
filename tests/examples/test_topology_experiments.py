"""The topology experiments, small: every one runs, and writes what it says."""

import importlib.util
import json
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[2] / "examples" / "topology_experiments.py"
spec = importlib.util.spec_from_file_location("topology_experiments", PATH)
assert spec is not None and spec.loader is not None
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)

SMALL = [x.__name__ for x in experiments.EXPERIMENTS if x.__name__ != "large"]


def test_every_experiment_draws_and_records(tmp_path):
    out = tmp_path / "topology.json"
    arguments = ["--seeds", "1", "--scales", "8,16", "--images", str(tmp_path), "--out", str(out)]
    experiments.main([*arguments, "--only", ",".join(SMALL)])
    records = json.loads(out.read_text())
    assert all(r["kind"] == "modelled" and r["value"] >= 0 for r in records)
    values = {r["case"]: r["value"] for r in records}
    assert (
        values["transport_GPU-X_forward_static_16"] == values["transport_GPU-X_forward_ragged_16"]
    )
    assert values["slow_rank_known_0.5"] > values["slow_rank_unknown_to_the_planner_0.5"]
    assert values["oversubscribed_fcp_8"] <= values["oversubscribed_fcp_1"]
    drawn = {path.stem.removeprefix("topology_") for path in tmp_path.glob("*.png")}
    assert drawn == {"torus" if name == "tori" else name for name in SMALL} - {"traffic"}


def test_unknown_names_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        experiments.main(["--only", "nothing", "--out", str(tmp_path / "x.json")])
    assert "--only must name some of scaling" in capsys.readouterr().err
