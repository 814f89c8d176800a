"""Pallas GPU kernels for packed attention and fused matmuls, each with a plain-JAX twin."""

from pallas_kernels.block_attention import (
    block_attention,
    block_attention_grad,
    explain,
)
from pallas_kernels.matmul import explain_matmul, matmul
from pallas_kernels.quantized_matmul import quantize_rows, quantized_matmul
from pallas_kernels.work_list import AttentionState, TokenMask, WorkList

__all__ = [
    "AttentionState",
    "TokenMask",
    "WorkList",
    "block_attention",
    "block_attention_grad",
    "explain",
    "explain_matmul",
    "matmul",
    "quantize_rows",
    "quantized_matmul",
]
