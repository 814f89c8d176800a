"""fcp.attention against dense float64 attention, on meshes of 1 to 8 devices."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from parity import assert_close, cp_mesh, operands, value_and_grads
from reference import dense_attention, positions_of, relative_error, segment_ids_of

import fcp_jax as fcp

BLOCK, TOKENS = 64, 100


def check(segments, ranks, mesh, **config):
    config = fcp.PlanConfig(
        **dict(num_ranks=ranks, tokens_per_rank=TOKENS, block_size=BLOCK, coalesce=3) | config
    )
    plan = fcp.make_plan(segments, config)
    fcp.validate_plan(plan)
    ids = segment_ids_of(as_segments(segments), config.capacity)
    args = operands(np.random.default_rng(len(ids)), config.capacity)
    plan = fcp.pad_plan(plan, WIDE)  # one compile for every example
    assert_close(value_and_grads(*args, plan, mesh), dense_attention(*args, ids, config.causal))


WIDE = (1024, 16, 8, 12, 8)


def as_segments(segments):
    return segments if isinstance(segments, fcp.Segments) else fcp.Segments.from_seqlens(segments)


@st.composite
def segment_lists(draw, capacity):
    kind = draw(st.sampled_from(["mixed", "giant", "short", "edges", "empty", "gaps"]))
    if kind == "giant":
        return [capacity - draw(st.integers(0, 3))]
    if kind == "empty":
        return [0] * draw(st.integers(0, 3))
    sizes = {
        "short": st.integers(1, 9),
        "edges": st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]),
    }.get(kind, st.integers(0, capacity // 2))
    lengths = draw(st.lists(sizes, min_size=1, max_size=capacity // 8))
    lengths = np.array(lengths)[np.cumsum(lengths) <= capacity]
    if kind != "gaps":
        return lengths
    room = (capacity - lengths.sum()) // (len(lengths) + 1)
    starts = np.cumsum(lengths) - lengths + room * np.arange(1, len(lengths) + 1)
    return fcp.Segments(starts.astype(np.int64), lengths.astype(np.int64))


@pytest.mark.parametrize(
    ("ranks", "causal"), [(1, True), (2, False), (3, True), (4, False), (8, True)]
)
def test_any_segments(ranks, causal):
    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(segment_lists(ranks * TOKENS))
    def run(segments):
        check(segments, ranks, cp_mesh(ranks), causal=causal)

    run()


UNEVEN = [333, 1, 64, 65, 63, 0, 128, 5, 20]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transport", ["static", "shift", "xor"])
def test_transports_and_axis_types(transport, kind):
    check(UNEVEN, 8, cp_mesh(8, kind), transport=transport)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("transport", ["static", "shift"])
def test_baselines(method, transport):
    check(UNEVEN, 8, cp_mesh(8), method=method, transport=transport)


def test_without_a_mesh():
    check(UNEVEN, 8, None)
    check([700], 8, None, method="ring", causal=False)


def test_transports_dispatch_alike():
    config = fcp.PlanConfig(8, TOKENS, block_size=BLOCK)
    x = np.random.default_rng(0).normal(size=(8 * TOKENS, 3)).astype(np.float32)
    moved = [
        fcp.dispatch(
            x,
            fcp.make_plan(UNEVEN, dataclasses.replace(config, transport=transport)),
            mesh=cp_mesh(8),
        )
        for transport in ("shift", "xor", "static")
    ]
    np.testing.assert_array_equal(moved[0], moved[1])
    np.testing.assert_array_equal(moved[0], moved[2])


MESHES = {
    "dp_cp": (("dp", "cp"), (2, 4)),
    "cp_tp": (("cp", "tp"), (4, 2)),
    "dp_cp_tp": (("dp", "cp", "tp"), (2, 2, 2)),
    "fsdp_dp_cp": (("fsdp", "dp", "cp"), (2, 2, 2)),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transport", ["auto", "static"])
@pytest.mark.parametrize("name", MESHES)
def test_meshes(name, transport, kind):
    axis_names, sizes = MESHES[name]
    mesh = jax.make_mesh(sizes, axis_names, axis_types=(kind,) * len(sizes))
    axis_size = dict(zip(axis_names, sizes, strict=True))
    batch = tuple(axis for axis in ("fsdp", "dp") if axis in axis_names)
    num_rows, ranks = int(np.prod([axis_size[axis] for axis in batch])), axis_size["cp"]
    config = fcp.PlanConfig(ranks, TOKENS, block_size=BLOCK, coalesce=2, transport=transport)
    rows = [[ranks * TOKENS - 3], [5] * 20, [64, 65, 3], []][:num_rows]  # very unequal
    plan = fcp.make_batch_plan(rows, config)
    fcp.validate_plan(plan)
    rng = np.random.default_rng(0)
    args = [operands(rng, config.capacity) for _ in rows]
    want = [
        dense_attention(*own, segment_ids_of(as_segments(row), config.capacity), True)
        for own, row in zip(args, rows, strict=True)
    ]
    q, k, v, dout = (np.stack(x) for x in zip(*args, strict=True))
    if num_rows == 1:
        q, k, v, dout = q[0], k[0], v[0], dout[0]

    @jax.jit
    def run(q, k, v, dout, plan):
        def attend(q, k, v):
            return fcp.attention(
                q, k, v, plan, mesh=mesh, batch_axis_name=batch or "dp", return_lse=True
            )

        out, pullback, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return out, lse, *pullback(dout)

    got = run(q, k, v, dout, plan)
    heads = "tp" if "tp" in axis_names else None
    lead = (batch,) if num_rows > 1 else ()
    lead_axes = len(lead) + 1
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, P(*lead, "cp", heads)), got[0].ndim)
    got = [np.asarray(x).reshape(num_rows, config.capacity, *x.shape[lead_axes:]) for x in got]
    for row in range(num_rows):
        assert_close([x[row] for x in got], want[row])


@pytest.mark.parametrize("heads", [(28, 7), (40, 8), (8, 1), (3, 3)])
def test_head_counts(heads):
    config = fcp.PlanConfig(2, TOKENS, block_size=BLOCK)
    args = operands(np.random.default_rng(0), config.capacity, heads, dim=4)
    ids = segment_ids_of(as_segments([90, 70]), config.capacity)
    got = value_and_grads(*args, fcp.make_plan([90, 70], config), cp_mesh(2))
    assert_close(got, dense_attention(*args, ids, True))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_good_as_one_device_whatever_the_rank_count(dtype):
    capacity, lengths = 1024, [700, 7, 200, 64]
    args = operands(np.random.default_rng(0), capacity, (2, 1), 16)
    args = [np.asarray(jnp.asarray(x, dtype)) for x in args]
    ids = segment_ids_of(as_segments(lengths), capacity)
    want = dense_attention(*args, ids, True)
    errors = {}
    for ranks in (1, 2, 8):
        config = fcp.PlanConfig(ranks, capacity // ranks, block_size=BLOCK, coalesce=2)
        mesh = None if ranks == 1 else cp_mesh(ranks)
        out, _, *grads = value_and_grads(*args, fcp.make_plan(lengths, config), mesh)
        assert all(x.dtype == dtype for x in (out, *grads))
        pairs = zip((out, *grads), (want[0], *want[2:]), strict=True)
        errors[ranks] = np.array([relative_error(x, y) for x, y in pairs])
    assert (errors[1] < 0.01).all() and (errors[1] > 1e-4).all()
    for ranks in (2, 8):
        assert (errors[ranks] <= 1.1 * errors[1]).all(), errors


def test_dropping_or_swapping_a_transfer_changes_the_result():
    config = fcp.PlanConfig(4, TOKENS, block_size=BLOCK, transport="xor")
    plan = fcp.make_plan([400], config)
    args = operands(np.random.default_rng(0), config.capacity)
    want = dense_attention(*args, np.ones(400, int), True)
    assert_close(value_and_grads(*args, plan, cp_mesh(4)), want)
    sends = np.argwhere(plan.send_slot >= 0)
    for wrong in (0, 1):  # slot 0 is also what an empty round carries: a dropped transfer
        table = plan.send_slot.copy()
        at = next(tuple(i) for i in sends if table[tuple(i)] != wrong)
        table[at] = wrong
        bad = dataclasses.replace(plan, send_slot=table)
        out, _, *grads = value_and_grads(*args, bad, cp_mesh(4))
        assert relative_error(out, want[0]) > 1e-2
        assert relative_error(grads[1], want[3]) > 1e-2


def test_plan_layout_is_the_caller_layout_between_dispatch_and_undispatch():
    config = fcp.PlanConfig(4, TOKENS, block_size=BLOCK)
    plan, mesh = fcp.make_plan(UNEVEN[:3], config), cp_mesh(4)
    args = operands(np.random.default_rng(0), config.capacity)
    want = value_and_grads(*args, plan, mesh)
    moved = fcp.dispatch(args, plan, mesh=mesh)
    got = value_and_grads(*moved, plan, mesh, layout="plan")
    for x, y in zip((got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        np.testing.assert_array_equal(fcp.undispatch(x, plan, mesh=mesh), y)


def test_gradient_through_lse():
    config = fcp.PlanConfig(2, TOKENS, block_size=BLOCK)
    plan = fcp.make_plan([150], config)
    q, k, v, _ = operands(np.random.default_rng(0), config.capacity)

    def loss(q, k):
        _, lse = fcp.attention(q, k, v, plan, mesh=cp_mesh(2), return_lse=True)
        return jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    def dense_loss(q, k):
        scores = jnp.einsum("qhgd,khd->hgqk", q.reshape(200, 2, 2, 8), k)[..., :150, :150]
        scores = jnp.where(jnp.tri(150, dtype=bool), scores * 8**-0.5, -jnp.inf)
        return jax.nn.logsumexp(scores, axis=-1).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1)))(q, k) for f in (loss, dense_loss))
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < 1e-5


def test_transposed_views_and_remat():
    config = fcp.PlanConfig(2, TOKENS, block_size=BLOCK)
    plan, mesh = fcp.make_plan([150, 20], config), cp_mesh(2)
    args = operands(np.random.default_rng(0), config.capacity)
    want = value_and_grads(*args, plan, mesh)
    views = [np.asfortranarray(x) for x in args]
    policy = jax.checkpoint_policies.save_only_these_names("fcp_out", "fcp_lse")

    @functools.partial(jax.checkpoint, policy=policy)
    def attend(q, k, v):
        return fcp.attention(q, k, v, plan, mesh=mesh)

    @jax.jit
    def run(q, k, v, dout):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    for x, y in zip(run(*views), (want[0], *want[2:]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_one_trace_serves_many_plans():
    traces = 0

    @jax.jit
    def step(q, k, v, plan):
        nonlocal traces
        traces += 1
        return fcp.attention(q, k, v, plan, mesh=cp_mesh(4))

    config = fcp.PlanConfig(4, TOKENS, block_size=BLOCK)
    q, k, v, _ = operands(np.random.default_rng(0), config.capacity)
    rng = np.random.default_rng(0)
    for _ in range(10):
        lengths = rng.integers(1, 120, 6)
        lengths = lengths[np.cumsum(lengths) <= config.capacity]
        step(q, k, v, fcp.pad_plan(fcp.make_plan(lengths, config), WIDE))
    assert traces == 1


def test_a_stale_plan_gives_nan_or_raises():
    config = fcp.PlanConfig(4, TOKENS, block_size=BLOCK)
    plan, mesh = fcp.make_plan([300, 100], config), cp_mesh(4)
    q, k, v, _ = operands(np.random.default_rng(0), config.capacity)
    good = segment_ids_of(as_segments([300, 100]), 400)
    batches = {
        "good": (good, positions_of(good), 0),
        "renamed": (np.where(good == 1, 9, 4).astype(np.int32), positions_of(good), 0),
        "moved": (segment_ids_of(as_segments([299, 101]), 400), positions_of(good), 1),
        "joined": (np.ones(400, np.int32), positions_of(good), 1),
        "padded": (np.where(np.arange(400) < 399, good, 0).astype(np.int32), None, 1),
        "backwards": (good, positions_of(good)[::-1].copy(), 2),
        "constant": (None, np.zeros(400, np.int32), 2),
        "jumping": (None, positions_of(good) * 3 + 1000, 0),
    }

    @jax.jit
    def run(q, k, v, plan, ids, positions):
        kind = dict(segment_ids=ids, positions=positions)
        out = fcp.attention(q, k, v, plan, mesh=mesh, **kind)
        return out, fcp.check_batch(plan, mesh=mesh, **kind), fcp.check_batch(plan, **kind)

    for name, (ids, positions, flags) in batches.items():
        out, on_mesh, on_one = run(q, k, v, plan, ids, positions)
        assert int(on_mesh) == int(on_one) == flags, name
        assert bool(jnp.isnan(out).all()) == bool(flags), name
        if flags:
            argument = "segment_ids" if flags == 1 else "positions"
            with pytest.raises(ValueError, match=argument):
                fcp.attention(q, k, v, plan, mesh=mesh, segment_ids=ids, positions=positions)


def test_checks_hold_in_the_plan_layout_too():
    config = fcp.PlanConfig(4, TOKENS, block_size=BLOCK)
    plan, mesh = fcp.make_plan([300, 7, 90], config), cp_mesh(4)
    ids = segment_ids_of(as_segments([300, 7, 90]), 400)
    moved = fcp.dispatch((ids, positions_of(ids)), plan, mesh=mesh)
    kind = dict(layout="plan", mesh=mesh)
    flags = fcp.check_batch(plan, segment_ids=moved[0], positions=moved[1], **kind)
    assert int(flags) == 0
    stale = fcp.dispatch(np.roll(ids, 1), plan, mesh=mesh)
    assert int(fcp.check_batch(plan, segment_ids=stale, **kind)) == 1


def bad_calls():
    x = jnp.zeros
    yield dict(q=x((4, TOKENS, 4, 8))), "q, k, v must be"
    yield dict(q=x((2 * TOKENS, 3, 8))), "num_kv_heads must divide"
    yield dict(q=x((2 * TOKENS + 2, 4, 8))), "q must have leading axes"
    yield dict(k=x((TOKENS, 2, 8)), v=x((TOKENS, 2, 8))), "k must have leading axes"
    yield dict(q=x((2 * TOKENS, 4, 16))), "share head_dim"
    yield dict(q=x((2 * TOKENS, 4, 8), jnp.bfloat16)), "share one dtype"
    whole = [x((2 * TOKENS, n, 8), jnp.int32) for n in (4, 2, 2)]
    yield dict(zip("qkv", whole, strict=True)), "share one dtype of float32"
    yield dict(layout="ring"), "layout must be"
    yield dict(axis_name="x"), "axis_name must be one of"
    yield dict(mesh=cp_mesh(4)), "plan is for num_ranks=2, but mesh axis 'cp' has 4"
    ids = np.ones(2 * TOKENS, np.int32)
    yield (
        dict(segment_ids=ids[:7]),
        r"segment_ids must have shape \(1, 200\) or .*got \(7,",
    )
    yield dict(segment_ids=ids.reshape(2, -1)), r"segment_ids must have shape .* got \(2, 100\)"
    yield dict(segment_ids=ids > 0), "segment_ids must be an array of integers, got bool"
    yield dict(positions=ids.tolist()), "positions must be an array of integers, got list"
    yield dict(plan=[100]), "plan must be a Plan, as make_plan returns, got list"
    yield dict(mesh=jax.devices()), "mesh must be a jax.sharding.Mesh of devices, got list"
    yield dict(mesh=cp_mesh(2).abstract_mesh), "mesh must be a .* got AbstractMesh"
    yield dict(q=[0.0]), "q must be an array, got list"
    # XLA's partitioner ends the process at arrays of no heads.
    yield dict(q=x((2 * TOKENS, 0, 8))), r"q must have no axis of size 0, got \(200, 0, 8\)"
    yield dict(k=x((2 * TOKENS, 0, 8)), v=x((2 * TOKENS, 0, 8))), "k must have no axis of size 0"
    for scale in (0.0, -1.0, np.nan, np.inf, "1", jnp.float32(1)):
        yield dict(scale=scale), "scale must be a positive Python or numpy number, got"
    yield dict(head_axis_name="cp"), "must name different mesh axes, got 'cp', 'dp' and 'cp'"
    yield dict(implementation="tpu"), "implementation must be one of"
    for reserve_sms in (-1, 132, 6.0, True):
        yield dict(reserve_sms=reserve_sms), f"reserve_sms must be .* to 131, got {reserve_sms!r}"
    tp = jax.make_mesh((2, 4), ("cp", "tp"))
    yield dict(mesh=tp), "k has 2 heads, which the 4 devices of mesh axis 'tp' do not divide"


def test_bad_calls_name_the_argument():
    plan = fcp.make_plan([100], fcp.PlanConfig(2, TOKENS, block_size=BLOCK))
    good = dict(
        q=jnp.zeros((2 * TOKENS, 4, 8)),
        k=jnp.zeros((2 * TOKENS, 2, 8)),
        v=jnp.zeros((2 * TOKENS, 2, 8)),
        mesh=cp_mesh(2),
        plan=plan,
    )
    for changes, message in bad_calls():
        call = good | changes
        operands = [call.pop(name) for name in ("q", "k", "v", "plan")]
        with pytest.raises((TypeError, ValueError), match=message):
            fcp.attention(*operands, **call)


def test_bad_moves_and_checks_name_the_argument():
    plan = fcp.make_plan([100], fcp.PlanConfig(2, TOKENS, block_size=BLOCK))
    mesh = jax.make_mesh((2, 2), ("cp", "tp"))
    x = jnp.zeros((2 * TOKENS, 4))
    ids = np.ones(2 * TOKENS, np.int32)
    bad = [
        (lambda: fcp.dispatch([1.0], plan, mesh=mesh), "x must hold arrays only, got float"),
        (lambda: fcp.dispatch(x[1:], plan), r"x must be \[1, 200, ...\] or \[200, ...\] .* \(199,"),
        (lambda: fcp.undispatch(x, None), "plan must be a Plan, .* got NoneType"),
        (lambda: fcp.check_batch(plan), "segment_ids or positions must be given"),
        (
            lambda: fcp.check_batch(plan, positions=ids[1:]),
            r"positions must have shape .*\(199,",
        ),
        (lambda: fcp.check_batch(plan, positions=ids, layout="x"), "layout must be .* got 'x'"),
        (lambda: fcp.explain(x, x, "plan"), "plan must be a Plan, .* got str"),
    ]
    for spec in (("cp",), ("dp",), ("tp", "tp")):
        move = functools.partial(fcp.dispatch, x[..., None], plan, mesh=mesh, feature_spec=spec)
        bad += [(move, r"feature_spec must name mesh axes of \['tp'\]")]
    long = functools.partial(fcp.dispatch, (x, x[:, 0]), plan, mesh=mesh, feature_spec=("tp",))
    bad += [(long, "feature_spec must have at most 0 entries")]
    for call, message in bad:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_bad_layers_name_the_argument():
    plan = fcp.make_plan([100], fcp.PlanConfig(2, TOKENS, block_size=BLOCK))
    x, positions = jnp.zeros((2 * TOKENS, 8)), jnp.arange(2 * TOKENS)

    def layer(positions=positions, **more):
        return fcp.FCPAttention(8, **dict(num_heads=2, rngs=nnx.Rngs(0)) | more)(
            x, plan, positions=positions
        )

    for changes, message in (
        (dict(num_heads=0), "num_heads and num_kv_heads must be at least 1, got 0, 0"),
        (dict(num_kv_heads=0), "num_heads and num_kv_heads must be at least 1, got 2, 0"),
        (dict(num_heads=9), "head_dim must be at least 1, got 0 for in_features=8, num_heads=9"),
        (dict(head_dim=3), "head_dim must be even for RoPE, got 3"),
        (dict(rope_theta=0.0), "rope_theta must be positive or None, got 0.0"),
        (dict(layout="ring"), "layout must be .* got 'ring'"),
        (dict(positions=None), "positions must be given where rope_theta is set"),
        (
            dict(positions=positions[1:]),
            r"positions must be of the tokens \(200,\), .*\(199,",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**changes)
    assert layer().shape == x.shape
    with pytest.raises(ValueError, match="layout must be"):
        fcp.FCPAttentionFn(layout="ring")


@pytest.mark.parametrize("reserve_sms", [0, 6, 8])
def test_kernels_leave_reserved_multiprocessors_alone(reserve_sms):
    plan = fcp.make_plan([16384], fcp.PlanConfig(2, 8192, block_size=512))
    q, k = (jax.ShapeDtypeStruct((16384, heads, 64), jnp.bfloat16) for heads in (16, 8))
    kind = dict(mesh=cp_mesh(2), implementation="mosaic_gpu", reserve_sms=reserve_sms)

    def step(q, k, v):
        out, pullback = jax.vjp(lambda *x: fcp.attention(*x, plan, **kind), q, k, v)
        return pullback(out)

    # Local work and a stage, forward and backward; a stage may have fewer tiles of keys than that.
    grids = re.findall(r"grid=\((\d+),\)", str(jax.make_jaxpr(step)(q, k, k)))
    assert sorted(map(int, grids))[1:] == [132 - reserve_sms] * 3


def test_layers_pass_reserved_multiprocessors_on():
    plan = fcp.make_plan([128], fcp.PlanConfig(1, 128, block_size=64))
    x, positions = jnp.zeros((128, 8)), jnp.arange(128)
    layer = fcp.FCPAttention(8, 2, reserve_sms=-1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="reserve_sms must be an int from 0 to 131, got -1"):
        layer(x, plan, positions=positions)
    attention_fn = fcp.FCPAttentionFn(reserve_sms=-1)
    with attention_fn.using(plan), pytest.raises(ValueError, match="reserve_sms must be an int"):
        attention_fn(*[x.reshape(1, 128, 2, 4)] * 3)


def test_a_plan_of_rows_needs_a_mesh_of_rows():
    plan = fcp.make_batch_plan([[5], [6]], fcp.PlanConfig(2, TOKENS, block_size=BLOCK))
    q = jnp.zeros((2, 2 * TOKENS, 2, 8))
    with pytest.raises(ValueError, match="batch_axis_name must name mesh axes"):
        fcp.attention(q, q, q, plan, mesh=cp_mesh(2))
    with pytest.raises(ValueError, match="leading axis of the plan's 2 rows"):
        fcp.attention(q[0], q[0], q[0], plan, mesh=cp_mesh(2))
