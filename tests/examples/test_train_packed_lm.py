"""The training example: packing, parity with one device, layouts, transports, resume."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from packed_lm.data import PackedCorpus, make_batch, pack, standard_library
from packed_lm.model import Decoder, ModelConfig, next_token_loss
from packed_lm.report import dispatch_bytes
from packed_lm.training import TrainConfig, Trainer, ranks_per_segment
from train_packed_lm import PRESETS

import fcp_jax as fcp

REPOSITORY = Path(__file__).parents[2]
DP, CP, TOKENS, BLOCK = 2, 4, 128, 64
SMALL = dict(features=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_features=48)


@pytest.fixture(scope="module")
def corpus():
    documents = [document for document in standard_library() if len(document) < 4 * CP * TOKENS]
    return PackedCorpus(documents, num_rows=DP, capacity=CP * TOKENS, long_segment=2 * TOKENS + 1)


def trainer_for(corpus, *, on_mesh=True, transport="auto", **model):
    mesh = jax.make_mesh((DP, CP), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    return Trainer(
        ModelConfig(**SMALL | model),
        TrainConfig(steps=6, warmup_steps=2, peak_lr=1e-2),
        fcp.PlanConfig(CP, TOKENS, block_size=BLOCK, transport=transport),
        corpus,
        mesh if on_mesh else None,
    )


def leaves(trainer):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state((trainer.model, trainer.optimizer)))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def straight(corpus, checkpoints):
    """Six steps on the mesh, with a checkpoint after three: (records, state, trainer)."""
    trainer = trainer_for(corpus)
    records = list(trainer.run(3))
    trainer.save(checkpoints)
    records += trainer.run(6)
    return records, leaves(trainer), trainer


def test_packing_cuts_nothing_and_loses_nothing():
    rng = np.random.default_rng(0)
    pieces = [np.full(n, i % 256, np.uint8) for i, n in enumerate(rng.integers(1, 100, 200))]
    rows = pack(pieces, 100)
    assert sorted(id(p) for row in rows for p in row) == sorted(id(p) for p in pieces)
    assert all(sum(map(len, row)) <= 100 for row in rows)
    assert len(rows) <= 1.1 * sum(map(len, pieces)) / 100


def test_documents_are_cut_only_if_longer_than_a_row_and_all_come_once_an_epoch():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, n).astype(np.uint8) for n in [700, 129, 64, 2, 1, 0, 50, 6]]
    corpus = PackedCorpus(documents, num_rows=1, capacity=64, long_segment=2, seed=1)
    batches = [corpus.batch(step) for step in range(corpus.batches_per_epoch)]
    lengths = sorted(n for batch in batches for row in batch.segments for n in row.lengths)
    # 700 = 10 * 64 + 60; the last byte of 129 = 2 * 64 + 1 would have no target.
    assert lengths == sorted([64] * 10 + [60] + [64] * 2 + [64, 2, 50, 6])
    again = [corpus.batch(step + corpus.batches_per_epoch) for step in range(len(batches))]
    assert [b.arrays["tokens"].tobytes() for b in again] != [
        b.arrays["tokens"].tobytes() for b in batches
    ]
    np.testing.assert_array_equal(corpus.batch(1).arrays["tokens"], batches[1].arrays["tokens"])


def test_targets_stay_inside_their_document():
    pieces = [np.arange(5, dtype=np.uint8), np.arange(10, 13, dtype=np.uint8)]
    arrays = make_batch([pieces, []], 10).arrays
    np.testing.assert_array_equal(arrays["tokens"][0], [0, 1, 2, 3, 4, 10, 11, 12, 0, 0])
    np.testing.assert_array_equal(arrays["targets"][0], [1, 2, 3, 4, 0, 11, 12, 0, 0, 0])
    np.testing.assert_array_equal(arrays["weights"][0], [1, 1, 1, 1, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(arrays["positions"][0], [0, 1, 2, 3, 4, 0, 1, 2, 0, 0])
    np.testing.assert_array_equal(arrays["segment_ids"][0], [1] * 5 + [2] * 3 + [0] * 2)
    assert all((x[1] == 0).all() for x in arrays.values())


def test_every_batch_spreads_a_segment_over_three_ranks_and_fills_its_rows(corpus):
    trainer = trainer_for(corpus, on_mesh=False)
    for step in range(0, corpus.batches_per_epoch, 7):
        batch, plan = trainer.plan(step)
        assert max(row.lengths.max() for row in batch.segments) > 2 * TOKENS
        assert max(ranks_per_segment(plan, row).max() for row in range(DP)) >= 3
        assert batch.num_tokens > 0.9 * DP * CP * TOKENS
    with pytest.raises(ValueError, match="documents must fill 2 rows"):
        PackedCorpus([np.ones(9, np.uint8)], num_rows=2, capacity=64, long_segment=9)
    with pytest.raises(ValueError, match="long_segment must be at most capacity=64"):
        PackedCorpus([], num_rows=2, capacity=64, long_segment=65)


def test_losses_are_those_of_one_device_and_the_step_compiles_once(corpus, straight):
    records, _, trainer = straight
    one = list(trainer_for(corpus, on_mesh=False).run(6))
    losses = np.array([record.loss for record in records])
    np.testing.assert_allclose(losses, [record.loss for record in one], rtol=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.num_traces == 1 and trainer.buckets.num_growths == 0
    assert [record.compiled for record in records] == [True] + 5 * [False]
    assert len({trainer.plan(step)[1].table_sizes for step in range(6)}) > 1


@pytest.mark.parametrize(
    "variant", [dict(transport="static"), dict(layout="plan", transport="shift")], ids=str
)
def test_layouts_and_transports_train_alike(corpus, straight, variant):
    trainer = trainer_for(corpus, **variant)
    losses = [record.loss for record in trainer.run(3)]
    np.testing.assert_allclose(losses, [r.loss for r in straight[0][:3]], rtol=1e-5)
    shapes = {trainer.plan(step)[1].shape for step in range(3)}
    assert trainer.num_traces == len(shapes)
    assert (len(shapes) > 1) == (variant.get("transport") == "static")


def dispatched(jaxpr, times=1):
    """Bytes a row of everything that dispatches and undispatches in a program move."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "_run":
            moved = eqn.invars[: len(eqn.outvars)]
            total += times * sum(math.prod(x.aval.shape[2:]) * x.aval.dtype.itemsize for x in moved)
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                inner = getattr(inner, "jaxpr", inner)
                total += dispatched(inner, times * eqn.params.get("length", 1))
    return total


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize("layout", ["caller", "plan"])
@pytest.mark.parametrize("remat", [False, True])
def test_a_step_moves_the_bytes_that_are_reported(corpus, layout, remat):
    trainer = trainer_for(corpus, layout=layout, remat=remat, num_layers=3)
    batch, plan = trainer.plan(0)
    graph, state = nnx.split(trainer.model)

    def loss(state):
        return next_token_loss(nnx.merge(graph, state), batch.arrays, plan)

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(state)
    config = trainer.model.config
    assert dispatched(jaxpr.jaxpr) == config.dispatch_bytes
    moved = dispatch_bytes(plan, config)
    tokens = moved[layout] // config.dispatch_bytes
    assert 0 < tokens <= plan.shape.plan_rows_per_rank
    assert moved["plan"] == 16 * tokens < 0.1 * moved["caller"]


def test_resuming_continues_bit_for_bit(corpus, straight, checkpoints):
    records, state, _ = straight
    resumed = trainer_for(corpus)
    assert not resumed.restore(checkpoints / "nothing")
    assert resumed.restore(checkpoints) and resumed.step == 3
    assert [r.loss for r in resumed.run(6)] == [r.loss for r in records[3:]]
    for got, want in zip(leaves(resumed), state, strict=True):
        np.testing.assert_array_equal(got, want)


def test_bfloat16_with_remat_follows_float32(corpus, straight):
    trainer = trainer_for(corpus, dtype="bfloat16", remat=True, layout="plan")
    losses = [record.loss for record in trainer.run(3)]
    np.testing.assert_allclose(losses, [r.loss for r in straight[0][:3]], rtol=0.01)
    assert losses != [r.loss for r in straight[0][:3]]


def test_a_plan_for_another_batch_stops_the_run(corpus, straight, monkeypatch):
    trainer = straight[2]
    others = corpus.batch(trainer.step + 1).segments
    monkeypatch.setattr("packed_lm.training._segments", lambda batch: others)
    with pytest.raises(RuntimeError, match="plan is not for this batch"):
        list(trainer.run(trainer.step + 1))


def run_python(*arguments, timeout):
    flags = (
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20",
        "--xla_cpu_collective_call_terminate_timeout_seconds=60",
    )
    environment = os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "examples"))),
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_very_unequal_rows_against_dense_attention():
    """A hung collective aborts the child, not the suite."""
    assert "agrees" in run_python(Path(__file__).with_name("unequal_rows.py"), timeout=300)


def test_demo_leaves_numbers_and_pictures(tmp_path):
    script = REPOSITORY / "examples" / "train_packed_lm.py"
    size = ("--tokens-per-rank", 128, "--block-size", 64, "--steps", 2, "--checkpoint-every", 1)
    printed = run_python(script, "--demo", "--out", tmp_path, *size, timeout=400)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["parameters"] >= 2_000_000
    assert metrics["compilations"] == 1
    assert metrics["largest_difference"]["one device"] < 1e-4
    assert metrics["fewest_ranks_of_widest_segment"] >= 3
    assert len(metrics["runs"]) == 2
    moved = metrics["dispatch_bytes_of_layout"]
    assert 0 < moved["plan"] < moved["caller"] and metrics["layout"] == "caller"
    for words in ("compute imbalance", "max degree", "tokens/s", "largest relative difference"):
        assert words in printed
    for picture in ("plan.png", "loss.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_the_1b_preset_is_of_that_size_and_traces():
    preset = PRESETS["1b"]
    config = ModelConfig(**preset["model"])
    mesh = jax.make_mesh(preset["mesh"], ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    model = nnx.eval_shape(lambda: Decoder(config, mesh, rngs=nnx.Rngs(0)))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert 0.95e9 < size < 1.3e9
    plan_config = fcp.PlanConfig(mesh.shape["cp"], **preset["plan"])
    batch = make_batch([[np.zeros(plan_config.capacity - 5, np.uint8)]], plan_config.capacity)
    plan = fcp.make_batch_plan(batch.segments, plan_config)
    loss_and_grad = nnx.value_and_grad(next_token_loss, has_aux=True)
    (loss, _), grads = nnx.eval_shape(loss_and_grad, model, batch.arrays, plan)
    assert loss.dtype == np.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(grads)) == size
