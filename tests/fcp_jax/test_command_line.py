"""`python -m fcp_jax` as a user runs it."""

import json
import subprocess
import sys
import time

import fcp_jax as fcp
from fcp_jax.__main__ import main

REQUIRED = (
    "method num_ranks compute_imbalance comm_imbalance bandwidth_needed num_transfers max_degree "
    "num_rounds num_stages send_bytes_max memory_tokens_max planning_seconds"
).split()


def test_json_is_one_object_and_jax_stays_out():
    program = (
        "import sys; from fcp_jax.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    arguments = "plan --workload lognormal --num-ranks 16 --seed 0 --json".split()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == ""
    assert time.perf_counter() - started < 20  # about half a second on an idle machine
    figures = json.loads(done.stdout)
    assert set(REQUIRED) <= set(figures)
    assert figures["num_ranks"] == 16 and figures["num_tokens"] == 16 * 32768


def test_out_and_plot(tmp_path, capsys):
    out, plot = tmp_path / "plan.npz", tmp_path / "plan.png"
    arguments = ["plan", "--workload", "bimodal", "--num-ranks", "4", "--transport", "static"]
    assert main([*arguments, "--out", str(out), "--plot", str(plot)]) == 0
    plan = fcp.Plan.load(out)
    fcp.validate_plan(plan)
    assert plan.stats is not None and plan.stats.num_rounds == plan.stats.max_degree
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    assert "compute_imbalance" in capsys.readouterr().out


def test_errors_go_to_stderr_with_status_two(capsys):
    assert main(["plan", "--workload", "nope", "--num-ranks", "4"]) == 2
    assert main(["plan", "--workload", "uniform", "--num-ranks", "6", "--transport", "xor"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "workload must be one of" in printed.err and "power-of-two num_ranks" in printed.err
