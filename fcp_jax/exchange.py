"""Moving payloads between ranks: one loop over the plan's groups of rounds, for every transport."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
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
    local: Callable,
    compute: Callable,
    exposed: tuple[Callable, Callable] | None = None,
):
    """Runs all stages, each one's transfers in flight while the stage before it computes.

    Which stages run is data: the group of each stage follows from `trips`, the same on every rank,
    and picks a branch. A branch holds transfers together with the work that hides them, as no
    transfer can outlive its branch: the work of stage k is in the branch of the group of stage
    k + 1, whose blocks it pulls. A group of no trips costs nothing but program text.

    Where stages send back, the work of stage k also hides what stage k - 1 does. There are branches
    for a stage whose neighbors are of one group or of two in a row; between other neighbors, and
    after the last stage, nothing hides what is sent back. Nor is anything to hide the pull of
    stage 1 where stage 0 is the only one of its group.

    Args:
      groups: rounds of each group.
      trips: int32 [num_groups], run-time number of stages of each group; the first at least 1.
      shape: the plan's.
      local: rounds -> (arrivals, carry), work that needs no arrivals, hiding the first stage's.
      compute: (index, rounds, back, arrivals, carry) -> (arrivals, carry), work on the arrivals of
        stage `index`, hiding the transfers of stage index + 1, which runs `rounds`, and what stage
        index - 1 sends along its rounds `back`. Without rounds, what it returns for arrivals goes
        unused.
      exposed: for stages that send back, the transfers alone: a function (index, rounds, arrivals)
        -> arrivals that pulls for stage `index` in place of the old ones, and one (index, back,
        carry) -> carry that sends along `back` what stage `index` has to.

    Returns:
      The last carry.
    """
    if not groups:
        return local(())[1]
    arrivals, carry = local(groups[0])
    if shape.transport == "static":
        index, back = jnp.int32(0), ()
        for group, own in enumerate(groups):
            rounds = groups[group + 1] if group + 1 < len(groups) else ()
            arrivals, carry = compute(index, rounds, back, arrivals, carry)
            # What a stage sends depends on its index, so nothing is sent stages ahead.
            index, arrivals, carry = lax.optimization_barrier((index + 1, arrivals, carry))
            back = own if exposed else ()
        return exposed[1](index - 1, back, carry) if exposed else carry

    ends = jnp.cumsum(trips)
    last = len(groups) - 1

    def group_of(stage):
        return jnp.sum(ends <= stage, dtype=jnp.int32)

    def one_way(index, state):
        bodies = [functools.partial(compute, index, rounds, ()) for rounds in (*groups, ())]
        return lax.switch(group_of(index + 1), bodies, *state)

    if exposed is None:
        return lax.fori_loop(0, ends[-1], one_way, (arrivals, carry))[1]
    pull, finish = exposed

    def choose(wanted, index, work, state):
        """Does work(index, rounds, state) with the rounds of stage `index`, where wanted."""
        bodies = [functools.partial(work, index, rounds) for rounds in groups]
        choice = jnp.where(wanted, group_of(index), len(groups))
        return lax.switch(choice, [*bodies, lambda state: state], state)

    def both_ways(index, state):
        """A stage, or, past the last one, only what that has to send back."""
        arrivals, carry = state
        before, after = group_of(index - 1), group_of(index + 1)
        is_first, is_over, more = index == 0, index == ends[-1], index + 1 < ends[-1]
        pairs = [(rounds, rounds) for rounds in groups]
        pairs += [(following, own) for own, following in itertools.pairwise(groups)]
        pairs += [(groups[0], ()), ((), ())]
        hides = more & jnp.where(is_first, after == 0, after - before <= 1)
        choice = jnp.where(before == after, after, last + after)
        choice = jnp.where(is_first, len(pairs) - 2, choice)
        choice = jnp.where(hides, choice, len(pairs) - 1 + is_over)
        carry = choose(~hides & ~is_first, index - 1, finish, carry)
        bodies = [functools.partial(compute, index, *pair) for pair in pairs]
        arrivals, carry = lax.switch(choice, [*bodies, lambda *state: state], arrivals, carry)
        return choose(more & ~hides, index + 1, pull, arrivals), carry

    return lax.fori_loop(0, ends[-1] + 1, both_ways, (arrivals, carry))[1]


def transfer(
    payloads: Sequence[jax.Array],
    rounds: Sequence[Round],
    shape: PlanShape,
    axes: Axes,
    sources: jax.Array | None = None,
    *,
    back: bool = False,
) -> list[jax.Array] | jax.Array:
    """Moves the payloads of a stage, one a round.

    Args:
      payloads: what this rank sends in each round, all of one shape; with `back`, what it returns.
      rounds: of the stage.
      shape: the plan's.
      axes: the mesh's.
      sources: for "ragged", int32 [N, G]: the rank that each arrival of each rank comes from, N
        where nothing arrives; else None.
      back: from receivers to senders.

    Returns:
      What arrives in each round, as a list or stacked; zeros where nothing does.
    """
    if sources is not None and rounds:
        return _ragged(jnp.stack(payloads), sources, axes, back)
    return [
        send(payload, round_, shape, axes, back=back)
        for payload, round_ in zip(payloads, rounds, strict=True)
    ]


def send(payload: jax.Array, round_: Round, shape: PlanShape, axes: Axes, *, back: bool = False):
    """Sends a payload through one round, or `back` along it; who is sent nothing gets zeros."""
    pairs = permutation(shape.transport, round_, shape.num_ranks)
    if back:
        pairs = [(dst, src) for src, dst in pairs]
    static = shape.transport == "static"
    return lax.ppermute(payload, axes.joint if static else axes.cp, pairs)


def all_sources(source: jax.Array, shape: PlanShape, axes: Axes) -> jax.Array | None:
    """Gathers [K, G] sources of this rank's arrivals to [N, K, G], where the transport needs it."""
    return lax.all_gather(source, axes.cp) if shape.transport == "ragged" else None


def _ragged(payloads: jax.Array, sources: jax.Array, axes: Axes, back: bool) -> jax.Array:
    """Moves [G, ...] payloads, in order of their destinations, by one `ragged_all_to_all`.

    The offsets of all ranks follow from `sources`, as each rank orders what it sends by
    destination and what it receives by source.
    """
    rank = lax.axis_index(axes.cp)
    ranks = jnp.arange(sources.shape[0], dtype=jnp.int32)
    sends = jnp.sum(sources == rank, axis=1, dtype=jnp.int32)
    receives = jnp.sum(sources[rank][:, None] == ranks, axis=0, dtype=jnp.int32)
    before = (ranks < rank)[:, None, None]
    if back:
        # At each rank, what lower ranks return to it comes before what this rank does.
        offsets = jnp.sum(before & (sources[:, :, None] == ranks), axis=(0, 1), dtype=jnp.int32)
        sends, receives = receives, sends
    else:
        offsets = jnp.sum(sources < rank, axis=1, dtype=jnp.int32)
    return _ragged_all_to_all(
        payloads,
        jnp.zeros_like(payloads),
        jnp.cumsum(sends) - sends,
        sends,
        offsets,
        receives,
        axis_name=axes.cp,
    )


_ragged_all_to_all = lax.ragged_all_to_all
"""Replaced in tests: XLA has it for GPUs (and TPUs) only."""
