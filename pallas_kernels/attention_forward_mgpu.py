# pyrefly: ignore-errors
# ruff: noqa: E741, E501
"""Forward block attention on Hopper: a persistent, warp-specialized Pallas Mosaic GPU kernel.

One thread block (or a cluster of two) per SM works through units (query tile, heads), longest
first. One warpgroup copies; two compute, 64 query rows each. Where heads share keys and values, the
two take two heads of the same rows, so that they visit the same kv tiles and every copied tile
serves both; a cluster takes four heads and copies every kv tile once (TMA multicast).

The tensor cores do not wait for the softmax: the scores of the next tile are issued together with
the product of the last probabilities and V, and the softmax of the former runs under the latter
(FlashAttention-3, arXiv 2407.08608, section 3.2). The two warpgroups take turns in issuing (section
3.1). Unlike there, this pipeline runs on across units: the last product of one unit goes with the
first scores of the next, so a short row of tiles costs no bubble.

Status: right in the interpreter (state in and out, GQA, masks); does not finish on an H200 yet, so
`block_attention` does not offer it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mgpu_common import (
    ACC,
    COLUMN,
    LOG2_E,
    ROW,
    ROWS,
    TILED,
    dot,
    full,
    load,
    stride_loop,
    unit_plan,
)
from pallas_kernels.tile_schedule import TileSchedule
from pallas_kernels.work_list import AttentionState, TokenMask


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: TokenMask,
    schedule: TileSchedule,
    state: AttentionState | None,
    *,
    scale: float,
    config,
    num_ctas: int,
    out_dtype=jnp.float32,
    interpret: bool = False,
) -> AttentionState:
    """Runs the kernel.

    Args:
      q: [query_rows, num_q_heads, head_dim], bfloat16 or float16.
      k: [kv_rows, num_kv_heads, head_dim].
      v: like k.
      mask: which token pairs count.
      schedule: from `tile_schedule.query_major`, with the tiles of `config`.
      state: what the rows have gathered so far, continued in place; None for nothing.
      scale: multiplies q.k; positive.
      config: a `ForwardConfig` that fits the shapes.
      num_ctas: thread blocks to launch, one per SM.
      out_dtype: of the output where `state` is None.
      interpret: run in the Pallas interpreter, on any machine.

    Returns:
      The new state.
    """
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads, dtype = k.shape[1], q.dtype
    tile_kv, stages, pack, cluster = config.tile_kv, config.stages, config.pack, config.cluster
    q_buffers, carries = config.q_buffers, state is not None
    heads_per_unit = pack * cluster
    pairs = num_q_heads // num_kv_heads // heads_per_unit  # units per query tile and kv head
    tile_q = 2 * ROWS // pack
    num_tiles = num_rows // tile_q
    num_ctas = max(1, min(num_ctas // cluster, num_tiles * pairs * num_kv_heads))
    log2_scale = scale * LOG2_E

    def kernel(
        q_ref, k_ref, v_ref, lo_ref, hi_ref, index_ref, order_ref, num_live_ref, starts_ref,
        num_masked_ref, tiles_ref, out_ref, lse_ref, q_smem, out_smem, k_smem,
        v_smem, index_smem, lse_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
        index_full, turn,
    ):  # fmt: skip
        cta = lax.axis_index("cta")
        wg = lax.axis_index("wg")

        def plan():
            """How many units this block runs, and a function that describes the r-th."""
            rounds, unit = unit_plan(cta, num_ctas, num_live_ref[0], pairs, num_kv_heads, order_ref)

            def unit_at(r):
                kv_head, tile, pair = unit(r)
                head = (kv_head * pairs + pair) * heads_per_unit
                if cluster > 1:
                    head += lax.axis_index("cluster") * pack
                begin = starts_ref[tile]
                # Tile 0 is always masked, so that one code path begins every unit.
                num_masked = jnp.maximum(num_masked_ref[tile], 1)
                return tile, head, kv_head, begin, starts_ref[tile + 1] - begin, num_masked

            return rounds, unit_at

        def rows_and_head(w, tile, head):
            if pack == 2:
                return pl.ds(tile * ROWS, ROWS), head + w
            return pl.ds(tile * (2 * ROWS) + w * ROWS, ROWS), head

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            rounds, unit_at = plan()
            if config.ping_pong:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def my_turn():
                if config.ping_pong:
                    plgpu.barrier_wait(turn.at[wg])

            def your_turn():
                if config.ping_pong:
                    plgpu.barrier_arrive(turn.at[1 - wg])

            def softmax(s, m, l, span, slot):
                """One online softmax step; `span` is given where the tile needs its mask."""
                if span is not None:
                    plgpu.barrier_wait(index_full.at[slot])
                    lo, width = (lax.broadcast_in_dim(x, s.shape, [0]) for x in span)
                    index = load(index_smem.at[slot], COLUMN)
                    index = lax.broadcast_in_dim(index, s.shape, [1])
                    # lo <= index <= lo + width, as one unsigned comparison
                    s = jnp.where((index - lo).astype(jnp.uint32) <= width, s, -jnp.inf)
                new_m = jnp.maximum(m, s.max(axis=1) * log2_scale)
                top = new_m
                if span is not None:  # a row that has seen nothing keeps -inf
                    top = jnp.where(new_m == -jnp.inf, 0.0, new_m)
                alpha = jnp.exp2(m - top)
                p = jnp.exp2(s * log2_scale - lax.broadcast_in_dim(top, s.shape, [0]))
                return p, new_m, l * alpha + p.sum(axis=1), alpha

            def first_scores(q_tile, slot):
                if interpret:
                    return dot(q_tile[...], k_smem[slot].T)

                def body(ref):
                    plgpu.wgmma(ref, q_tile, k_smem.at[slot].T)
                    return ref[...]

                return pl.run_scoped(body, plgpu.ACC((ROWS, tile_kv), jnp.float32))

            def last_product(acc, p, last):
                plgpu.barrier_wait(v_full.at[last])
                if interpret:
                    acc = acc + dot(p, v_smem[last])
                else:
                    acc = pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_smem.at[last]))(
                        plgpu.ACC.init(acc)
                    )
                plgpu.barrier_arrive(v_empty.at[last])
                return acc

            def both(q_tile, slot, acc, p, last, m, l, span):
                """Issues the scores of `slot` and the product of `p` with V of `last`."""
                plgpu.barrier_wait(k_full.at[slot])
                my_turn()

                def body(s_ref=None, acc_ref=None):
                    if interpret:
                        s, new_acc = dot(q_tile[...], k_smem[slot].T), acc
                        plgpu.barrier_wait(v_full.at[last])
                        new_acc = acc + dot(p, v_smem[last])
                        your_turn()
                    else:
                        acc_ref[...] = acc
                        plgpu.wgmma(s_ref, q_tile, k_smem.at[slot].T)
                        plgpu.barrier_wait(v_full.at[last])
                        plgpu.wgmma(acc_ref, p, v_smem.at[last])
                        your_turn()
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                    new_p, new_m, new_l, alpha = softmax(s, m, l, span, slot)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    if not interpret:
                        new_acc = acc_ref[...]
                        # Narrow the probabilities only once the product has read the old ones.
                        new_acc, new_p = lax.optimization_barrier((new_acc, new_p))
                    plgpu.barrier_arrive(v_empty.at[last])
                    return new_acc, new_p.astype(dtype), new_m, new_l, alpha

                if interpret:
                    return body()
                return pl.run_scoped(
                    body,
                    plgpu.ACC((ROWS, tile_kv), jnp.float32),
                    plgpu.ACC((ROWS, dim), jnp.float32),
                )

            def begin_rows(tile, head):
                """The spans a unit's rows see, and the softmax state they start from."""
                rows, q_head = rows_and_head(wg, tile, head)
                lo, hi = (load(x.at[rows], ROW) for x in (lo_ref, hi_ref))
                # Padding rows (lo > hi) see only a place that no token has.
                span = (jnp.where(lo <= hi, lo, 2**30), jnp.maximum(hi - lo, 0).astype(jnp.uint32))
                if not carries:
                    return span, full((ROWS,), -jnp.inf, ROW), full((ROWS,), 0.0, ROW)
                m = load(lse_ref.at[q_head, rows], ROW)
                return span, m * LOG2_E, jnp.where(m == -jnp.inf, 0.0, 1.0)

            def write(acc, m, l, tile, head):
                rows, q_head = rows_and_head(wg, tile, head)
                acc = acc * lax.broadcast_in_dim(jnp.where(l > 0, 1 / l, 0.0), acc.shape, [0])
                lse = jnp.where(l > 0, (m + jnp.log2(l)) * (1 / LOG2_E), -jnp.inf)
                if out_smem is None:
                    out_ref.at[rows, q_head][...] = acc.astype(out_ref.dtype)
                    lse_ref.at[q_head, rows][...] = lse
                    return
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem.at[wg][...] = acc.astype(out_ref.dtype)
                lse_smem.at[wg][...] = lse
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[rows, q_head])
                plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[q_head, rows])

            def run_unit(r, carry):
                step, span, m, l, p, alpha = carry
                tile, head, _, _, count, num_masked = unit_at(r)
                buffer = lax.rem(r, q_buffers)
                acc = full((ROWS, dim), 0.0, ACC)
                if carries:
                    rows, q_head = rows_and_head(wg, tile, head)
                    acc = load(out_ref.at[rows, q_head], ACC)
                    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

                def visit(masked, j, carry):
                    acc, m, l, p = carry
                    acc, p, m, l, alpha = both(
                        q_smem.at[buffer, wg], lax.rem(step + j, stages), acc, p,
                        lax.rem(step + j + stages - 1, stages), m, l, span if masked else None,
                    )  # fmt: skip
                    return acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), m, l, p

                carry = lax.fori_loop(1, num_masked, functools.partial(visit, True), (acc, m, l, p))
                acc, m, l, p = lax.fori_loop(
                    num_masked, count, functools.partial(visit, False), carry
                )
                plgpu.barrier_arrive(q_empty.at[buffer, wg])
                step = step + count
                last = lax.rem(step + stages - 1, stages)

                def go_on():
                    next_tile, next_head, *_ = unit_at(r + 1)
                    next_span, next_m, next_l = begin_rows(next_tile, next_head)
                    next_buffer = lax.rem(r + 1, q_buffers)
                    plgpu.barrier_wait(q_full.at[next_buffer, wg])
                    return next_span, *both(
                        q_smem.at[next_buffer, wg], lax.rem(step, stages), acc, p, last,
                        next_m, next_l, next_span,
                    )  # fmt: skip

                def stop():
                    return span, last_product(acc, p, last), p, m, l, alpha

                span, acc, p, next_m, next_l, alpha = lax.cond(r + 1 < rounds, go_on, stop)
                write(acc, m, l, tile, head)
                return step, span, next_m, next_l, p, alpha

            @pl.when(rounds > 0)
            def _():
                tile, head, *_ = unit_at(0)
                span, m, l = begin_rows(tile, head)
                plgpu.barrier_wait(q_full.at[0, wg])
                plgpu.barrier_wait(k_full.at[0])
                s = first_scores(q_smem.at[0, wg], 0)
                p, m, l, alpha = softmax(s, m, l, span, 0)
                plgpu.barrier_arrive(k_empty.at[0])
                carry = (jnp.int32(0), span, m, l, p.astype(dtype), alpha)
                lax.fori_loop(0, rounds, run_unit, carry)

            if not carries:
                num_live = num_live_ref[0]
                num_idle = num_tiles - num_live
                per_tile = pairs * num_kv_heads

                def write_idle(i):
                    tile = order_ref[num_live + lax.div(i, per_tile)]
                    head = lax.rem(i, per_tile) * heads_per_unit
                    if cluster > 1:
                        head += lax.axis_index("cluster") * pack
                    zero = full((ROWS,), 0.0, ROW)
                    write(full((ROWS, dim), 0.0, ACC), zero, zero, tile, head)

                stride_loop(cta, num_idle * per_tile, num_ctas, write_idle)
            if config.ping_pong:
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 2)
        def _copy():
            plgpu.set_max_registers(config.copy_registers, action="decrease")
            rounds, unit_at = plan()
            multicast = dict(collective_axes="cluster") if cluster > 1 else {}

            def run_unit(r, step):
                tile, head, kv_head, begin, count, num_masked = unit_at(r)
                buffer = lax.rem(r, q_buffers)
                for w in range(2):
                    pl.when(r >= q_buffers)(lambda w=w: plgpu.barrier_wait(q_empty.at[buffer, w]))
                    rows, q_head = rows_and_head(w, tile, head)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[rows, q_head], q_smem.at[buffer, w], q_full.at[buffer, w]
                    )

                def copy_tile(j, _):
                    slot = lax.rem(step + j, stages)
                    rows = pl.ds(tiles_ref[begin + j] * tile_kv, tile_kv)
                    reused = step + j >= stages
                    pl.when(reused)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(
                        k_ref.at[rows, kv_head], k_smem.at[slot], k_full.at[slot], **multicast
                    )

                    @pl.when(j < num_masked)
                    def _():
                        plgpu.copy_gmem_to_smem(
                            index_ref.at[rows], index_smem.at[slot], index_full.at[slot]
                        )

                    pl.when(reused)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[rows, kv_head], v_smem.at[slot], v_full.at[slot], **multicast
                    )

                lax.fori_loop(0, count, copy_tile, None)
                return step + count

            steps = lax.fori_loop(0, rounds, run_unit, jnp.int32(0))

            # The interpreter wants every arrival observed, and a thread block must not leave while
            # its peer may still arrive at its barriers.
            if interpret or cluster > 1:

                def drain(j, _):
                    plgpu.barrier_wait(k_empty.at[lax.rem(j, stages)])
                    plgpu.barrier_wait(v_empty.at[lax.rem(j, stages)])

                lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)
            if interpret:

                def drain_q(r, _):
                    for w in range(2):
                        plgpu.barrier_wait(q_empty.at[lax.rem(r, q_buffers), w])

                lax.fori_loop(jnp.maximum(rounds - q_buffers, 0), rounds, drain_q, None)

    empty = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    cluster_mesh = {}
    if cluster > 1:
        empty = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=2, num_barriers=stages
        )
        cluster_mesh = dict(cluster=(cluster,), cluster_names=("cluster",))
    stage_out = config.stage_out and not carries and out_dtype == dtype
    launch = plgpu.kernel(
        kernel,
        out_type=()
        if carries
        else (
            jax.ShapeDtypeStruct(q.shape, out_dtype),
            jax.ShapeDtypeStruct((num_q_heads, num_rows), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=plgpu.SMEM((q_buffers, 2, ROWS, dim), dtype, transforms=TILED),
            out_smem=plgpu.SMEM((2, ROWS, dim), dtype, transforms=TILED) if stage_out else None,
            k_smem=plgpu.SMEM((stages, tile_kv, dim), dtype, transforms=TILED),
            v_smem=plgpu.SMEM((stages, tile_kv, dim), dtype, transforms=TILED),
            index_smem=plgpu.SMEM((stages, tile_kv), jnp.int32),
            lse_smem=plgpu.SMEM((2, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_barriers=(q_buffers, 2)),
            q_empty=plgpu.Barrier(num_barriers=(q_buffers, 2)),
            k_full=plgpu.Barrier(num_barriers=stages),
            k_empty=empty,
            v_full=plgpu.Barrier(num_barriers=stages),
            v_empty=empty,
            index_full=plgpu.Barrier(num_barriers=stages),
            turn=plgpu.Barrier(num_barriers=2),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        **cluster_mesh,
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    operands = (q, k, v, *mask, *schedule)
    if not carries:
        return AttentionState(*launch(*operands))
    out, lse = (jax.new_ref(x) for x in state)
    launch(*operands, out, lse)
    return AttentionState(out[...], lse[...])
