"""What ptxas says about the attention kernels: registers that do not fit cost more than a tile."""

import os
import pathlib
import re
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels import block_attention_mgpu
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

# Bytes that default configurations still spill, by kernel and head_dim.
SPILLS_ALLOWED = {("backward", 128): 80, ("backward", 256): 116}
_ROWS, _KV_HEADS = 4096, 2


def report(kernel: str, head_dim: int, group: int, *, config=None, sharding=None) -> dict:
    """Compiles an attention kernel and reads what ptxas printed.

    Args:
      kernel: "forward", "continue" (forward with a state that goes in), or "backward".
      head_dim: of the heads.
      group: query heads that share a kv head.
      config: a configuration; None for the default one.
      sharding: of the operands, where the device to compile for is not the default one.

    Returns:
      "spilled": bytes that are stored to spill registers; "serialized": whether matrix products
      wait for each other for want of registers.
    """

    def array(shape, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q = array((_ROWS, _KV_HEADS * group, head_dim))
    k = array((_ROWS, _KV_HEADS, head_dim))
    mask = TokenMask(*[array((_ROWS,), jnp.int32)] * 3)
    work = WorkList(array((2,), jnp.int32), array((1,), jnp.int32))
    options = dict(block_size=_ROWS, scale=head_dim**-0.5, config=config)

    def forward(q, k, v, mask, work):
        state = AttentionState.empty(*q.shape) if kernel == "continue" else None
        dtype = q.dtype if state is None else jnp.float32
        return block_attention_mgpu.forward(q, k, v, mask, work, state, out_dtype=dtype, **options)

    def backward(q, k, v, dout, lse, delta, mask, work):
        operands = q, k, v, dout, lse, delta, mask, work, None
        return block_attention_mgpu.backward(*operands, **options)

    row_values = array((q.shape[1], _ROWS), jnp.float32)
    function, operands = forward, (q, k, k, mask, work)
    if kernel == "backward":
        function, operands = backward, (q, k, k, q, row_values, row_values, mask, work)
    with tempfile.TemporaryDirectory() as folder:
        dump = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": folder}
        with mock.patch.dict(os.environ, dump):
            lowered = jax.jit(function).lower(*operands)
            lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        text = "".join(x.read_text() for x in pathlib.Path(folder).rglob("*.ptxas"))
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", text)]
    if not spilled:
        raise RuntimeError("the compiler did not say what ptxas printed; is the kernel compiled?")
    return {"spilled": max(spilled), "serialized": "instructions are serialized" in text}
