"""Plans come in order, ahead of time, and errors come where their batch would have."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

import fcp_jax as fcp
from fcp_jax.plan import TABLES
from fcp_jax.prefetch import PlanPrefetcher

CONFIG = fcp.PlanConfig(4, 256, block_size=64)
ROWS = [[[500, 130]], [[64] * 16], [[1024]], [[7, 300, 300]]]


def same(rows):
    return rows


def test_plans_are_those_of_make_batch_plan_in_order():
    with PlanPrefetcher(iter(ROWS), CONFIG, rows_of=same) as planned:
        results = list(planned)
    assert [rows for rows, _ in results] == ROWS
    for rows, plan in results:
        expected = fcp.make_batch_plan(rows, CONFIG)
        assert plan.shape == expected.shape
        for name in TABLES:
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name))


def test_a_step_does_not_wait():
    config = fcp.PlanConfig(64, 32768)
    rows = [[np.full(64 * 4, 8192)], [np.full(64, 32768)]] * 4
    with PlanPrefetcher(rows, config, rows_of=same) as planned:
        steps = iter(planned)
        next(steps)  # the worker starts
        time.sleep(2.0)  # a long first step, as a compile is
        before = planned.seconds_waited
        waits = []
        for _ in steps:
            waits.append(planned.seconds_waited - before)
            before = planned.seconds_waited
            time.sleep(0.3)
    assert len(waits) == 7
    assert np.median(waits) < 0.02


def test_it_reads_no_further_ahead_than_told():
    read = []

    def batches():
        for index in range(10):
            read.append(index)
            yield [[100]]

    with PlanPrefetcher(batches(), CONFIG, rows_of=same, ahead=2) as planned:
        assert not read
        steps = iter(planned)
        next(steps)
        assert read == [0, 1, 2]
        next(steps)
        assert read == [0, 1, 2, 3]


def test_a_planner_error_comes_at_its_batch():
    with PlanPrefetcher([[[5]], [[1025]], [[6]]], CONFIG, rows_of=same) as planned:
        steps = iter(planned)
        next(steps)
        with pytest.raises(ValueError, match="beyond the capacity"):
            next(steps)


def test_an_error_of_the_data_comes_after_the_batches_before_it():
    def batches():
        yield [[5]]
        yield [[6]]
        raise OSError("disk")

    with PlanPrefetcher(batches(), CONFIG, rows_of=same) as planned:
        steps = iter(planned)
        assert next(steps)[0] == [[5]] and next(steps)[0] == [[6]]
        with pytest.raises(OSError, match="disk"):
            next(steps)


def test_a_killed_worker_is_noticed():
    with PlanPrefetcher([[[5]]] * 8, CONFIG, rows_of=same) as planned:
        steps = iter(planned)
        next(steps)
        (worker,) = planned._pool._processes  # pid of the only worker
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            for _ in steps:
                pass


PARENT = """
import os, signal
import fcp_jax as fcp

if __name__ == "__main__":
    config = fcp.PlanConfig(4, 256, block_size=64)
    with fcp.PlanPrefetcher([[[5]]] * 8, config, rows_of=lambda rows: rows) as planned:
        next(iter(planned))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_worker_ends_with_a_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    # The worker holds the other end of the pipe too, so reading it to its end waits for both.
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, timeout=30)
    assert done.returncode == -signal.SIGKILL


def test_ahead_must_be_positive():
    with pytest.raises(ValueError, match="ahead must be at least 1, got 0"):
        PlanPrefetcher([], CONFIG, rows_of=same, ahead=0)
