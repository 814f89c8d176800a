# pyrefly: ignore-errors
# ruff: noqa: E741, E501
"""Forward block attention on Hopper: a persistent, warp-specialized Pallas Mosaic GPU kernel.

One thread block per SM works through units (query tile, heads), longest first; whoever is free takes
the next one from a counter. One warpgroup copies; two compute, 64 query rows each. Where heads share
keys and values, the two take two heads of the same rows, so that they visit the same kv tiles and
every copied tile serves both. A kv tile is gathered from pieces that the mask has to see, which need
not be neighbors, so that short segments do not fill tiles with hidden pairs.

The tensor cores do not wait for the softmax: the scores of the next tile are issued together with
the product of the last probabilities and V, and the softmax of the former runs under the latter
(FlashAttention-3, arXiv 2407.08608, section 3.2). The two warpgroups take turns in issuing (section
3.1). Unlike there, this pipeline runs on across units: the last product of one unit goes with the
first scores of the next, so a short row of tiles costs no bubble. For the same reason the warpgroup
that copies also looks up what a unit consists of, and sends it ahead through shared memory.
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
    divide,
    dot,
    full,
    load,
    query_spans,
    stride_loop,
    take_number,
)
from pallas_kernels.tile_schedule import TileSchedule
from pallas_kernels.work_list import AttentionState, TokenMask

UNIT_FIELDS = ("tile", "head", "count", "num_masked")


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
      schedule: from `tile_schedule.query_major`, with the tiles and pieces of `config`.
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
    tile_kv, stages, pack = config.tile_kv, config.stages, config.pack
    piece, pieces = config.kv_piece, config.tile_kv // config.kv_piece
    q_buffers, carries = config.q_buffers, state is not None
    pairs = num_q_heads // num_kv_heads // pack  # units per query tile and kv head
    num_tiles, num_pieces = num_rows // config.tile_q, k.shape[0] // piece
    num_ctas = max(1, min(num_ctas, num_tiles * pairs * num_kv_heads))
    log2_scale = scale * LOG2_E
    spans = query_spans(mask).reshape(-1)
    # Places of keys, spans of a unit's rows and what the unit is share one array in shared memory.
    unit_spans = 2 * config.tile_q
    spans_start = stages * tile_kv
    unit_start = spans_start + unit_spans
    # The piece after the last one is hidden: it fills tiles up.
    kv_index = jnp.pad(mask.kv_index, (0, piece), constant_values=-1)

    def kernel(
        q_ref, k_ref, v_ref, spans_ref, index_ref, order_ref, num_live_ref, starts_ref,
        num_masked_ref, pieces_ref, counter_ref, out_ref, lse_ref, q_smem, out_smem, k_smem, v_smem,
        ints_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, index_full, unit_full,
        unit_empty, number_full, turn,
    ):  # fmt: skip
        wg = lax.axis_index("wg")

        def rows_and_head(w, tile, head):
            if pack == 2:
                return pl.ds(tile * ROWS, ROWS), head + w
            return pl.ds(tile * (2 * ROWS) + w * ROWS, ROWS), head

        @pl.when(wg == 2)
        def _copy():
            plgpu.set_max_registers(config.copy_registers, action="decrease")

            def next_unit(r):
                """The r-th unit of this thread block: tile, heads, pieces; no tiles at the end."""
                # Heads one after the other keep the keys and values that all blocks read in L2.
                if interpret:
                    number = r * num_ctas + lax.axis_index("cta")
                else:
                    slot = lax.rem(r, 2)
                    taken = unit_start + 4 + slot
                    take_number(counter_ref, ints_smem.at[pl.ds(taken, 1)])
                    plgpu.barrier_arrive(number_full.at[slot])
                    plgpu.barrier_wait(number_full.at[slot])
                    number = ints_smem[taken]
                kv_head, place = divide(number, jnp.maximum(num_live_ref[0] * pairs, 1))
                row, pair = divide(place, pairs)
                tile = order_ref[row]
                begin = starts_ref[tile]
                count = lax.select(kv_head < num_kv_heads, starts_ref[tile + 1] - begin, 0)
                # Tile 0 is always masked, so that one code path begins every unit.
                num_masked = jnp.maximum(num_masked_ref[tile], 1)
                return tile, (kv_head * pairs + pair) * pack, kv_head, begin, count, num_masked

            def announce(r, unit):
                tile, head, _, _, count, num_masked = unit
                pl.when(r > 0)(lambda: plgpu.barrier_wait(unit_empty.at[lax.rem(r + 1, 2)]))
                for i, value in enumerate((tile, head, count, num_masked)):  # UNIT_FIELDS
                    ints_smem[unit_start + i] = value
                plgpu.barrier_arrive(unit_full.at[lax.rem(r, 2)])
                plgpu.copy_gmem_to_smem(
                    spans_ref.at[pl.ds(tile * unit_spans, unit_spans)],
                    ints_smem.at[pl.ds(spans_start, unit_spans)],
                    unit_full.at[lax.rem(r, 2)],
                )

            def run_unit(carry):
                r, unit, step = carry
                tile, head, kv_head, begin, count, num_masked = unit
                buffer = lax.rem(r, q_buffers)
                for w in range(2):
                    pl.when(r >= q_buffers)(lambda w=w: plgpu.barrier_wait(q_empty.at[buffer, w]))
                    rows, q_head = rows_and_head(w, tile, head)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[rows, q_head], q_smem.at[buffer, w], q_full.at[buffer, w]
                    )
                following = next_unit(r + 1)

                def copy_tile(j, _):
                    slot = lax.rem(step + j, stages)
                    reused = step + j >= stages

                    def copy(source, target, full, last):
                        for i in range(pieces):
                            number = jnp.minimum(pieces_ref[(begin + j) * pieces + i], last)
                            plgpu.copy_gmem_to_smem(
                                source(pl.ds(number * piece, piece)), target(i), full.at[slot]
                            )

                    def part(smem):
                        return lambda i: smem.at[slot, pl.ds(i * piece, piece)]

                    def copy_index():
                        copy(
                            lambda rows: index_ref.at[rows],
                            lambda i: ints_smem.at[pl.ds(slot * tile_kv + i * piece, piece)],
                            index_full, num_pieces,
                        )  # fmt: skip

                    pl.when(reused)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                    copy(lambda rows: k_ref.at[rows, kv_head], part(k_smem), k_full, num_pieces - 1)
                    pl.when(j < num_masked)(copy_index)
                    pl.when(reused)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                    copy(lambda rows: v_ref.at[rows, kv_head], part(v_smem), v_full, num_pieces - 1)

                lax.fori_loop(0, count, copy_tile, None)
                announce(r + 1, following)
                return r + 1, following, step + count

            zero = jnp.int32(0)
            first = next_unit(zero)
            announce(zero, first)
            rounds, _, steps = lax.while_loop(
                lambda carry: carry[1][4] > 0, run_unit, (zero, first, zero)
            )
            if interpret:  # which wants every arrival observed

                def drain(barrier, size, end):
                    lax.fori_loop(
                        jnp.maximum(end - size, 0), end,
                        lambda i, _: plgpu.barrier_wait(barrier(lax.rem(i, size))), None,
                    )  # fmt: skip

                drain(lambda i: k_empty.at[i], stages, steps)
                drain(lambda i: v_empty.at[i], stages, steps)
                plgpu.barrier_wait(unit_empty.at[lax.rem(rounds, 2)])
                for w in range(2):
                    drain(lambda i, w=w: q_empty.at[i, w], q_buffers, rounds)

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            if config.ping_pong:
                other = 1 - lax.optimization_barrier(wg)
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[other]))

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
                    index = load(ints_smem.at[pl.ds(slot * tile_kv, tile_kv)], COLUMN)
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

            def unit_field(name):
                """Of the unit announced last, until `unit_empty` lets it go."""
                return lax.optimization_barrier(ints_smem[unit_start + UNIT_FIELDS.index(name)])

            def unit_span():
                start = spans_start + (wg * 2 * ROWS if pack == 1 else 0)
                lo, width = (load(ints_smem.at[pl.ds(start + i * ROWS, ROWS)], ROW) for i in (0, 1))
                return lo, width.astype(jnp.uint32)

            def unit_rows():
                return rows_and_head(wg, unit_field("tile"), unit_field("head"))

            def begin_rows():
                """The softmax state that a unit's rows start from."""
                if not carries:
                    return full((ROWS,), -jnp.inf, ROW), full((ROWS,), 0.0, ROW)
                rows, q_head = unit_rows()
                m = load(lse_ref.at[q_head, rows], ROW)
                return m * LOG2_E, jnp.where(m == -jnp.inf, 0.0, 1.0)

            def write(acc, m, l, tile, head):
                rows, q_head = rows_and_head(wg, tile, head)
                acc = acc * lax.broadcast_in_dim(jnp.where(l > 0, 1 / l, 0.0), acc.shape, [0])
                lse = jnp.where(l > 0, (m + jnp.log2(l)) * (1 / LOG2_E), -jnp.inf)
                lse_ref.at[q_head, rows][...] = lse
                if out_smem is None:
                    out_ref.at[rows, q_head][...] = acc.astype(out_ref.dtype)
                    return
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem.at[wg][...] = acc.astype(out_ref.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[rows, q_head])

            def run_unit(carry):
                r, count, step, span, m, l, p, alpha = carry
                tile, head, num_masked = map(unit_field, ("tile", "head", "num_masked"))
                me = lax.optimization_barrier(wg)  # keeps addresses out of the loop's registers
                buffer = lax.rem(r, q_buffers)
                acc = full((ROWS, dim), 0.0, ACC)
                if carries:
                    rows, q_head = unit_rows()
                    acc = load(out_ref.at[rows, q_head], ACC)
                    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
                plgpu.barrier_arrive(unit_empty.at[lax.rem(r, 2)])

                def visit(masked, j, carry):
                    acc, m, l, p = carry
                    acc, p, m, l, alpha = both(
                        q_smem.at[buffer, me], lax.rem(step + j, stages), acc, p,
                        lax.rem(step + j + stages - 1, stages), m, l, span if masked else None,
                    )  # fmt: skip
                    return acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), m, l, p

                carry = lax.fori_loop(1, num_masked, functools.partial(visit, True), (acc, m, l, p))
                acc, m, l, p = lax.fori_loop(
                    num_masked, count, functools.partial(visit, False), carry
                )
                plgpu.barrier_arrive(q_empty.at[buffer, me])
                step = step + count
                last = lax.rem(step + stages - 1, stages)
                plgpu.barrier_wait(unit_full.at[lax.rem(r + 1, 2)])
                next_count = unit_field("count")

                def go_on():
                    next_span, (next_m, next_l) = unit_span(), begin_rows()
                    next_buffer = lax.rem(r + 1, q_buffers)
                    plgpu.barrier_wait(q_full.at[next_buffer, me])
                    return next_span, *both(
                        q_smem.at[next_buffer, me], lax.rem(step, stages), acc, p, last,
                        next_m, next_l, next_span,
                    )  # fmt: skip

                def stop():
                    return span, last_product(acc, p, last), p, m, l, alpha

                span, acc, p, next_m, next_l, alpha = lax.cond(next_count > 0, go_on, stop)
                write(acc, m, l, tile, head)
                return r + 1, next_count, step, span, next_m, next_l, p, alpha

            plgpu.barrier_wait(unit_full.at[0])
            count = unit_field("count")

            def run_units():
                span, (m, l) = unit_span(), begin_rows()
                plgpu.barrier_wait(q_full.at[0, wg])
                plgpu.barrier_wait(k_full.at[0])
                s = first_scores(q_smem.at[0, wg], 0)
                p, m, l, alpha = softmax(s, m, l, span, 0)
                plgpu.barrier_arrive(k_empty.at[0])
                zero = jnp.int32(0)
                carry = (zero, count, zero, span, m, l, p.astype(dtype), alpha)
                return lax.while_loop(lambda carry: carry[1] > 0, run_unit, carry)[0]

            rounds = lax.cond(count > 0, run_units, lambda: jnp.int32(0))

            if interpret:  # which wants every arrival observed
                plgpu.barrier_arrive(unit_empty.at[lax.rem(rounds, 2)])

            if not carries:
                per_tile, num_live = pairs * num_kv_heads, num_live_ref[0]

                def write_idle(i):
                    tile = order_ref[num_live + lax.div(i, per_tile)]
                    zero = full((ROWS,), 0.0, ROW)
                    write(
                        full((ROWS, dim), 0.0, ACC), zero, zero, tile,
                        lax.rem(i, per_tile) * pack,
                    )  # fmt: skip

                stride_loop(
                    lax.axis_index("cta"), (num_tiles - num_live) * per_tile, num_ctas, write_idle
                )
            if config.ping_pong:
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[1 - other]))
            plgpu.wait_smem_to_gmem(0)

    stage_out = config.stage_out and not carries and out_dtype == dtype
    filled = plgpu.Barrier(num_arrivals=pieces, num_barriers=stages)
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
            ints_smem=plgpu.SMEM((unit_start + 6,), jnp.int32),
            q_full=plgpu.Barrier(num_barriers=(q_buffers, 2)),
            q_empty=plgpu.Barrier(num_barriers=(q_buffers, 2)),
            k_full=filled,
            k_empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            v_full=filled,
            v_empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            index_full=filled,
            unit_full=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            unit_empty=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            number_full=plgpu.Barrier(num_barriers=2),
            turn=plgpu.Barrier(num_barriers=2),
        ),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    operands = (q, k, v, spans, kv_index, *schedule, jax.new_ref(jnp.zeros(1, jnp.int32)))
    if not carries:
        return AttentionState(*launch(*operands))
    out, lse = (jax.new_ref(x) for x in state)
    launch(*operands, out, lse)
    return AttentionState(out[...], lse[...])
