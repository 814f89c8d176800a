"""The tuner, with the interpreter in place of a card."""

import dataclasses
import json
import sys

import pytest

from pallas_kernels import block_attention_mgpu, tune
from pallas_kernels.__main__ import main


def seconds(function, *args):
    function(*args)
    return 0.5


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_a_candidate_is_measured_and_compared(kernel):
    change = dict(kv_piece=64) if kernel == "forward" else dict(stages=3)
    job = tune.Job(kernel, 64, 2, ({}, change))
    options = dict(num_kv_heads=1, block=128, timer=seconds, interpret=True)
    found = tune.measure(job, 1, 256, **options)
    assert found["difference"] < 0.01
    pairs = 256 * 257 / 2
    factor = 4 if kernel == "forward" else 10
    assert found["tflops"]["causal"] == pytest.approx(factor * 2 * 64 * pairs / 0.5 / 1e12)
    assert found["tflops"]["short"] < found["tflops"]["causal"]
    assert change.items() <= found["config"].items()


def result(speed, stages, **more):
    config = dataclasses.asdict(block_attention_mgpu.ForwardConfig(stages=stages))
    tflops = {"causal": speed, "full": speed, "short": speed}
    return {"config": config, "tflops": tflops, "difference": 0.001} | more


def test_the_fastest_right_candidate_becomes_the_default(tmp_path, monkeypatch):
    job = tune.Job("forward", 64, 8, ({}, {}, {}, {}))
    found = [
        result(500.0, 2),
        result(600.0, 3),
        result(900.0, 4, difference=0.5),
        {"error": "does not compile"},
    ]
    entry = tune.entry(job, found)
    assert entry["config"]["stages"] == 3 and entry["candidates"] == found
    old = [entry | {"config": found[0]["config"]}, entry | {"head_dim": 128}]
    table = tune.merge(old, [entry])
    assert [(x["head_dim"], x["config"]["stages"]) for x in table] == [(64, 3), (128, 3)]
    assert tune.entry(job, [{"error": "no answer"}]) is None

    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(block_attention_mgpu, "TUNED", path)
    block_attention_mgpu._table.cache_clear()
    try:
        assert block_attention_mgpu.forward_config((1, 8, 64), (1, 1, 64)).stages == 3
        # No entry: the untuned default.
        for shapes in (((1, 3, 64), (1, 1, 64)), ((1, 8, 256), (1, 1, 256))):
            untuned = block_attention_mgpu.untuned("forward", *shapes)
            assert block_attention_mgpu.forward_config(*shapes) == untuned
    finally:
        block_attention_mgpu._table.cache_clear()


def test_the_table_in_the_package_can_be_used_and_says_where_it_comes_from():
    for entry in json.loads(block_attention_mgpu.TUNED.read_text()):
        assert entry["card"] and entry["versions"]["jax"] and entry["date"] and entry["command"]
        kind = {"forward": "ForwardConfig", "backward": "BackwardConfig"}[entry["kernel"]]
        getattr(block_attention_mgpu, kind)(**entry["config"])


def test_every_job_has_a_name_of_its_own_and_begins_with_the_default():
    assert len({job.name for job in tune.JOBS}) == len(tune.JOBS)
    for job in tune.JOBS:
        assert job.changes[0] == {} and len(set(map(str, job.changes))) == len(job.changes)
        shapes = (1, job.group, job.head_dim), (1, 1, job.head_dim)
        for change in job.changes:
            dataclasses.replace(block_attention_mgpu.untuned(job.kernel, *shapes), **change)


@pytest.mark.parametrize("pattern", ["causal", "full", "short"])
def test_segments_fill_the_row(pattern):
    lengths, causal = tune.segments(pattern, 4096)
    assert sum(lengths) == 4096 and min(lengths) > 0 and causal == (pattern != "full")


def test_without_a_card_it_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pallas_kernels", "tune", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="cannot run here: it needs a GPU"):
        main()
