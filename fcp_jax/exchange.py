"""Moving payloads between ranks: one loop over the plan's groups of rounds, for every transport."""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from fcp_jax.mesh import Axes
from fcp_jax.plan import PlanShape
from fcp_jax.rounds import Round, permutation


def run_stages(
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

            def trip(index, carry, rounds=rounds):
                return stage(index, rounds, carry)

            end = first + trips[group]
            carry = lax.fori_loop(first, end, trip, carry)
            first = end
    return carry


def run_pipeline(
    groups: Sequence[Sequence[Round]],
    trips: jax.Array,
    shape: PlanShape,
    pull: Callable,
    local: Callable,
    compute: Callable,
):
    """Runs all stages, each one's transfers in flight while the stage before it computes.

    The first stage's transfers hide behind `local`. A group prefetches inside its loop but for the
    last trip, which prefetches for the next group; each group therefore runs at least once.

    `local` and `compute` get the arrivals of the stage to come and return them behind a barrier
    with what they must hide behind: XLA does not know how long a kernel runs, and would otherwise
    wait for the transfers before it.

    Args:
      groups: rounds of each group.
      trips: int32 [num_groups], run-time number of stages of each group, at least 1.
      shape: the plan's.
      pull: (index, rounds) -> arrivals.
      local: following -> (following, carry), work that needs no arrivals.
      compute: (index, rounds, arrivals, following, carry) -> (following, carry).

    Returns:
      The last carry.
    """
    if not groups:
        return local(())[1]
    arrivals, carry = local(pull(0, groups[0]))
    first = 0
    for group, rounds in enumerate(groups):
        last = first
        if shape.transport != "static":
            last = first + trips[group] - 1

            def trip(index, state, rounds=rounds):
                arrivals, carry = state
                return compute(index, rounds, arrivals, pull(index + 1, rounds), carry)

            arrivals, carry = lax.fori_loop(first, last, trip, (arrivals, carry))
        first = last + 1
        following = pull(first, groups[group + 1]) if group + 1 < len(groups) else ()
        arrivals, carry = compute(last, rounds, arrivals, following, carry)
    return carry


def send(payload: jax.Array, round_: Round, shape: PlanShape, axes: Axes, *, back: bool = False):
    """Sends a payload through one round, or `back` along it; who is sent nothing gets zeros."""
    pairs = permutation(shape.transport, round_, shape.num_ranks)
    if back:
        pairs = [(dst, src) for src, dst in pairs]
    static = shape.transport == "static"
    return lax.ppermute(payload, axes.joint if static else axes.cp, pairs)
