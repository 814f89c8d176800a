"""The command line: checklist and sweep, as tables and as JSON."""

import json
import subprocess
import sys

import pytest

from flashcomm_jax import __main__ as cli
from flashcomm_jax import sweep, validate

SMALL = ["--layers", "1", "--rounds", "2"]


def test_validate_as_json(capsys):
    status = cli.main(["validate", "--json", "--prompt-tokens", "40", *SMALL])
    report = json.loads(capsys.readouterr().out)  # one object and nothing else
    assert status == 0 and report["passed"]
    assert [check["passed"] for check in report["checks"]] == [True] * 5
    assert list(report["variants"]) == ["off", "on", "on+mmrs"]
    for variant in report["variants"].values():
        assert variant["metrics"].keys() == validate.METRICS.keys()
        assert all(value > 0 for value in variant["metrics"].values())
    kinds = {name: v["prefill_collectives"] for name, v in report["variants"].items()}
    assert "all-reduce" in kinds["off"]
    assert kinds["on"] == {"reduce-scatter": 3, "all-gather": 3}
    assert kinds["on+mmrs"]["reduce-scatter"] > 3


def test_validate_fails_where_the_fused_path_is_not_taken(capsys):
    arguments = ["validate", "--prompt-tokens", "32", "--mmrs-comm-mode", "none", *SMALL]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "[FAILED] 4. fused path" in out and "mmrs_comm_mode_none" in out
    assert "[ok] 5. numerically consistent" in out
    assert "time to first token (ms)" in out


def test_bench_recommends_a_threshold(capsys):
    arguments = ["bench", "--json", "--tp", "4", "--tokens", "48,16", "--rounds", "3"]
    assert cli.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in report["rows"]] == [16, 48]
    assert report["mesh"] == {"dp": 1, "tp": 4}
    assert report["recommended"] in (None, 16, 48)


def test_recommendation_is_where_it_starts_to_pay_for_good():
    def rows(*on):
        return [{"tokens": 2**i, "layer_ms": {"off": 10.0, "on": ms}} for i, ms in enumerate(on)]

    assert sweep._recommend(rows(9, 11, 9, 8), "on") == 4
    assert sweep._recommend(rows(9, 9, 9), "on") == 1
    assert sweep._recommend(rows(9, 9, 10), "on") is None
    report = {"rows": rows(9, 11), "recommended": None}
    assert "leave it off" in sweep.format_sweep(report)
    assert "tokens=4" in sweep.format_sweep(report | {"recommended": 4})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["validate", "--tp", "64"], "needs 64 devices, here are 8"),
        (["validate", "--mmrs-comm-mode", "nccl"], "mmrs_comm_mode must be one of"),
        (["validate", "--tp", "3"], "must be a multiple of tp=3"),
        (["validate", "--output-tokens", "0"], "new_tokens must be >= 1"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        cli.main([*arguments, *SMALL])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_help_of_the_module():
    command = [sys.executable, "-m", "flashcomm_jax", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "validate" in done.stdout and "bench" in done.stdout
