"""Common table sizes for the plans of a run, so that many batches share one compiled program."""

import logging
import math
import operator
from collections.abc import Iterable

from fcp_jax.plan import Plan, bucket_size, pad_plan

logger = logging.getLogger(__name__)

_SMALLEST = 16
"""Least size of a table: small counts vary most from batch to batch."""


class PlanBuckets:
    """Pads plans to the largest table sizes seen so far; sizes never shrink.

    A padded table entry costs a few bytes and no work, a table that outgrows its bucket costs a
    compile. So when one must grow all get headroom, and `reserve` looks at the first batches of a
    run before anything is compiled. Plans of the "static" transport still compile one by one:
    their rounds are part of the program.

    Example:
      buckets = PlanBuckets()
      buckets.reserve(make_batch_plan(rows, config) for rows in first_batches)
      for rows in batches:
          step(params, batch, buckets.pad(make_batch_plan(rows, config)))
    """

    def __init__(self, headroom: float = 2.0):
        """Starts empty.

        Args:
          headroom: when a table must grow, each gets room for this many times the plan's rows, at
            least 1.

        Raises:
          ValueError: if headroom is below 1 or not finite.
        """
        if not 1.0 <= headroom < math.inf:
            raise ValueError(f"headroom must be a finite number of at least 1, got {headroom}")
        self._headroom = headroom
        self._sizes: tuple[int, ...] | None = None
        self._num_growths = 0

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """What plans are padded to, as in `Plan.table_sizes`; None before the first plan."""
        return self._sizes

    @property
    def num_growths(self) -> int:
        """How often a plan exceeded the sizes that earlier plans were padded to."""
        return self._num_growths

    def reserve(self, plans: Iterable[Plan]) -> None:
        """Makes room for plans that are still to come; this counts as no growth."""
        need = [plan.table_sizes for plan in plans]
        if need:
            self._sizes = self._grown(tuple(map(max, *need, need[0])))

    def pad(self, plan: Plan) -> Plan:
        """Returns the plan at the common sizes, which grow, with a log line, if it exceeds them."""
        need = plan.table_sizes
        if self._sizes and all(map(operator.ge, self._sizes, need)):
            return pad_plan(plan, self._sizes)
        sizes = self._grown(need)
        if self._sizes is not None:
            self._num_growths += 1
            logger.info(
                "plan tables grow from %s to %s (growth %d): the next step compiles again",
                self._sizes,
                sizes,
                self._num_growths,
            )
        self._sizes = sizes
        return pad_plan(plan, sizes)

    def _grown(self, need: tuple[int, ...]) -> tuple[int, ...]:
        """Room for these sizes and more, in every table, as one compile serves all of them."""
        have = self._sizes or (0,) * len(need)
        roomy = (bucket_size(max(math.ceil(new * self._headroom), _SMALLEST)) for new in need)
        return tuple(map(max, have, roomy))
