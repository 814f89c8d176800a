"""Block attention on Hopper: which cases its kernels serve, and with which tiles.

The kernels are in `attention_forward_mgpu` and `attention_backward_mgpu`; their work in tiles comes
from `tile_schedule`. docs/kernels_attention.md tells what was tried and measured.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    attention_backward_mgpu,
    attention_backward_wide_mgpu,
    attention_forward_mgpu,
    tile_schedule,
)
from pallas_kernels.implementations import num_sms
from pallas_kernels.mgpu_common import ROWS
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

# Written by `python -m pallas_kernels tune`; says on what card and when.
TUNED = pathlib.Path(__file__).parent / "tuned_h200.json"


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tiles and resources of the forward kernel.

    Attributes:
      tile_kv: kv rows of a tile, a multiple of 64.
      kv_piece: neighboring rows in a tile, which is gathered from pieces; divides `tile_kv`. Small
        ones visit fewer hidden pairs of short segments.
      stages: kv tiles in shared memory.
      pack: query heads of one kv head that a thread block works on at once, 1 or 2; the two
        compute warpgroups take 64 rows of one head each, or the same 64 rows of two heads.
      ping_pong: whether the two take turns in issuing their matrix products.
      q_buffers: query tiles in shared memory; with 2 the next one arrives early.
      stage_out: whether the output leaves through shared memory.
      compute_registers: registers of a thread that computes.
      copy_registers: of a thread that copies. Twice the former and the latter have to fit the 504
        that three warpgroups start with: an increase beyond that waits forever.
    """

    tile_kv: int = 128
    kv_piece: int = 128
    stages: int = 2
    pack: int = 2
    ping_pong: bool = True
    q_buffers: int = 2
    stage_out: bool = True
    compute_registers: int = 232
    copy_registers: int = 40

    @property
    def tile_q(self) -> int:
        """Query rows of a tile."""
        return 2 * ROWS // self.pack


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Resources of the backward kernel, whose tiles are 64 queries by 128 keys.

    Attributes:
      stages: query tiles in shared memory.
      dq_warpgroup: whether a warpgroup of its own multiplies for dq. Without it, the two that
        compute dk and dv also compute half of the columns of dq each, and have the registers to
        keep weights and gradients of scores there as operands.
      compute_registers: registers of a thread of the two warpgroups that compute dk and dv.
      dq_registers: of the one that computes dq.
      copy_registers: of the one that copies. Twice the first and the others are at most 512, or 504
        without a warpgroup for dq.
    """

    stages: int = 2
    dq_warpgroup: bool = True
    compute_registers: int = 208
    dq_registers: int = 72
    copy_registers: int = 24


def untuned(kernel: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> Any:
    """The configuration where the table has none.

    Args:
      kernel: "forward" or "backward".
      q_shape: [query_rows, num_q_heads, head_dim].
      k_shape: [kv_rows, num_kv_heads, head_dim].

    Returns:
      A `ForwardConfig` or a `BackwardConfig`.
    """
    if kernel == "backward" and q_shape[2] == 256:
        return BackwardConfig(dq_warpgroup=False, compute_registers=240, copy_registers=24)
    if kernel == "backward":
        return BackwardConfig()
    pack = 2 if (q_shape[1] // k_shape[1]) % 2 == 0 else 1
    if q_shape[2] == 256:  # as much as shared memory and registers hold
        return ForwardConfig(tile_kv=64, kv_piece=64, pack=pack, q_buffers=1, stage_out=False)
    return ForwardConfig(pack=pack, stage_out=pack == 2)


def forward_config(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> ForwardConfig:
    """The tuned configuration for queries and keys of these shapes."""
    return _tuned("forward", q_shape, k_shape)


def backward_config(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> BackwardConfig:
    """The tuned configuration for queries and keys of these shapes."""
    return _tuned("backward", q_shape, k_shape)


def _tuned(kernel: str, q_shape, k_shape) -> Any:
    even = (q_shape[1] // k_shape[1]) % 2 == 0
    for entry in _table():
        if (entry["kernel"], entry["head_dim"], entry["even_group"]) == (kernel, q_shape[2], even):
            return (ForwardConfig if kernel == "forward" else BackwardConfig)(**entry["config"])
    return untuned(kernel, q_shape, k_shape)


@functools.cache
def _table() -> list[dict]:
    return json.loads(TUNED.read_text())


def unsupported(q: jax.Array, k: jax.Array, block_size: int) -> str | None:
    """Says why the kernels cannot serve these operands, or None where they can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16 operands, got {q.dtype}"
    if q.shape[2] not in (64, 128, 256):
        return f"it needs head_dim 64, 128 or 256, got {q.shape[2]}"
    if block_size % (2 * ROWS):
        return f"it needs a block_size that is a multiple of {2 * ROWS}, got {block_size}"
    if max(q.shape[0], k.shape[0]) >= 2**22:
        return f"it needs fewer than 2**22 rows, got {q.shape[0]} and {k.shape[0]}"
    return None


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: TokenMask,
    work: WorkList,
    state: AttentionState | None,
    *,
    block_size: int,
    scale: float,
    out_dtype=jnp.float32,
    reserve_sms: int = 0,
    config: ForwardConfig | None = None,
    interpret: bool = False,
) -> AttentionState:
    """Mosaic GPU `pallas_kernels.block_attention`.

    Args:
      q: as there.
      k: as there.
      v: as there.
      mask: as there.
      work: as there.
      state: as there.
      block_size: as there.
      scale: as there.
      out_dtype: as there.
      reserve_sms: as there.
      config: tiles; None for the tuned ones.
      interpret: run in the Pallas interpreter, on any machine.

    Returns:
      As there.
    """
    config = config or forward_config(q.shape, k.shape)
    schedule = tile_schedule.query_major(
        mask,
        work,
        block_size=block_size,
        tile_q=config.tile_q,
        kv_piece=config.kv_piece,
        gather=config.tile_kv // config.kv_piece,
    )
    return attention_forward_mgpu.forward(
        q,
        k,
        v,
        mask,
        schedule,
        state,
        scale=scale,
        config=config,
        num_ctas=num_sms() - reserve_sms,
        out_dtype=out_dtype,
        interpret=interpret,
    )


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    mask: TokenMask,
    work: WorkList,
    dq: jax.Array | None,
    *,
    block_size: int,
    scale: float,
    reserve_sms: int = 0,
    config: BackwardConfig | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mosaic GPU `pallas_kernels.block_attention_grad`.

    Args:
      q: as there.
      k: as there.
      v: as there.
      dout: as there.
      lse: as there.
      delta: as there.
      mask: as there.
      work: as there.
      dq: as there.
      block_size: as there.
      scale: as there.
      reserve_sms: as there.
      config: resources; None for the tuned ones.
      interpret: run in the Pallas interpreter, on any machine.

    Returns:
      As there.
    """
    config = config or backward_config(q.shape, k.shape)
    wide = q.shape[2] == 256
    if q.shape[2] != 128 and config.dq_warpgroup == wide:
        raise ValueError(
            "dq_warpgroup must be True for head_dim 64, False for 256, either for 128, got "
            f"{config.dq_warpgroup} and head_dim {q.shape[2]}"
        )
    schedule = tile_schedule.kv_major(
        mask, work, block_size=block_size, q_piece=ROWS, tile_kv=ROWS if wide else 2 * ROWS
    )
    kernel = attention_backward_wide_mgpu if wide else attention_backward_mgpu
    dq_part, dk, dv = kernel.backward(
        q,
        k,
        v,
        dout,
        lse,
        delta,
        mask,
        schedule,
        scale=scale,
        config=config,
        num_ctas=num_sms() - reserve_sms,
        interpret=interpret,
    )
    return dq_part if dq is None else dq + dq_part, dk, dv
