"""Plans of every method are valid, and every way to break one is noticed."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fcp_jax as fcp
from fcp_jax.config import METHODS
from fcp_jax.tables import stage_areas

TRANSPORTS = ("static", "shift", "xor")


@st.composite
def rows_of_segments(draw, capacity):
    """Packed lengths with gaps, biased to block boundaries, giants and swarms."""
    edges = [0, 1, 63, 64, 65, 127, 128, 129, capacity // 2, capacity]
    lengths = draw(st.lists(st.sampled_from(edges) | st.integers(0, 200), max_size=40))
    gaps = draw(st.lists(st.integers(0, 30), min_size=len(lengths), max_size=len(lengths)))
    starts, kept, at = [], [], 0
    for gap, length in zip(gaps, lengths, strict=True):
        if at + gap + length <= capacity:
            starts.append(at + gap)
            kept.append(length)
            at += gap + length
    return fcp.Segments(np.array(starts, np.int64), np.array(kept, np.int64))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_plan_is_valid(data):
    ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    tokens = data.draw(st.sampled_from([64, 100, 256]))
    transport = data.draw(st.sampled_from(TRANSPORTS))
    if transport == "xor" and ranks & (ranks - 1):
        transport = "shift"
    config = fcp.PlanConfig(
        num_ranks=ranks,
        tokens_per_rank=tokens,
        block_size=64,
        causal=data.draw(st.booleans()),
        method=data.draw(st.sampled_from(METHODS)),
        transport=transport,
        coalesce=data.draw(st.integers(1, 5)),
    )
    rows = data.draw(st.lists(rows_of_segments(ranks * tokens), min_size=1, max_size=3))
    plan = fcp.make_batch_plan(rows, config)
    fcp.validate_plan(plan)
    fcp.validate_plan(fcp.pad_plan(plan, tuple(map(fcp.bucket_size, plan.table_sizes))))
    lengths = [row.lengths for row in rows]
    pairs = [np.sum(x * (x + 1) // 2 if config.causal else x * x) for x in lengths]
    assert [stage_areas(plan, row).sum() for row in range(len(rows))] == pairs


def example_plan(transport="static", **changes):
    config = fcp.PlanConfig(4, 256, block_size=64, transport=transport, coalesce=3, **changes)
    return fcp.make_plan([500, 130, 64, 65, 20, 7, 1, 200], config)


def broken(plan, name, change):
    table = getattr(plan, name).copy()
    change(table)
    assert (table != getattr(plan, name)).any()
    return dataclasses.replace(plan, **{name: table})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dropping_or_swapping_a_transfer_is_noticed(transport):
    plan = example_plan(transport)
    fcp.validate_plan(plan)
    rank, stage, position = np.argwhere(plan.send_slot[0] >= 0)[0]

    def drop(table):
        table[0, rank, stage, position] = -1

    def swap(table):
        table[0, rank, stage, position] = (table[0, rank, stage, position] + 1) % 4

    with pytest.raises(fcp.InvalidPlanError, match="arrives"):
        fcp.validate_plan(broken(plan, "send_slot", drop))
    with pytest.raises(fcp.InvalidPlanError, match="arrives"):
        fcp.validate_plan(broken(plan, "send_slot", swap))
    with pytest.raises(fcp.InvalidPlanError, match="arrives"):
        fcp.validate_plan(broken(plan, "recv_block", lambda t: t[t >= 0].sort() or t.fill(-1)))


def test_a_round_that_is_no_matching_is_noticed():
    plan = example_plan("static")
    groups = list(map(list, plan.shape.groups))
    pairs = groups[0][0]
    groups[0][0] = (*pairs, (pairs[0][0], (pairs[0][1] + 1) % 4))
    shape = dataclasses.replace(plan.shape, groups=tuple(map(tuple, groups)))
    with pytest.raises(fcp.InvalidPlanError, match="not a matching"):
        fcp.validate_plan(dataclasses.replace(plan, shape=shape))


@pytest.mark.parametrize("name", ["local_columns", "stage_columns"])
def test_a_wrong_work_item_is_noticed(name):
    plan = example_plan()

    def other_column(table):
        table[..., 0] = (table[..., 0] + 1) % 3

    with pytest.raises(fcp.InvalidPlanError):
        fcp.validate_plan(broken(plan, name, other_column))


def test_a_missing_pair_is_noticed():
    plan = example_plan()

    def forget_last(table):
        rank = int(np.argmax(table[0, :, -1]))
        table[0, rank, table[0, rank] == table[0, rank, -1]] -= 1

    with pytest.raises(fcp.InvalidPlanError, match="never computed"):
        fcp.validate_plan(broken(plan, "local_row_starts", forget_last))


@pytest.mark.parametrize(
    ("name", "delta"),
    [
        ("fragment_row", 64 * 8 * 4),
        ("fragment_start", 1),
        ("fragment_length", -1),
        ("fragment_hi", 1),
    ],
)
def test_a_shifted_fragment_is_noticed(name, delta):
    plan = example_plan()
    for at in range(np.count_nonzero(plan.fragment_length)):

        def change(table, at=at):
            table[0, at] += delta

        with pytest.raises(fcp.InvalidPlanError):
            fcp.validate_plan(broken(plan, name, change))


def test_two_fragments_in_one_row_are_noticed():
    plan = example_plan()
    for at in range(1, np.count_nonzero(plan.fragment_length)):

        def overlap(table, at=at):
            table[0, at] = table[0, at - 1]

        with pytest.raises(fcp.InvalidPlanError):
            fcp.validate_plan(broken(plan, "fragment_row", overlap))


def test_a_lost_dispatch_chunk_is_noticed():
    plan = example_plan()

    def lose(table):
        table[tuple(np.argwhere(table[..., 0] >= 0)[0])] = -1

    for name in ("dispatch_send", "dispatch_recv"):
        with pytest.raises(fcp.InvalidPlanError, match="dispatch"):
            fcp.validate_plan(broken(plan, name, lose))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_save_and_load(tmp_path, transport):
    plan = example_plan(transport, rank_speeds=(1.0, 1.0, 2.0, 1.0))
    plan.save(tmp_path / "plan.npz")
    loaded = fcp.Plan.load(tmp_path / "plan.npz")
    assert (loaded.shape, loaded.config, loaded.stats) == (plan.shape, plan.config, plan.stats)
    for name in fcp.plan.TABLES:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(plan, name))
    fcp.validate_plan(loaded)


def test_static_takes_exactly_max_degree_rounds_and_ring_is_rotations():
    stats = example_plan("static").stats
    assert stats.num_rounds == stats.max_degree
    ring = fcp.make_plan([900], fcp.PlanConfig(4, 256, method="ring"))
    assert ring.shape.groups == ((1,), (2,), (3,)) and ring.trips.tolist() == [1, 1, 1]
    assert ring.stats.compute_imbalance < 0.01 and ring.stats.comm_imbalance == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_ranks=0), "num_ranks must be a positive integer, got 0"),
        (dict(tokens_per_rank=2.5), "tokens_per_rank must be a positive integer"),
        (dict(block_size=100), "block_size must be a multiple of 64, got 100"),
        (dict(method="rings"), "method must be one of fcp, ring"),
        (dict(transport="tcp"), "transport must be one of"),
        (dict(num_ranks=6, transport="xor"), "needs a power-of-two num_ranks, got 6"),
        (dict(num_kv_heads=7), "num_kv_heads must divide"),
        (dict(rank_speeds=(1.0,)), "rank_speeds must be 4 positive"),
        (dict(kv_dtype="int8"), "kv_dtype must be one of"),
        (dict(coalesce=True), "coalesce must be a positive integer"),
    ],
)
def test_bad_config_names_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        fcp.PlanConfig(**dict(num_ranks=4, tokens_per_rank=256) | changes)


def test_bad_segments_name_the_argument():
    config = fcp.PlanConfig(4, 256, block_size=64)
    with pytest.raises(ValueError, match=r"beyond the capacity .* 4 \* 256 = 1024"):
        fcp.make_plan([1025], config)
    with pytest.raises(ValueError, match="seqlens must not be negative"):
        fcp.make_plan([-1], config)
    with pytest.raises(ValueError, match="at least one row"):
        fcp.make_batch_plan([], config)


def test_planning_does_not_import_jax_and_jit_takes_the_plan_later():
    program = """
import sys, fcp_jax as fcp
plan = fcp.make_plan([100, 28], fcp.PlanConfig(2, 64, block_size=64))
fcp.validate_plan(plan)
assert "jax" not in sys.modules
import jax
leaves = jax.tree.leaves(plan)
assert len(leaves) == len(fcp.plan.TABLES), leaves
assert jax.jit(lambda plan: plan.trips.sum())(plan) == plan.trips.sum()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
