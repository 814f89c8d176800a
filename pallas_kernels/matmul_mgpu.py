# pyrefly: ignore-errors
"""Matrix products on Hopper: a persistent, warp-specialized Pallas Mosaic GPU kernel.

One thread block (or a cluster of two) per SM works through output tiles, 128 rows each. One
warpgroup copies; two compute, 64 rows each, with accumulators as wide as the tile, because the
tensor cores read the right operand from shared memory once per 64 rows. Results leave through
shared memory while the next tile begins. Neighbors in time are neighbors in both operands, so that
what one multiprocessor reads is in L2 for the others.

16-bit floats are multiplied as [m, k] by [k, n]; int8 as [m, k] by [n, k], the only order its
instruction has, and scaled per row and per column before it leaves the registers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.implementations import num_sms
from pallas_kernels.mgpu_common import COLUMN, ROW, ROWS, load

TILE_M = 2 * ROWS
_ROW_BYTES = 128  # of a row of a tile in shared memory: the widest swizzle
_STAGE_BYTES = 192 * 1024  # of shared memory for operands; results and scales need 34 KB more


@dataclasses.dataclass(frozen=True)
class MatmulConfig:
    """Tiles and resources of a product.

    Attributes:
      tile_n: columns of an output tile: 64, 128, 192 or 256.
      stages: steps along k in shared memory, each 128 bytes of every row and column of a tile.
      group: row tiles that share column tiles while these are in L2.
      cluster: thread blocks, one above the other, that share the columns by multicast; 1 or 2.
      take_turns: whether the two warpgroups write their results in turns, so that one has the
        tensor cores while the other writes.
      compute_registers: registers of a thread that computes.
      copy_registers: of a thread that copies. Twice the former and the latter are at most 504.
    """

    tile_n: int = 256
    stages: int = 4
    group: int = 16
    cluster: int = 1
    take_turns: bool = True
    compute_registers: int = 232
    copy_registers: int = 40

    def __post_init__(self):
        """Checks what the kernel cannot check itself."""
        if self.tile_n not in (64, 128, 192, 256):
            raise ValueError(f"tile_n must be 64, 128, 192 or 256, got {self.tile_n}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2, got {self.cluster}")
        if 2 * self.compute_registers + self.copy_registers > 504:
            raise ValueError(
                "twice compute_registers and copy_registers must be at most 504, got "
                f"{self.compute_registers} and {self.copy_registers}"
            )


def step_cycles(tile_n: int) -> int:
    """Cycles that one step along k of one tile takes at least.

    Tensor cores multiply 64 rows by tile_n columns and 32 bytes of k in tile_n / 2 cycles. Shared
    memory moves 128 bytes a cycle: the tile as it arrives, and for each such product both operands.
    """
    products = 2 * _ROW_BYTES // 32
    arrives = (TILE_M + tile_n) * _ROW_BYTES
    read = products * (ROWS + tile_n) * 32
    return max(products * tile_n // 2, (arrives + read) // 128)


def choose_config(m: int, n: int, num_ctas: int) -> MatmulConfig:
    """The configuration with the fewest cycles, counting whole rounds of tiles.

    Args:
      m: rows of the product.
      n: columns.
      num_ctas: thread blocks that work at once.

    Returns:
      The default configuration with the best `tile_n`; ties go to the wider one.
    """

    def cycles(tile_n):
        rounds = math.ceil(math.ceil(m / TILE_M) * math.ceil(n / tile_n) / num_ctas)
        return rounds * step_cycles(tile_n)

    tile_n = min((width for width in (256, 192, 128, 64) if width <= n), key=cycles)
    return MatmulConfig(tile_n=tile_n, stages=_STAGE_BYTES // (_ROW_BYTES * (TILE_M + tile_n)))


def unsupported(x, w, columns: tuple[int, int], out_dtype) -> str | None:
    """Says why the kernel cannot serve these operands, or None where it can.

    Args:
      x: [m, k], or anything with its shape and dtype.
      w: [k, n]; [n, k] where x is int8.
      columns: first and last (exclusive) column of the product.
      out_dtype: of the result.
    """
    (m, k), (start, stop) = x.shape, columns
    int8 = x.dtype == jnp.int8
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.int8):
        return f"it needs bfloat16, float16 or int8 operands, got {x.dtype}"
    if out_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"it needs a bfloat16, float16 or float32 result, got {out_dtype}"
    if m < TILE_M or m % 8:
        return f"it needs a multiple of 8 rows, at least {TILE_M}, got {m}"
    step = _ROW_BYTES // x.dtype.itemsize
    if k == 0 or k % step:
        return f"it needs a k that is a multiple of {step}, got {k}"
    # An int32 accumulator holds the sum of this many products of two int8.
    if int8 and k > (2**31 - 1) // 128**2:
        return f"it needs a k below 2**31 / 128**2 for int8, got {k}"
    if start % 64 or stop % 64 or stop == start:
        return f"it needs columns that begin and end at a multiple of 64, got {start} to {stop}"
    if not int8 and w.shape[1] % 64:
        return f"it needs a w whose columns are a multiple of 64, got {w.shape[1]}"
    return None


def matmul(
    x: jax.Array,
    w: jax.Array,
    scales: tuple[jax.Array, jax.Array] | None = None,
    *,
    columns: tuple[int, int],
    out_dtype: jax.typing.DTypeLike,
    reserve_sms: int = 0,
    config: MatmulConfig | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Runs the kernel.

    Args:
      x: [m, k], bfloat16, float16 or int8.
      w: [k, n], the same dtype; [n, k] for int8.
      scales: for int8, float32 factors of the rows [m] and of the columns [n].
      columns: which of the n columns to compute, [start, stop).
      out_dtype: of the result; accumulation is in float32 or int32.
      reserve_sms: streaming multiprocessors to leave to others, such as transfers.
      config: tiles; None for the best by `choose_config`.
      interpret: run in the Pallas interpreter, on any machine.

    Returns:
      [m, stop - start].
    """
    (m, k), dtype, out_dtype = x.shape, x.dtype, jnp.dtype(out_dtype)
    start, width = columns[0], columns[1] - columns[0]
    num_ctas = max(1, num_sms() - reserve_sms)
    config = config or choose_config(m, width, num_ctas)
    cluster = config.cluster if m >= config.cluster * TILE_M else 1
    tile_n, stages, scaled = min(config.tile_n, width), config.stages, scales is not None
    depth = _ROW_BYTES // dtype.itemsize  # of a step along k
    chunk = _ROW_BYTES // out_dtype.itemsize  # columns that leave together
    num_steps = k // depth
    tiles = pl.cdiv(m, cluster * TILE_M), pl.cdiv(width, tile_n)
    num_tiles = math.prod(tiles)
    num_clusters = min(max(1, num_ctas // cluster), num_tiles)

    def kernel(
        x_ref, w_ref, row_scale_ref, column_scale_ref, out_ref, x_smem, w_smem, out_smem,
        full, empty, turn, row_scale_smem, column_scale_smem, scale_full, scale_empty,
    ):  # fmt: skip
        first = lax.axis_index("tiles")
        wg = lax.axis_index("wg")

        def run_tiles(run_tile):
            """Folds step = run_tile(row, column, step) over this block's tiles, from step 0."""

            def body(i, step):
                tile = plgpu.planar_snake(first + i * num_clusters, tiles, 0, config.group)
                # The last tile is moved back to end with the array. What it shares with its
                # neighbor is computed twice, to the same bits.
                row = jnp.minimum(tile[0] * (cluster * TILE_M), m - cluster * TILE_M)
                if cluster > 1:
                    row += lax.axis_index("cluster") * TILE_M
                return run_tile(row, jnp.minimum(tile[1] * tile_n, width - tile_n), step)

            num_mine = lax.div(num_tiles - first + (num_clusters - 1), num_clusters)
            return lax.fori_loop(0, num_mine, body, jnp.int32(0))

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(config.compute_registers, action="increase")
            mine = pl.ds(wg * ROWS, ROWS)
            if config.take_turns:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def run_tile(row, column, step):
                def issue(acc, i):
                    slot = lax.rem(step + i, stages)
                    plgpu.barrier_wait(full.at[slot])
                    right = w_smem.at[slot].T if scaled else w_smem.at[slot]
                    plgpu.wgmma(acc, x_smem.at[slot, mine], right)

                def release(i):
                    plgpu.barrier_arrive(empty.at[lax.rem(step + i, stages)])

                def product(acc):
                    issue(acc, 0)

                    def body(i, _):
                        issue(acc, i)
                        plgpu.wgmma_wait(1)
                        release(i - 1)

                    lax.fori_loop(1, num_steps, body, None)
                    result = acc[...]
                    release(num_steps - 1)
                    return result

                acc_type = plgpu.ACC((ROWS, tile_n), jnp.int32 if scaled else jnp.float32)
                write(pl.run_scoped(product, acc_type), row, column)
                return step + num_steps

            def write(acc, row, column):
                if config.take_turns:
                    plgpu.barrier_wait(turn.at[wg])
                if scaled:
                    plgpu.barrier_wait(scale_full)
                    by_row = load(row_scale_smem.at[mine], ROW)
                for i in range(tile_n // chunk):
                    part = acc[:, i * chunk : (i + 1) * chunk]
                    if scaled:
                        by_column = load(column_scale_smem.at[pl.ds(i * chunk, chunk)], COLUMN)
                        part = part.astype(jnp.float32)
                        part *= lax.broadcast_in_dim(by_row, part.shape, [0])
                        part *= lax.broadcast_in_dim(by_column, part.shape, [1])
                    stage = out_smem.at[wg, i % 2]
                    target = out_ref.at[
                        pl.ds(row + wg * ROWS, ROWS), pl.ds(column + i * chunk, chunk)
                    ]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    stage[...] = part.astype(out_dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(stage, target)
                if scaled:
                    plgpu.barrier_arrive(scale_empty)
                if config.take_turns:
                    plgpu.barrier_arrive(turn.at[1 - wg])

            run_tiles(run_tile)
            if config.take_turns:
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[0]))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 2)
        def _copy():
            plgpu.set_max_registers(config.copy_registers, action="decrease")
            multicast = dict(collective_axes="cluster") if cluster > 1 else {}

            def run_tile(row, column, step):
                rows, columns = pl.ds(row, TILE_M), pl.ds(start + column, tile_n)

                def copy(i, _):
                    slot = lax.rem(step + i, stages)
                    part = pl.ds(i * depth, depth)
                    left, right = (rows, part), (columns, part) if scaled else (part, columns)
                    pl.when(step + i >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    plgpu.copy_gmem_to_smem(x_ref.at[left], x_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        w_ref.at[right], w_smem.at[slot], full.at[slot], **multicast
                    )

                lax.fori_loop(0, num_steps, copy, None)
                if scaled:  # last, so that nothing here waits for the tile before to be written
                    pl.when(step > 0)(lambda: plgpu.barrier_wait(scale_empty))
                    plgpu.copy_gmem_to_smem(row_scale_ref.at[rows], row_scale_smem, scale_full)
                    plgpu.copy_gmem_to_smem(
                        column_scale_ref.at[columns], column_scale_smem, scale_full
                    )
                return step + num_steps

            steps = run_tiles(run_tile)

            # The interpreter wants every arrival observed, and a thread block must not leave while
            # its peer may still arrive at its barriers.
            if interpret or cluster > 1:

                def drain(i, _):
                    plgpu.barrier_wait(empty.at[lax.rem(i, stages)])

                lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)
            if interpret and scaled:
                plgpu.barrier_wait(scale_empty)

    def tiled(shape, dtype):
        columns = _ROW_BYTES // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(_ROW_BYTES)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    empty = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    mesh = {}
    if cluster > 1:
        empty = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=2, num_barriers=stages
        )
        mesh = dict(cluster=(cluster,), cluster_names=("cluster",))
    scratch = dict(
        x_smem=tiled((stages, TILE_M, depth), dtype),
        w_smem=tiled((stages, *((tile_n, depth) if scaled else (depth, tile_n))), dtype),
        out_smem=tiled((2, 2, ROWS, chunk), out_dtype),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        empty=empty,
        turn=plgpu.Barrier(num_barriers=2),
        row_scale_smem=plgpu.SMEM((TILE_M,), jnp.float32) if scaled else None,
        column_scale_smem=plgpu.SMEM((tile_n,), jnp.float32) if scaled else None,
        scale_full=plgpu.Barrier(num_arrivals=2) if scaled else None,
        scale_empty=plgpu.Barrier(num_arrivals=2) if scaled else None,
    )
    launch = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, width), out_dtype),
        scratch_types=scratch,
        grid=(num_clusters,),
        grid_names=("tiles",),
        **mesh,
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return launch(x, w, *(scales or (None, None)))
