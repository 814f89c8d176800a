"""Planning ahead in a worker process, so that a training step never waits for its plan."""

import collections
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from fcp_jax.config import PlanConfig
from fcp_jax.plan import Plan
from fcp_jax.planner import make_batch_plan


class PlanPrefetcher[Batch]:
    """Iterates over batches with their plans, which a worker process makes ahead.

    The worker is spawned, needs no jax and shares nothing with this process. As with any spawned
    worker, the script that is run must be importable: `if __name__ == "__main__":` around its
    work. An error of the planner, of `batches` or of the worker itself is raised where its batch
    would have come; iteration ends with it.

    Example:
      with PlanPrefetcher(batches, config, rows_of=lambda batch: batch.segments) as planned:
          for batch, plan in planned:
              state = step(state, batch, buckets.pad(plan))
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        config: PlanConfig,
        *,
        rows_of: Callable[[Batch], Sequence],
        ahead: int = 2,
    ):
        """Starts the worker; nothing is read from `batches` before iteration starts.

        Args:
          batches: read in this process, up to `ahead` batches early.
          config: the request, for every batch.
          rows_of: batch -> rows of segments, as in `make_batch_plan`; called in this process.
          ahead: plans in the making or waiting, besides the one in use.

        Raises:
          ValueError: if ahead is below 1.
        """
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        self._batches, self._config, self._rows_of, self._ahead = batches, config, rows_of, ahead
        self._waited = 0.0
        self._pool = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
        )
        self._pool.submit(int)  # starts the worker while the caller is still setting up

    @property
    def seconds_waited(self) -> float:
        """How long iteration has waited for plans so far; the first includes the worker's start."""
        return self._waited

    def __iter__(self) -> Iterator[tuple[Batch, Plan]]:
        """Yields (batch, plan) in the order of `batches`."""
        source = iter(self._batches)
        pending: collections.deque[tuple[Batch, Future[Plan]]] = collections.deque()
        failure: Exception | None = None
        while True:
            while failure is None and len(pending) <= self._ahead:
                try:
                    batch = next(source)
                    rows = self._rows_of(batch)
                except Exception as error:  # raised once the batches before it are used
                    failure = error
                else:
                    pending.append((batch, self._submit(rows)))
            if not pending:
                assert failure is not None
                if isinstance(failure, StopIteration):
                    return
                raise failure
            batch, future = pending.popleft()
            started = time.perf_counter()
            plan = future.result()
            self._waited += time.perf_counter() - started
            yield batch, plan

    def _submit(self, rows: Sequence) -> "Future[Plan]":
        return self._pool.submit(make_batch_plan, rows, self._config)

    def close(self) -> None:
        """Stops the worker; plans in the making are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "PlanPrefetcher[Batch]":
        """Returns itself."""
        return self

    def __exit__(self, *exception) -> None:
        """Closes."""
        self.close()


def _end_with_parent() -> None:
    """Lets a worker end when its parent does; a killed one could not tell it to."""
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
