"""The formula of docs/runtime.md for one rank's memory beside operands and results, in bytes."""

import math


def forward_bytes(shape, stage_rounds, heads, kv_heads, dim, itemsize):
    rows = shape.plan_rows_per_rank
    stage = (stage_rounds * shape.block_size + rows) * 2 * kv_heads * dim
    state = 4 * rows * heads * (dim + 1)
    return state + 3 * itemsize * stage + small_bytes(shape, stage_rounds, heads)


def backward_bytes(shape, stage_rounds, heads, kv_heads, dim, itemsize):
    rows = shape.plan_rows_per_rank
    stage = (stage_rounds * shape.block_size + rows) * 2 * kv_heads * dim
    sums = 4 * rows * (heads + 2 * kv_heads) * dim
    return sums + 3 * (itemsize + 4) * stage + small_bytes(shape, stage_rounds, heads)


def small_bytes(shape, stage_rounds, heads):
    """Masks and tables, and four float32 score tiles of the plain-JAX kernel."""
    masks = 64 * (2 * shape.plan_rows_per_rank + stage_rounds * shape.block_size)
    return masks + 4 * 4 * heads * math.gcd(shape.block_size, 512) ** 2
