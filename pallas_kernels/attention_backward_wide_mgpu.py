# pyrefly: ignore-errors
# ruff: noqa: E741, E501
"""Backward block attention on Hopper for head_dim 256.

As `attention_backward_mgpu`, but dk and dv of 64 kv rows fill 256 registers a thread, so a unit is a
kv tile of 64 rows and the two warpgroups that compute share it by products: one computes S, P and
dv, the other dP, dS and dk. P goes to the other in float32, through shared memory; dS comes back.
Both then multiply it by half of the columns of K and add that half of dq to global memory. A third
warpgroup copies.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_backward_mgpu import (
    TILED_32,
    add_dq,
    fold_units,
    launch,
    row_values,
    visible_scores,
)
from pallas_kernels.mgpu_common import ACC, COLUMN, LOG2_E, ROW, ROWS, TILED, load, query_spans
from pallas_kernels.tile_schedule import TileSchedule
from pallas_kernels.work_list import TokenMask

_STAGES = 2  # query tiles in shared memory; there is room for one tile of dout


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
      q: as in `attention_backward_mgpu.backward`.
      k: as there.
      v: as there.
      dout: as there.
      lse: as there.
      delta: as there.
      mask: as there.
      schedule: from `tile_schedule.kv_major`, with query tiles and kv tiles of 64.
      scale: as there.
      config: a `BackwardConfig`, of which only the registers count.
      num_ctas: as there.
      interpret: as there.

    Returns:
      (dq, dk, dv), float32.
    """
    num_q_heads, dim = q.shape[1:]
    num_kv_rows, num_kv_heads, _ = k.shape
    group, dtype = num_q_heads // num_kv_heads, q.dtype
    num_ctas = max(1, min(num_ctas, num_kv_rows // ROWS * num_kv_heads))
    log2_scale = scale * LOG2_E
    quantum, stats = row_values(k, v, dout, lse, delta, scale)

    def kernel(
        q_ref, k_ref, v_ref, do_ref, stats_ref, spans_ref, index_ref, order_ref, num_live_ref,
        starts_ref, num_masked_ref, tiles_ref, counter_ref, dq_ref, dk_out, dv_out, k_smem, v_smem,
        q_smem, do_smem, p_smem, ds_smem, dq_smem, left_smem, index_smem, stats_smem, spans_smem,
        unit_smem, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, spans_full, p_full,
        ds_full, unit_full, unit_empty,
    ):  # fmt: skip
        # Barriers of single buffers alternate too: an address that depends on the step is computed
        # where it is used, a fixed one would live in a register throughout.
        wg = lax.axis_index("wg")

        def run_units(run_unit, takes=False):
            return fold_units(
                run_unit, takes,
                (counter_ref, order_ref, num_live_ref, starts_ref, num_masked_ref),
                (unit_smem, unit_full, unit_empty),
                num_sections=num_kv_heads, num_ctas=num_ctas, interpret=interpret,
            )  # fmt: skip

        def product(slot, i, left, right):
            """Left @ right^T, plus the i-th of the query rows' values."""

            def body(ref):
                start = load(stats_smem.at[slot, i], COLUMN)
                start = lax.broadcast_in_dim(start, (ROWS, ROWS), [1])
                if not interpret:  # which adds it at the end instead
                    ref[...] = start
                plgpu.wgmma(ref, left, right.T)
                value = plgpu.wgmma_accumulator_load(ref, wait_n=0)
                return value + start if interpret else value

            return pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32))

        def add_half_of_dq(w, slot, tile, head):
            """Adds this warpgroup's half of the columns of a dq tile."""
            factor = load(stats_smem.at[slot, 2], ROW)
            num_chunks = dim // 2 // ROWS
            for chunk in range(num_chunks):
                columns = pl.ds(w * (dim // 2) + chunk * ROWS, ROWS)

                def body(ref, columns=columns):
                    plgpu.wgmma(ref, ds_smem.T, k_smem.at[:, columns])
                    return plgpu.wgmma_accumulator_load(ref, wait_n=0)

                dq = pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32))
                if chunk == num_chunks - 1:  # all products of this step are finished
                    plgpu.barrier_arrive(q_empty.at[slot])
                target = dq_ref.at[pl.ds(tile * ROWS, ROWS), head, columns]
                add_dq(dq, factor, target, dq_smem.at[w], pending=0, interpret=interpret)

        @pl.when(wg == 2)
        def _copy():
            plgpu.set_max_registers(config.copy_registers, action="decrease")

            def run_unit(r, unit, step):
                kv_head, tile, begin, count, num_masked = unit
                rows = pl.ds(tile * ROWS, ROWS)
                place = lax.rem(r, 2)
                pl.when(r > 0)(lambda: plgpu.barrier_wait(kv_empty.at[1 - place]))
                plgpu.copy_gmem_to_smem(k_ref.at[rows, kv_head], k_smem, kv_full.at[place])
                plgpu.copy_gmem_to_smem(v_ref.at[rows, kv_head], v_smem, kv_full.at[place])
                plgpu.copy_gmem_to_smem(index_ref.at[rows], index_smem, kv_full.at[place])

                def copy_tile(head, j, step):
                    slot = lax.rem(step, _STAGES)
                    tile = tiles_ref[begin + j]
                    rows = pl.ds(tile * ROWS, ROWS)
                    pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(q_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(q_ref.at[rows, head], q_smem.at[slot], q_full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        stats_ref.at[head, tile], stats_smem.at[slot], q_full.at[slot]
                    )

                    @pl.when(j < num_masked)
                    def _():
                        plgpu.copy_gmem_to_smem(
                            spans_ref.at[tile], spans_smem.at[slot], spans_full.at[slot]
                        )

                    pl.when(step >= 1)(lambda: plgpu.barrier_wait(do_empty.at[1 - slot]))
                    plgpu.copy_gmem_to_smem(do_ref.at[rows, head], do_smem, do_full.at[slot])
                    return step + 1

                def run_head(head, step):
                    q_head = kv_head * group + head
                    return lax.fori_loop(0, count, lambda j, s: copy_tile(q_head, j, s), step)

                return lax.fori_loop(0, group, run_head, step)

            rounds, steps = run_units(run_unit, takes=True)
            if interpret:  # which wants every arrival observed

                def drain(j, _):
                    plgpu.barrier_wait(q_empty.at[lax.rem(j, _STAGES)])

                lax.fori_loop(jnp.maximum(steps - _STAGES, 0), steps, drain, None)
                pl.when(steps > 0)(lambda: plgpu.barrier_wait(do_empty.at[lax.rem(steps + 1, 2)]))
                pl.when(rounds > 0)(lambda: plgpu.barrier_wait(kv_empty.at[lax.rem(rounds + 1, 2)]))

        def visit_for_dv(ref, masked, slot, tile, head):
            """S, P and dv of one query tile."""
            plgpu.barrier_wait(q_full.at[slot])
            s = product(slot, 0, k_smem, q_smem.at[slot])
            if masked:
                plgpu.barrier_wait(spans_full.at[slot])
                s = visible_scores(s, spans_smem.at[slot], index_smem)
            p = jnp.exp2(s * log2_scale)
            # The other warpgroup has read what was here: it has shared a dS since.
            p_smem[...] = p
            plgpu.commit_smem()  # or the stores might sink below the arrival
            plgpu.barrier_arrive(p_full.at[slot])
            plgpu.barrier_wait(do_full.at[slot])
            p = p.astype(dtype)
            if interpret:  # which wants left operands in shared memory
                left_smem[...] = p
                p = left_smem
            plgpu.wgmma(ref, p, do_smem)
            plgpu.barrier_wait(ds_full.at[slot])
            add_half_of_dq(0, slot, tile, head)
            plgpu.barrier_arrive(do_empty.at[slot])

        def visit_for_dk(ref, masked, slot, tile, head):
            """dP, dS and dk of one query tile."""
            del masked
            plgpu.barrier_wait(q_full.at[slot])
            plgpu.barrier_wait(do_full.at[slot])
            dp = product(slot, 1, v_smem, do_smem)
            plgpu.barrier_arrive(do_empty.at[slot])
            plgpu.barrier_wait(p_full.at[slot])
            p = plgpu.load(p_smem, layout=ACC)
            ds = (p * dp).astype(dtype)
            # The other warpgroup has read what was here: it has shared a P since.
            ds_smem[...] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(ds_full.at[slot])
            plgpu.wgmma(ref, ds_smem if interpret else ds, q_smem.at[slot])
            add_half_of_dq(1, slot, tile, head)

        def compute(visit, out, factor):
            plgpu.set_max_registers(config.compute_registers, action="increase")

            def run_unit(r, unit, first_step):
                kv_head, tile, begin, count, num_masked = unit
                plgpu.barrier_wait(kv_full.at[lax.rem(r, 2)])

                def run_heads(ref):
                    def run_head(head, step):
                        def visit_tile(masked, j, step):
                            visit(
                                ref, masked, lax.rem(step, _STAGES), tiles_ref[begin + j],
                                kv_head * group + head,
                            )  # fmt: skip
                            return step + 1

                        for first, end, masked in (
                            (0, num_masked, True),
                            (num_masked, count, False),
                        ):
                            step = lax.fori_loop(
                                first, end,
                                lambda j, step, masked=masked: visit_tile(masked, j, step), step,
                            )  # fmt: skip
                        return step

                    end = lax.fori_loop(0, group, run_head, first_step)
                    total = plgpu.wgmma_accumulator_load(ref, wait_n=0)
                    plgpu.barrier_arrive(kv_empty.at[lax.rem(r, 2)])
                    out.at[pl.ds(tile * ROWS, ROWS), kv_head][...] = total * factor
                    return end

                return pl.run_scoped(run_heads, plgpu.ACC((ROWS, dim), jnp.float32))

            run_units(run_unit)
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == 0)(lambda: compute(visit_for_dv, dv_out, 1.0))
        pl.when(wg == 1)(lambda: compute(visit_for_dk, dk_out, scale))

    tile = plgpu.SMEM((ROWS, dim), dtype, transforms=TILED)
    square = plgpu.SMEM((ROWS, ROWS), dtype, transforms=TILED)
    return launch(
        kernel,
        scratch_types=dict(
            k_smem=tile,
            v_smem=tile,
            q_smem=plgpu.SMEM((_STAGES, ROWS, dim), dtype, transforms=TILED),
            do_smem=tile,
            p_smem=plgpu.SMEM((ROWS, ROWS), jnp.float32, transforms=TILED_32),
            ds_smem=square,
            dq_smem=plgpu.SMEM((2, ROWS, ROWS), jnp.int32, transforms=TILED_32),
            left_smem=square if interpret else None,
            index_smem=plgpu.SMEM((ROWS,), jnp.int32),
            stats_smem=plgpu.SMEM((_STAGES, 3, ROWS), jnp.float32),
            spans_smem=plgpu.SMEM((_STAGES, 2, ROWS), jnp.int32),
            unit_smem=plgpu.SMEM((2, 1), jnp.int32),
            kv_full=plgpu.Barrier(num_arrivals=3, num_barriers=2),
            kv_empty=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            q_empty=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            do_full=plgpu.Barrier(num_barriers=_STAGES),
            do_empty=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            spans_full=plgpu.Barrier(num_barriers=_STAGES),
            p_full=plgpu.Barrier(num_barriers=_STAGES),
            ds_full=plgpu.Barrier(num_barriers=_STAGES),
            unit_full=plgpu.Barrier(num_barriers=2),
            unit_empty=plgpu.Barrier(num_arrivals=3, num_barriers=2),
        ),
        num_ctas=num_ctas,
        num_threads=3,
        interpret=interpret,
        operands=(q, k, v, dout, stats, query_spans(mask), mask.kv_index, *schedule),
        quantum=quantum,
    )
