# pyrefly: ignore-errors
# ruff: noqa: E741, E501
"""Backward block attention on Hopper: dq, dk and dv in one pass over the tiles.

One thread block takes a (kv tile, kv head) unit: K and V stay in shared memory, dk and dv in
registers, and the query tiles of every head that shares the kv head stream past, so the sum over
the group costs nothing. Each step multiplies five times (S, dP, dV, dK, dQ) and adds its dq tile to
global memory; a second kernel for dq would multiply seven times.

Adding tiles of dq from many thread blocks in float32 would make the last bits depend on their
order. Here dq is accumulated in int32 fixed point, whose sum does not: the quantum of a row is
chosen from a bound on its |dq|, so that it cannot overflow (`_quantum`), and is about 1e-5 of the
largest rounding error that bfloat16 products make.

With a warpgroup of its own for dq, the two others take weights and gradients of scores through
shared memory; without it they have the registers to multiply from there, as FlashAttention-3 does.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, vector

from pallas_kernels.mgpu_common import (
    ACC,
    COLUMN,
    LOG2_E,
    ROW,
    ROWS,
    TILED,
    divide,
    load,
    query_spans,
    take_number,
)
from pallas_kernels.tile_schedule import TileSchedule
from pallas_kernels.work_list import TokenMask

_DS_BUFFERS = 2
TILED_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    mask: TokenMask,
    schedule: TileSchedule,
    *,
    scale: float,
    config,
    num_ctas: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
      q: [query_rows, num_q_heads, head_dim], bfloat16 or float16.
      k: [kv_rows, num_kv_heads, head_dim].
      v: like k.
      dout: like q.
      lse: float32 [num_q_heads, query_rows], natural log.
      delta: float32 [num_q_heads, query_rows].
      mask: which token pairs count.
      schedule: from `tile_schedule.kv_major`, with query tiles of 64 and kv tiles of 128.
      scale: multiplies q.k; positive.
      config: a `BackwardConfig`.
      num_ctas: thread blocks to launch, one per SM.
      interpret: run in the Pallas interpreter, on any machine.

    Returns:
      (dq, dk, dv), float32.
    """
    num_rows, num_q_heads, dim = q.shape
    num_kv_rows, num_kv_heads, _ = k.shape
    group, dtype, stages = num_q_heads // num_kv_heads, q.dtype, config.stages
    num_ctas = max(1, min(num_ctas, num_kv_rows // (2 * ROWS) * num_kv_heads))
    num_threads = 4 if config.dq_warpgroup else 3
    # With a warpgroup for dq, consumers release the tiles of a step in the next one, and in step 0
    # those of a step -1.
    lag = 1 if config.dq_warpgroup else 0
    log2_scale = scale * LOG2_E

    quantum, stats = row_values(k, v, dout, lse, delta, scale)

    def kernel(
        q_ref, k_ref, v_ref, do_ref, stats_ref, spans_ref, index_ref, order_ref, num_live_ref,
        starts_ref, num_masked_ref, tiles_ref, counter_ref, dq_ref, dk_out, dv_out, k_smem, v_smem,
        index_smem, q_smem, do_smem, stats_smem, spans_smem, ds_smem, dq_smem, p_smem, kv_full, kv_empty, q_full,
        do_full, empty, spans_full, ds_full, ds_empty, unit_smem, unit_full, unit_empty,
    ):  # fmt: skip
        wg = lax.axis_index("wg")

        def begin_at(ref, start):
            if not interpret:  # which adds it at the end instead
                ref[...] = start

        def result(ref, start, wait_n):
            value = plgpu.wgmma_accumulator_load(ref, wait_n=wait_n)
            return value + start if interpret else value

        def run_units(run_unit, takes=False):
            return fold_units(
                run_unit, takes,
                (counter_ref, order_ref, num_live_ref, starts_ref, num_masked_ref),
                (unit_smem, unit_full, unit_empty),
                num_sections=num_kv_heads, num_ctas=num_ctas, interpret=interpret,
            )  # fmt: skip

        @pl.when(wg == num_threads - 1)
        def _copy():
            plgpu.set_max_registers(config.copy_registers, action="decrease")

            def run_unit(r, unit, step):
                kv_head, tile, begin, count, num_masked = unit
                pl.when(r > 0)(lambda: plgpu.barrier_wait(kv_empty))
                for w in range(2):
                    rows = pl.ds(tile * (2 * ROWS) + w * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(k_ref.at[rows, kv_head], k_smem.at[w], kv_full)
                    plgpu.copy_gmem_to_smem(v_ref.at[rows, kv_head], v_smem.at[w], kv_full)
                    plgpu.copy_gmem_to_smem(index_ref.at[rows], index_smem.at[w], kv_full)

                def copy_tile(head, j, step):
                    slot = lax.rem(step, stages)
                    q_tile = tiles_ref[begin + j]
                    rows = pl.ds(q_tile * ROWS, ROWS)
                    pl.when(step >= stages - lag)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    plgpu.copy_gmem_to_smem(q_ref.at[rows, head], q_smem.at[slot], q_full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        stats_ref.at[head, q_tile], stats_smem.at[slot], q_full.at[slot]
                    )

                    @pl.when(j < num_masked)
                    def _():
                        plgpu.copy_gmem_to_smem(
                            spans_ref.at[q_tile], spans_smem.at[slot], spans_full.at[slot]
                        )

                    plgpu.copy_gmem_to_smem(
                        do_ref.at[rows, head], do_smem.at[slot], do_full.at[slot]
                    )
                    return step + 1

                def run_head(head, step):
                    q_head = kv_head * group + head
                    return lax.fori_loop(0, count, lambda j, s: copy_tile(q_head, j, s), step)

                return lax.fori_loop(0, group, run_head, step)

            rounds, steps = run_units(run_unit, takes=True)
            if interpret:  # which wants every arrival observed

                def drain(j, _):
                    plgpu.barrier_wait(empty.at[lax.rem(j + stages - lag, stages)])

                lax.fori_loop(jnp.maximum(steps - stages + lag, 0), steps + lag, drain, None)
                pl.when(rounds > 0)(lambda: plgpu.barrier_wait(kv_empty))

        def dq_product(buffer, columns):
            def product(ref):
                for w in range(2):
                    plgpu.wgmma(ref, ds_smem.at[buffer, w].T, k_smem.at[w, :, columns])
                return plgpu.wgmma_accumulator_load(ref, wait_n=0)

            return pl.run_scoped(product, plgpu.ACC((ROWS, ROWS), jnp.float32))

        def _dq():
            plgpu.set_max_registers(config.dq_registers, action="decrease")
            num_chunks = dim // ROWS
            for i in range(_DS_BUFFERS):
                plgpu.barrier_arrive(ds_empty.at[i])
            plgpu.barrier_arrive(empty.at[stages - 1])  # as the others do in step 0

            def run_unit(_, unit, step):
                kv_head, _, begin, count, _ = unit
                plgpu.barrier_wait(kv_full)

                def visit(head, j, step):
                    """Dq of one query tile and head: dS @ K."""
                    slot, buffer = lax.rem(step, stages), lax.rem(step, _DS_BUFFERS)
                    q_rows = pl.ds(tiles_ref[begin + j] * ROWS, ROWS)
                    plgpu.barrier_wait(q_full.at[slot])
                    factor = load(stats_smem.at[slot, 2], ROW)
                    plgpu.barrier_arrive(empty.at[slot])
                    plgpu.barrier_wait(ds_full.at[buffer])
                    for chunk in range(num_chunks):
                        columns = pl.ds(chunk * ROWS, ROWS)
                        dq = dq_product(buffer, columns)
                        if chunk == num_chunks - 1:
                            plgpu.barrier_arrive(ds_empty.at[buffer])
                        target = dq_ref.at[q_rows, kv_head * group + head, columns]
                        stage = dq_smem.at[lax.rem(step * num_chunks + chunk, 2)]
                        add_dq(dq, factor, target, stage, pending=1, interpret=interpret)
                    return step + 1

                def run_head(head, step):
                    return lax.fori_loop(0, count, lambda j, s: visit(head, j, s), step)

                step = lax.fori_loop(0, group, run_head, step)
                plgpu.barrier_arrive(kv_empty)
                return step

            run_units(run_unit)
            plgpu.wait_smem_to_gmem(0)

        if config.dq_warpgroup:
            pl.when(wg == 2)(_dq)

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def run_unit(_, unit, first_step):
                kv_head, tile, begin, count, num_masked = unit
                rows = pl.ds(tile * (2 * ROWS) + wg * ROWS, ROWS)
                plgpu.barrier_wait(kv_full)

                def stat(slot, i):
                    return lax.broadcast_in_dim(
                        load(stats_smem.at[slot, i], COLUMN), (ROWS, ROWS), [1]
                    )

                def weights(s, slot, masked):
                    if masked:
                        plgpu.barrier_wait(spans_full.at[slot])
                        s = visible_scores(s, spans_smem.at[slot], index_smem.at[wg])
                    return jnp.exp2(s * log2_scale)

                def scores(ref, slot, me):
                    plgpu.barrier_wait(q_full.at[slot])
                    minus_lse = stat(slot, 0)
                    begin_at(ref, minus_lse)
                    plgpu.wgmma(ref, k_smem.at[me], q_smem.at[slot].T)
                    return result(ref, minus_lse, wait_n=0)

                def visit(dk_ref, dv_ref, masked, head, j, step):
                    """One query tile of one head, where another warpgroup computes dq."""
                    slot, buffer = lax.rem(step, stages), lax.rem(step, _DS_BUFFERS)
                    me = lax.optimization_barrier(wg)  # keeps addresses out of the loop's registers

                    def weigh(ref):
                        s = scores(ref, slot, me)
                        # The products of the step before are finished too, so its tiles may go.
                        plgpu.barrier_arrive(empty.at[lax.rem(step + stages - 1, stages)])
                        return weights(s, slot, masked)

                    p = pl.run_scoped(weigh, square)
                    p_smem.at[me][...] = p.astype(dtype)
                    plgpu.commit_smem()

                    def gradient(ref):
                        plgpu.barrier_wait(do_full.at[slot])
                        minus_delta = stat(slot, 1)
                        begin_at(ref, minus_delta)
                        plgpu.wgmma(ref, v_smem.at[me], do_smem.at[slot].T)
                        plgpu.wgmma(dv_ref, p_smem.at[me], do_smem.at[slot])
                        return (p * result(ref, minus_delta, wait_n=1)).astype(dtype)

                    ds = pl.run_scoped(gradient, square)
                    plgpu.barrier_wait(ds_empty.at[buffer])
                    ds_smem.at[buffer, me][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_full.at[buffer])
                    plgpu.wgmma(dk_ref, ds_smem.at[buffer, me], q_smem.at[slot])
                    return step + 1

                def visit_with_dq(dk_ref, dv_ref, masked, head, j, step):
                    """One query tile of one head, and half of the columns of its dq."""
                    slot, buffer = lax.rem(step, stages), lax.rem(step, _DS_BUFFERS)
                    me = lax.optimization_barrier(wg)
                    q_tile = tiles_ref[begin + j]

                    def both(s_ref, dp_ref):
                        s = scores(s_ref, slot, me)
                        plgpu.barrier_wait(do_full.at[slot])
                        minus_delta = stat(slot, 1)
                        begin_at(dp_ref, minus_delta)
                        plgpu.wgmma(dp_ref, v_smem.at[me], do_smem.at[slot].T)
                        p = weights(s, slot, masked)
                        dp = result(dp_ref, minus_delta, wait_n=0)
                        return p.astype(dtype), (p * dp).astype(dtype)

                    p, ds = pl.run_scoped(both, square, square)
                    # The other warpgroup has read what was here: it has shared the step between.
                    ds_smem.at[buffer, me][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_full.at[buffer])
                    if interpret:  # which wants left operands in shared memory
                        p_smem.at[me][...] = p
                        p, ds = p_smem.at[me], ds_smem.at[buffer, me]
                    plgpu.wgmma(dv_ref, p, do_smem.at[slot])
                    plgpu.wgmma(dk_ref, ds, q_smem.at[slot])
                    plgpu.barrier_wait(ds_full.at[buffer])
                    columns = pl.ds(pl.multiple_of(me * ROWS, ROWS), ROWS)
                    dq = dq_product(buffer, columns)
                    factor = load(stats_smem.at[slot, 2], ROW)
                    plgpu.barrier_arrive(empty.at[slot])
                    q_rows = pl.ds(q_tile * ROWS, ROWS)
                    target = dq_ref.at[q_rows, kv_head * group + head, columns]
                    add_dq(dq, factor, target, dq_smem.at[me], pending=0, interpret=interpret)
                    return step + 1

                square = plgpu.ACC((ROWS, ROWS), jnp.float32)

                def run_heads(dk_ref, dv_ref):
                    visit_tile = functools.partial(
                        visit if config.dq_warpgroup else visit_with_dq, dk_ref, dv_ref
                    )

                    def run_head(head, step):
                        for first, end, masked in (
                            (0, num_masked, True),
                            (num_masked, count, False),
                        ):
                            step = lax.fori_loop(
                                first, end, functools.partial(visit_tile, masked, head), step
                            )
                        return step

                    end = lax.fori_loop(0, group, run_head, first_step)
                    dk, dv = (plgpu.wgmma_accumulator_load(x, wait_n=0) for x in (dk_ref, dv_ref))
                    plgpu.barrier_arrive(kv_empty)
                    dk_out.at[rows, kv_head][...] = dk * scale
                    dv_out.at[rows, kv_head][...] = dv
                    return end

                return pl.run_scoped(run_heads, *[plgpu.ACC((ROWS, dim), jnp.float32)] * 2)

            _, steps = run_units(run_unit)
            if not config.dq_warpgroup:
                plgpu.wait_smem_to_gmem(0)
            elif interpret:  # which wants every arrival observed
                plgpu.barrier_arrive(empty.at[lax.rem(steps + stages - 1, stages)])
                for i in range(_DS_BUFFERS):
                    plgpu.barrier_wait(ds_empty.at[lax.rem(steps + i, _DS_BUFFERS)])

    return launch(
        kernel,
        scratch_types=dict(
            k_smem=plgpu.SMEM((2, ROWS, dim), dtype, transforms=TILED),
            v_smem=plgpu.SMEM((2, ROWS, dim), dtype, transforms=TILED),
            index_smem=plgpu.SMEM((2, ROWS), jnp.int32),
            q_smem=plgpu.SMEM((stages, ROWS, dim), dtype, transforms=TILED),
            do_smem=plgpu.SMEM((stages, ROWS, dim), dtype, transforms=TILED),
            stats_smem=plgpu.SMEM((stages, 3, ROWS), jnp.float32),
            spans_smem=plgpu.SMEM((stages, 2, ROWS), jnp.int32),
            ds_smem=plgpu.SMEM((_DS_BUFFERS, 2, ROWS, ROWS), dtype, transforms=TILED),
            dq_smem=plgpu.SMEM((2, ROWS, ROWS), jnp.int32, transforms=TILED_32),
            p_smem=None
            if not config.dq_warpgroup and not interpret
            else plgpu.SMEM((2, ROWS, ROWS), dtype, transforms=TILED),
            kv_full=plgpu.Barrier(num_arrivals=6),
            kv_empty=plgpu.Barrier(num_arrivals=num_threads - 1),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            do_full=plgpu.Barrier(num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=num_threads - 1, num_barriers=stages),
            spans_full=plgpu.Barrier(num_barriers=stages),
            ds_full=plgpu.Barrier(num_arrivals=2, num_barriers=_DS_BUFFERS),
            ds_empty=plgpu.Barrier(num_barriers=_DS_BUFFERS),
            unit_smem=plgpu.SMEM((2, 1), jnp.int32),
            unit_full=plgpu.Barrier(num_barriers=2),
            unit_empty=plgpu.Barrier(num_arrivals=num_threads, num_barriers=2),
        ),
        num_ctas=num_ctas,
        num_threads=num_threads,
        interpret=interpret,
        operands=(q, k, v, dout, stats, query_spans(mask), mask.kv_index, *schedule),
        quantum=quantum,
    )


def launch(
    kernel, *, scratch_types: dict, num_ctas, num_threads, interpret, operands, quantum
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs a backward kernel, whose refs are the operands, a counter, dq as int32, dk and dv."""
    run = plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=scratch_types,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=num_threads,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    q, k, v, *_ = operands
    counter, dq, dk, dv = (
        jax.new_ref(jnp.zeros(shape, dt))
        for shape, dt in (
            ((1,), jnp.int32),
            (q.shape, jnp.int32),
            (k.shape, jnp.float32),
            (v.shape, jnp.float32),
        )
    )
    run(*operands, counter, dq, dk, dv)
    return dq[...] * quantum.T[..., None], dk[...], dv[...]


def visible_scores(s: jax.Array, spans_ref, index_ref) -> jax.Array:
    """Scores [keys, queries], -inf where the query does not see the key."""
    lo, width = (
        lax.broadcast_in_dim(load(spans_ref.at[i], COLUMN), s.shape, [1]) for i in range(2)
    )
    place = lax.broadcast_in_dim(load(index_ref, ROW), s.shape, [0])
    seen = (place - lo).astype(jnp.uint32) <= width.astype(jnp.uint32)
    return jnp.where(seen, s, -jnp.inf)


def add_dq(dq: jax.Array, factor, target, stage, *, pending: int, interpret: bool) -> None:
    """Adds dq * factor to the int32 target, through `stage` in shared memory.

    Up to `pending` copies may still read other buffers.
    """
    factors = lax.broadcast_in_dim(factor, dq.shape, [0])
    if interpret:  # which has no reductions
        target[...] += (dq * factors).astype(jnp.int32)
        return
    plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
    stage[...] = _multiply_to_int32(dq, factors)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, target, reduction_op="add")


def fold_units(run_unit, takes, lists, channel, *, num_sections, num_ctas, interpret):
    """Folds step = run_unit(r, unit, step) over the units of this thread block, from step 0.

    Units of work, (kv head, kv tile), go to whoever is free: the warpgroup that copies takes the
    next number and tells the others. Heads one after the other keep the tiles and dq that all
    thread blocks work on in L2; longest first evens the ends.

    Args:
      run_unit: a unit is (kv head, kv tile, its first visit, visits, how many are masked).
      takes: whether this warpgroup takes the numbers.
      lists: refs of the counter and of a `TileSchedule` without its pieces.
      channel: int32 [2, 1] in shared memory and its barriers, full and empty.
      num_sections: kv heads.
      num_ctas: thread blocks.
      interpret: whether this is the interpreter, which has no counter.

    Returns:
      How many units there were, and the last step.
    """
    counter_ref, order_ref, num_live_ref, starts_ref, num_masked_ref = lists
    unit_smem, unit_full, unit_empty = channel
    num_live = num_live_ref[0]

    def next_unit(r):
        if interpret:
            return r * num_ctas + lax.axis_index("cta")
        slot = lax.rem(r, 2)
        if takes:
            pl.when(r >= 2)(lambda: plgpu.barrier_wait(unit_empty.at[slot]))
            take_number(counter_ref, unit_smem.at[slot])
            plgpu.barrier_arrive(unit_full.at[slot])
        plgpu.barrier_wait(unit_full.at[slot])
        unit = lax.optimization_barrier(unit_smem[slot, 0])
        plgpu.barrier_arrive(unit_empty.at[slot])
        return unit

    def body(state):
        r, unit, step = state
        kv_head, row = divide(unit, jnp.maximum(num_live, 1))
        tile = order_ref[row]
        begin = starts_ref[tile]
        unit = kv_head, tile, begin, starts_ref[tile + 1] - begin, num_masked_ref[tile]
        step = run_unit(r, unit, step)
        return r + 1, next_unit(r + 1), step

    zero = jnp.int32(0)
    start = zero, next_unit(zero), zero
    rounds, _, steps = lax.while_loop(lambda state: state[1] < num_live * num_sections, body, start)
    return rounds, steps


def _multiply_to_int32(x, factor):
    """X * factor as int32, for products below 2**30 in absolute value, on the FMA pipe.

    The conversion instruction shares a slow unit with exp2. Here the product is rounded to a
    multiple of 512 by adding a number of 2**32 to 2**33, where floats are 512 apart, and the rest
    to an integer by adding one of 2**23 to 2**24. The bits of the two sums, the former shifted by
    9, add up to the result: the bits of the two numbers themselves cancel in 32 bits.
    """
    fine = 1.5 * 2**23
    coarse = float(2**32 + ((-0x4B400000) & 0xFFFFFFFF))  # 0x4B400000 are the bits of `fine`

    @plgpu.inline_mgpu(
        arg_types=(ACC, ACC), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=ACC)
    )
    def multiply(ctx, x, factor):
        del ctx

        def one(x, factor):
            def constant(value):
                value = ir.FloatAttr.get(ir.F32Type.get(), value)
                if isinstance(x.type, ir.VectorType):
                    value = ir.DenseElementsAttr.get_splat(x.type, value)
                return arith.constant(x.type, value)

            def bits(y):
                i32 = ir.IntegerType.get_signless(32)
                if isinstance(y.type, ir.VectorType):
                    i32 = ir.VectorType.get(y.type.shape, i32)
                return arith.bitcast(i32, y)

            high = math.fma(x, factor, constant(coarse))
            low = math.fma(x, factor, arith.subf(constant(fine + coarse), high))
            high, low = bits(high), bits(low)
            nine = arith.constant(ir.IntegerType.get_signless(32), 9)
            if isinstance(high.type, ir.VectorType):
                nine = vector.broadcast(high.type, nine)
            return arith.addi(arith.shli(high, nine), low)

        return x._pointwise(one, factor, output_is_signed=True)

    return multiply(x, factor)


def row_values(k, v, dout, lse, delta, scale: float) -> tuple[jax.Array, jax.Array]:
    """Quantum of every row, and what kernels need of 64 rows, float32 [head, tile, 3, row].

    The latter are what S and dP begin with (a row that saw nothing gets weight 0), and
    scale / quantum.
    """
    quantum = _quantum(k, v, dout, delta, scale)
    stats = jnp.stack(
        [
            jnp.where(jnp.isneginf(lse), -jnp.inf, lse * (-1 / scale)),
            -delta,
            jnp.where(quantum > 0, scale / quantum, 0.0),
        ],
        axis=1,
    )
    return quantum, stats.reshape(lse.shape[0], 3, -1, ROWS).swapaxes(1, 2)


def _quantum(k, v, dout, delta, scale: float) -> jax.Array:
    """What one unit of a row's int32 dq is worth, float32 [num_q_heads, query_rows].

    A row of dq is scale * sum_j ds_j k_j with ds_j = p_j (dout . v_j - delta), p_j >= 0 and
    sum_j p_j <= 1. So every partial sum of it stays below
    scale * max|k| * (|dout| max|v_j| + |delta|), which is made to fit 30 bits with room for the
    rounding of p, ds and the products to 16 bits. Values that are not finite make the quantum, and
    with it the row, not finite.
    """
    norms = jnp.sqrt(jnp.sum(jnp.square(v.astype(jnp.float32)), axis=2)).max(0)
    largest = jnp.abs(k.astype(jnp.float32)).max((0, 2))
    norms, largest = (jnp.repeat(x, dout.shape[1] // k.shape[1])[:, None] for x in (norms, largest))
    dout_norm = jnp.sqrt(jnp.sum(jnp.square(dout.astype(jnp.float32)), axis=2)).T
    return (scale * 1.05 / 2**30) * largest * (dout_norm * norms + jnp.abs(delta))
