"""The formula of docs/runtime.md for one rank's memory beside operands and results, in bytes."""

import math


def forward_bytes(shape, stage_rounds, heads, kv_heads, dim, itemsize, hopper=False):
    rows = shape.plan_rows_per_rank
    stage = (stage_rounds * shape.block_size + rows) * 2 * kv_heads * dim
    state = 4 * rows * heads * (dim + 1)
    workspace = 0 if hopper else score_bytes(shape, heads)
    return state + 3 * itemsize * stage + workspace + table_bytes(shape, stage_rounds)


def backward_bytes(shape, stage_rounds, heads, kv_heads, dim, itemsize, hopper=False):
    rows = shape.plan_rows_per_rank
    stage = (stage_rounds * shape.block_size + rows) * 2 * kv_heads * dim
    sums = 4 * rows * (heads + 2 * kv_heads) * dim
    # The Hopper kernel sums the dq of a call as integers.
    workspace = 4 * rows * heads * dim if hopper else score_bytes(shape, heads)
    return sums + 3 * (itemsize + 4) * stage + workspace + table_bytes(shape, stage_rounds)


def table_bytes(shape, stage_rounds):
    return 64 * (2 * shape.plan_rows_per_rank + stage_rounds * shape.block_size)


def score_bytes(shape, heads):
    """Four float32 score tiles of the plain-JAX kernel."""
    return 4 * 4 * heads * math.gcd(shape.block_size, 512) ** 2
