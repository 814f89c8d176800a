"""Forward block attention on Hopper: a persistent, warp-specialized Pallas Mosaic GPU kernel.

One thread block runs on each SM and works through (query tile, heads) units, longest first. One
warpgroup copies; two compute, 64 query rows each. Where heads share keys and values, the two take
two heads of the same rows, so that they visit the same kv tiles and every copied tile serves both.

Inside a compute warpgroup the tensor cores never wait for the softmax: scores of the next tile are
issued together with the product of the last probabilities with V, and the softmax of the former
runs under the latter (FlashAttention-3, arXiv 2407.08608, section 3.2). The two warpgroups take
turns in issuing (section 3.1).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tile_schedule import TileSchedule
from pallas_kernels.work_list import AttentionState, TokenMask

_LOG2_E = math.log2(math.e)
ROWS = 64  # query rows of one compute warpgroup: the M of a wgmma instruction
_ACC, _ROW, _COLUMN = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA.reduce(1),
    plgpu.Layout.WGMMA.reduce(0),
)


def forward_kernel(q, k, v, mask, schedule, state, *, scale, config, num_ctas, interpret=False):
    num_rows, num_q_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    dtype = q.dtype
    tile_kv, stages = config.tile_kv, config.stages
    pack = config.pack
    cluster = config.cluster
    pairs_per_kv = num_q_heads // num_kv_heads // pack // cluster
    tile_q = 2 * ROWS // pack
    num_tiles = num_rows // tile_q
    units_per_kv = num_tiles * pairs_per_kv
    num_units = units_per_kv * num_kv_heads
    num_ctas = min(num_ctas // cluster, num_units)
    log2_scale = scale * _LOG2_E
    overlap, ping_pong = config.overlap, config.ping_pong
    share_out = config.share_out  # output staging reuses the query buffer

    def kernel(
        q_ref, k_ref, v_ref, lo_ref, hi_ref, index_ref, order_ref, starts_ref, num_masked_ref,
        tiles_ref, out_ref, lse_ref, q_smem, out_smem, k_smem, v_smem, index_smem, lse_smem,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, index_full, turn,
    ):  # fmt: skip
        cta = lax.axis_index("cta")
        shared = dict(collective_axes="cluster") if cluster > 1 else {}
        wg = lax.axis_index("wg")
        rounds = pl.cdiv(num_units, num_ctas)
        if out_smem is None:
            out_smem = q_smem

        def unit_of(r):
            # Boustrophedon over the blocks: the one that got the longest unit of a round gets the
            # shortest of the next.
            place = lax.select(lax.rem(r, 2) == 0, cta, num_ctas - 1 - cta)
            return r * num_ctas + place

        def unit_info(unit):
            kv_head = lax.div(unit, units_per_kv)
            rest = lax.rem(unit, units_per_kv)
            tile = order_ref[lax.div(rest, pairs_per_kv)]
            head = (kv_head * pairs_per_kv + lax.rem(rest, pairs_per_kv)) * pack * cluster
            if cluster > 1:
                head += lax.axis_index("cluster") * pack
            begin = starts_ref[tile]
            count = starts_ref[tile + 1] - begin
            return tile, head, kv_head, begin, count, num_masked_ref[tile]

        def rows_and_head(w, tile, head):
            if pack == 2:
                return pl.ds(tile * ROWS, ROWS), head + w
            return pl.ds(tile * 2 * ROWS + w * ROWS, ROWS), head

        @pl.when(wg < 2)
        def compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            q_tile = q_smem.at[wg]
            if ping_pong:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def my_turn():
                if ping_pong:
                    plgpu.barrier_wait(turn.at[wg])

            def your_turn():
                if ping_pong:
                    plgpu.barrier_arrive(turn.at[1 - wg])

            def softmax(s, m, l, span, slot):
                """One online softmax step; `span` is (lo, hi) where the tile needs its mask."""
                if span is not None:
                    lo, hi = (lax.broadcast_in_dim(x, s.shape, [0]) for x in span)
                    index = plgpu.load(index_smem.at[slot], layout=_COLUMN, optimized=False)
                    index = lax.broadcast_in_dim(index, s.shape, [1])
                    s = jnp.where((lo <= index) & (index <= hi), s, -jnp.inf)
                new_m = jnp.maximum(m, s.max(axis=1) * log2_scale)
                top = new_m
                if span is not None:  # a row that has seen nothing keeps -inf
                    top = jnp.where(new_m == -jnp.inf, 0.0, new_m)
                alpha = jnp.exp2(m - top)
                p = jnp.exp2(s * log2_scale - lax.broadcast_in_dim(top, s.shape, [0]))
                return p, new_m, l * alpha + p.sum(axis=1), alpha

            def scale_rows(x, factor):
                return x * lax.broadcast_in_dim(factor, x.shape, [0])

            def scores(slot):
                if interpret:
                    return jnp.dot(
                        q_tile[...].astype(jnp.float32), k_smem[slot].T.astype(jnp.float32)
                    )

                def body(ref):
                    plgpu.wgmma(ref, q_tile, k_smem.at[slot].T)
                    return ref[...]

                return pl.run_scoped(body, plgpu.ACC((ROWS, tile_kv), jnp.float32))

            def accumulate(acc, p, slot):
                if interpret:
                    return acc + jnp.dot(p.astype(jnp.float32), v_smem[slot].astype(jnp.float32))

                def body(ref):
                    plgpu.wgmma(ref, p, v_smem.at[slot])

                return pl.run_state(body)(plgpu.ACC.init(acc))

            def wait_index(slot, masked):
                if masked:
                    plgpu.barrier_wait(index_full.at[slot])

            def run_unit(r, step):
                tile, head, _, _, count, num_masked = unit_info(unit_of(r))
                rows, q_head = rows_and_head(wg, tile, head)

                @pl.when(count > 0)
                def _():
                    span = tuple(
                        plgpu.load(x.at[rows], layout=_ROW, optimized=False)
                        for x in (lo_ref, hi_ref)
                    )
                    if state is None:
                        m = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
                        l = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW)
                        acc = plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), _ACC)
                    else:
                        m = plgpu.load(lse_ref.at[q_head, rows], layout=_ROW, optimized=False)
                        l = jnp.where(m == -jnp.inf, 0.0, 1.0)
                        m = m * _LOG2_E
                        acc = plgpu.load(out_ref.at[rows, q_head], layout=_ACC, optimized=False)
                    plgpu.barrier_wait(q_full.at[wg])
                    attend = attend_overlapped if overlap else attend_in_turn
                    acc, m, l = attend(acc, m, l, step, count, num_masked, span)
                    if not share_out:
                        plgpu.barrier_arrive(q_empty.at[wg])
                    inverse = jnp.where(l > 0, 1 / l, 0.0)
                    acc = scale_rows(acc, inverse)
                    lse = jnp.where(l > 0, (m + jnp.log2(l)) * (1 / _LOG2_E), -jnp.inf)
                    write(acc, lse, rows, q_head)
                    if share_out:
                        plgpu.barrier_arrive(q_empty.at[wg])

                if state is None:

                    @pl.when(count == 0)
                    def _():
                        acc = plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), _ACC)
                        lse = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), _ROW)
                        write(acc, lse, rows, q_head)

                return step + count

            def write(acc, lse, rows, q_head):
                if state is None and out_ref.dtype != jnp.float32:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_smem.at[wg][...] = acc.astype(dtype)
                    lse_smem.at[wg][...] = lse
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[rows, q_head])
                    plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[q_head, rows])
                    if share_out:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                else:
                    out_ref.at[rows, q_head][...] = acc
                    lse_ref.at[q_head, rows][...] = lse

            def attend_in_turn(acc, m, l, step, count, num_masked, span):
                def visit(masked, j, carry):
                    acc, m, l = carry
                    slot = lax.rem(step + j, stages)
                    plgpu.barrier_wait(k_full.at[slot])
                    my_turn()
                    s = scores(slot)
                    your_turn()
                    wait_index(slot, masked)
                    p, m, l, alpha = softmax(s, m, l, span if masked else None, slot)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    acc = scale_rows(acc, alpha)
                    p = p.astype(dtype)
                    plgpu.barrier_wait(v_full.at[slot])
                    acc = accumulate(acc, p, slot)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return acc, m, l

                carry = lax.fori_loop(
                    0, num_masked, lambda j, c: visit(True, j, c), (acc, m, l)
                )
                return lax.fori_loop(num_masked, count, lambda j, c: visit(False, j, c), carry)

            def attend_overlapped(acc, m, l, step, count, num_masked, span):
                # Tile 0 always takes the masked path, so that one prologue serves both kinds.
                num_masked = jnp.maximum(num_masked, 1)
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(k_full.at[slot])
                s = scores(slot)
                wait_index(slot, True)
                p, m, l, alpha = softmax(s, m, l, span, slot)
                plgpu.barrier_arrive(k_empty.at[slot])
                if state is not None:
                    acc = scale_rows(acc, alpha)
                p = p.astype(dtype)

                def visit(masked, j, carry):
                    acc, m, l, p = carry
                    slot = lax.rem(step + j, stages)
                    last = lax.rem(step + j + stages - 1, stages)
                    if interpret:
                        plgpu.barrier_wait(k_full.at[slot])
                        my_turn()
                        s = scores(slot)
                        plgpu.barrier_wait(v_full.at[last])
                        acc = accumulate(acc, p, last)
                        your_turn()
                        wait_index(slot, masked)
                        p, m, l, alpha = softmax(s, m, l, span if masked else None, slot)
                        plgpu.barrier_arrive(k_empty.at[slot])
                        plgpu.barrier_arrive(v_empty.at[last])
                        return scale_rows(acc, alpha), m, l, p.astype(dtype)

                    plgpu.barrier_wait(k_full.at[slot])
                    my_turn()

                    def body(s_ref, acc_ref):
                        acc_ref[...] = acc
                        plgpu.wgmma(s_ref, q_tile, k_smem.at[slot].T)
                        plgpu.barrier_wait(v_full.at[last])
                        plgpu.wgmma(acc_ref, p, v_smem.at[last])
                        your_turn()
                        s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                        wait_index(slot, masked)
                        new_p, new_m, new_l, alpha = softmax(
                            s, m, l, span if masked else None, slot
                        )
                        plgpu.barrier_arrive(k_empty.at[slot])
                        new_acc = acc_ref[...]
                        plgpu.barrier_arrive(v_empty.at[last])
                        # Keep the probabilities in float32 until the product has read the old ones.
                        new_acc, new_p = lax.optimization_barrier((new_acc, new_p))
                        return scale_rows(new_acc, alpha), new_m, new_l, new_p.astype(dtype)

                    return pl.run_scoped(
                        body,
                        plgpu.ACC((ROWS, tile_kv), jnp.float32),
                        plgpu.ACC((ROWS, dim), jnp.float32),
                    )

                carry = lax.fori_loop(
                    1, num_masked, lambda j, c: visit(True, j, c), (acc, m, l, p)
                )
                acc, m, l, p = lax.fori_loop(
                    num_masked, count, lambda j, c: visit(False, j, c), carry
                )
                last = lax.rem(step + count - 1, stages)
                plgpu.barrier_wait(v_full.at[last])
                acc = accumulate(acc, p, last)
                plgpu.barrier_arrive(v_empty.at[last])
                return acc, m, l

            @pl.loop(0, rounds, init_carry=jnp.int32(0))
            def steps(r, step):
                return lax.cond(
                    unit_of(r) < num_units, lambda: run_unit(r, step), lambda: step
                )

            if ping_pong:
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 2)
        def copy():
            plgpu.set_max_registers(config.copy_registers, action="decrease")

            def run_unit(r, carry):
                step, visited = carry
                tile, head, kv_head, begin, count, num_masked = unit_info(unit_of(r))
                if overlap:
                    num_masked = jnp.maximum(num_masked, 1)

                def copy_unit():
                    for w in range(2):
                        pl.when(visited > 0)(lambda w=w: plgpu.barrier_wait(q_empty.at[w]))
                        rows, q_head = rows_and_head(w, tile, head)
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[rows, q_head], q_smem.at[w], q_full.at[w]
                        )

                    @pl.loop(0, count)
                    def _(j):
                        slot = lax.rem(step + j, stages)
                        kv_tile = tiles_ref[begin + j]
                        rows = pl.ds(kv_tile * tile_kv, tile_kv)
                        reused = step + j >= stages
                        pl.when(reused)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                        plgpu.copy_gmem_to_smem(
                            k_ref.at[rows, kv_head], k_smem.at[slot], k_full.at[slot], **shared
                        )

                        @pl.when(j < num_masked)
                        def _():
                            plgpu.copy_gmem_to_smem(
                                index_ref.at[rows], index_smem.at[slot], index_full.at[slot]
                            )

                        pl.when(reused)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                        plgpu.copy_gmem_to_smem(
                            v_ref.at[rows, kv_head], v_smem.at[slot], v_full.at[slot], **shared
                        )

                    return step + count, visited + 1

                return lax.cond(count > 0, copy_unit, lambda: (step, visited))

            @pl.loop(0, rounds, init_carry=(jnp.int32(0), jnp.int32(0)))
            def steps(r, carry):
                return lax.cond(
                    unit_of(r) < num_units, lambda: run_unit(r, carry), lambda: carry
                )

            # The interpreter wants every arrival observed, and a thread block must not leave while
            # its peer may still arrive at its barriers.
            if interpret or cluster > 1:
                step, visited = steps

                @pl.loop(jnp.maximum(step - stages, 0), step)
                def _(j):
                    plgpu.barrier_wait(k_empty.at[lax.rem(j, stages)])
                    plgpu.barrier_wait(v_empty.at[lax.rem(j, stages)])

                @pl.when(visited > 0)
                def _():
                    for w in range(2):
                        plgpu.barrier_wait(q_empty.at[w])

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    empty = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    clusters = {}
    if cluster > 1:
        empty = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=2, num_barriers=stages
        )
        clusters = dict(cluster=(cluster,), cluster_names=("cluster",))
    scratch = dict(
        q_smem=plgpu.SMEM((2, ROWS, dim), dtype, transforms=tiled),
        out_smem=None if share_out or state is not None
        else plgpu.SMEM((2, ROWS, dim), dtype, transforms=tiled),
        k_smem=plgpu.SMEM((stages, tile_kv, dim), dtype, transforms=tiled),
        v_smem=plgpu.SMEM((stages, tile_kv, dim), dtype, transforms=tiled),
        index_smem=plgpu.SMEM((stages, tile_kv), jnp.int32),
        lse_smem=plgpu.SMEM((2, ROWS), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=2),
        q_empty=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_barriers=stages),
        k_empty=empty,
        v_full=plgpu.Barrier(num_barriers=stages),
        v_empty=empty,
        index_full=plgpu.Barrier(num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=2),
    )  # fmt: skip
    common = dict(
        scratch_types=scratch,
        grid=(num_ctas,),
        grid_names=("cta",),
        **clusters,
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=config.no_auto_barriers,
            lowering_semantics=getattr(plgpu.LoweringSemantics, config.semantics),
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    operands = (q, k, v, *mask, *schedule)
    out_type = (
        jax.ShapeDtypeStruct(q.shape, config.out_dtype),
        jax.ShapeDtypeStruct((num_q_heads, num_rows), jnp.float32),
    )
    return plgpu.kernel(kernel, out_type=out_type, **common)(*operands)
