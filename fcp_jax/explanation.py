"""What `attention` does with given operands and plan, in words."""

import jax

import pallas_kernels
from fcp_jax.plan import Plan


def explain(q, k, plan: Plan, *, implementation: str | None = None) -> str:
    """Says which kernel and which transport `attention` uses, and why.

    Args:
      q: queries [..., num_q_heads, head_dim], or anything with their shape and dtype.
      k: keys, likewise.
      plan: the plan.
      implementation: as in `attention`.

    Returns:
      Two lines.

    Raises:
      ValueError: if `implementation` is unknown or cannot serve the operands.
    """
    rows = plan.shape.plan_rows_per_rank
    operands = (jax.ShapeDtypeStruct((rows, *x.shape[-2:]), x.dtype) for x in (q, k))
    kernel = pallas_kernels.explain(
        *operands, block_size=plan.shape.block_size, implementation=implementation
    )
    return f"kernel {kernel}\ntransport {plan.shape.transport}: {plan.stats.transport_reason}"
