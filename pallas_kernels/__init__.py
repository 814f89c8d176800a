"""Pallas GPU kernels for packed attention and fused matmuls, each with a plain-JAX twin."""

from pallas_kernels.block_attention import (
    block_attention,
    block_attention_grad,
    explain,
)
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

__all__ = [
    "AttentionState",
    "TokenMask",
    "WorkList",
    "block_attention",
    "block_attention_grad",
    "explain",
]
