"""Block attention on Hopper: which cases its kernels serve, and with which tiles.

The kernels are in `attention_forward_mgpu` and `attention_backward_mgpu`; their work in tiles comes
from `tile_schedule`. docs/kernels_attention.md tells what was tried and measured.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import attention_backward_mgpu, attention_forward_mgpu, tile_schedule
from pallas_kernels.mgpu_common import ROWS
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

_H200_SMS = 132


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tiles and resources of the forward kernel.

    Attributes:
      tile_kv: kv rows of a tile.
      stages: kv tiles in shared memory.
      pack: query heads of one kv head that a thread block works on at once, 1 or 2; the two
        compute warpgroups take 64 rows of one head each, or the same 64 rows of two heads.
      ping_pong: whether the two take turns in issuing their matrix products.
      q_buffers: query tiles in shared memory; with 2 the next one arrives early.
      stage_out: whether the output leaves through shared memory.
      compute_registers: registers of a thread that computes.
      copy_registers: of a thread that copies. Twice the former and the latter have to fit the 504
        that three warpgroups start with: an increase beyond that waits forever.
      cluster: thread blocks that share kv tiles by multicast, 1 or 2.
    """

    tile_kv: int = 128
    stages: int = 2
    pack: int = 2
    ping_pong: bool = True
    q_buffers: int = 2
    stage_out: bool = True
    compute_registers: int = 232
    copy_registers: int = 40
    cluster: int = 1

    @property
    def tile_q(self) -> int:
        """Query rows of a tile."""
        return 2 * ROWS // self.pack


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Resources of the backward kernel, whose tiles are 64 queries by 128 keys.

    Attributes:
      stages: query tiles in shared memory.
      compute_registers: registers of a thread of the two warpgroups that compute dk and dv.
      dq_registers: of the one that computes dq.
      copy_registers: of the one that copies; twice the first and the others are at most 512.
    """

    stages: int = 2
    compute_registers: int = 208
    dq_registers: int = 72
    copy_registers: int = 24


def forward_config(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> ForwardConfig:
    """The tuned configuration for queries and keys of these shapes."""
    pack = 2 if (q_shape[1] // k_shape[1]) % 2 == 0 else 1
    return ForwardConfig(pack=pack)


def unsupported(q: jax.Array, k: jax.Array, block_size: int) -> str | None:
    """Says why the kernels cannot serve these operands, or None where they can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16 operands, got {q.dtype}"
    if q.shape[2] not in (64, 128):
        return f"it needs head_dim 64 or 128, got {q.shape[2]}"
    if block_size % (2 * ROWS):
        return f"it needs a block_size that is a multiple of {2 * ROWS}, got {block_size}"
    if max(q.shape[0], k.shape[0]) >= 2**22:
        return f"it needs fewer than 2**22 rows, got {q.shape[0]} and {k.shape[0]}"
    return None


def no_device() -> str | None:
    """Says why the kernels cannot run on the default device, or None where they can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs a GPU, and the default device is of platform {device.platform!r}"
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return (
            f"it needs compute capability 9.0 (Hopper), and {device.device_kind} has {capability}"
        )
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
        mask, work, block_size=block_size, tile_q=config.tile_q, tile_kv=config.tile_kv
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
        num_ctas=_num_sms() - reserve_sms,
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
    schedule = tile_schedule.kv_major(
        mask, work, block_size=block_size, tile_q=ROWS, tile_kv=2 * ROWS
    )
    dq_part, dk, dv = attention_backward_mgpu.backward(
        q,
        k,
        v,
        dout,
        lse,
        delta,
        mask,
        schedule,
        scale=scale,
        config=config or BackwardConfig(),
        num_ctas=_num_sms() - reserve_sms,
        interpret=interpret,
    )
    return dq_part if dq is None else dq + dq_part, dk, dv


def _num_sms() -> int:
    device = jax.devices()[0]
    return (
        getattr(device, "core_count", None) or _H200_SMS if device.platform == "gpu" else _H200_SMS
    )
