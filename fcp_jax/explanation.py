"""What `attention` does with given operands and plan, in words."""

import jax

import pallas_kernels
from fcp_jax.check import raise_if_no_plan
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
      TypeError: if `plan` is none.
      ValueError: if `implementation` is unknown or cannot serve the operands.
    """
    raise_if_no_plan(plan)
    rows = plan.shape.plan_rows_per_rank
    operands = (jax.ShapeDtypeStruct((rows, *x.shape[-2:]), x.dtype) for x in (q, k))
    kernel = pallas_kernels.explain(
        *operands, block_size=plan.shape.block_size, implementation=implementation
    )
    reason = plan.stats.transport_reason if plan.stats else "the plan does not say why"
    return f"kernel {kernel}\ntransport {plan.shape.transport}: {reason}"
