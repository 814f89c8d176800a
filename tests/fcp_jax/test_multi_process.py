"""The same program over several processes, and what happens when one of them dies."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

WORKER = pathlib.Path(__file__).parents[1] / "helpers" / "distributed_worker.py"


def launch(num_processes, mode):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(WORKER.parent)}
    environment.pop("XLA_FLAGS", None)
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(port), str(num_processes), str(i), mode],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(num_processes)
    ]


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_agree_with_the_dense_reference(num_processes):
    workers = launch(num_processes, "agree")
    for worker in workers:
        printed, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0, printed
        assert "agrees with the dense reference" in printed


def test_a_dead_process_ends_the_others_with_an_error():
    *survivors, victim = launch(2, "die")
    assert victim.wait(timeout=240) == 7
    died = time.monotonic()
    for worker in survivors:
        printed, _ = worker.communicate(timeout=120)
        assert worker.returncode != 0
        assert "went on without" not in printed
    assert time.monotonic() - died < 100
