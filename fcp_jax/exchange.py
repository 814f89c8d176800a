"""Moving payloads between ranks: one loop over the plan's groups of rounds, for every transport."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from fcp_jax.mesh import Axes
from fcp_jax.plan import PlanShape
from fcp_jax.rounds import Round, permutation


def run_groups(
    groups: Sequence[Sequence[Round]],
    trips: jax.Array,
    shape: PlanShape,
    stage: Callable,
    carry,
):
    """Folds `carry = stage(index, rounds, carry)` over all stages in order.

    Args:
      groups: rounds of each group.
      trips: int32 [num_groups], run-time number of stages of each group; static rounds run once.
      shape: the plan's.
      stage: what one stage does; `index` selects its table rows.
      carry: initial value.
    """
    first = 0
    for group, rounds in enumerate(groups):
        if shape.transport == "static":
            carry = stage(first, rounds, carry)
            first += 1
        else:
            offset = first

            def trip(i, carry, offset=offset, rounds=rounds):
                return stage(offset + i, rounds, carry)

            carry = lax.fori_loop(0, trips[group], trip, carry)
            first = offset + trips[group]
    return carry


def send(payload: jax.Array, round_: Round, shape: PlanShape, axes: Axes, *, back: bool = False):
    """Sends a payload through one round, or `back` along it; who is sent nothing gets zeros."""
    pairs = permutation(shape.transport, round_, shape.num_ranks)
    if back:
        pairs = [(dst, src) for src, dst in pairs]
    static = shape.transport == "static"
    return lax.ppermute(payload, axes.joint if static else axes.cp, pairs)
