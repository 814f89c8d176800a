"""The training loop: plan ahead, step, report, checkpoint."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fcp_jax as fcp
from fcp_jax.buckets import PlanBuckets
from fcp_jax.tables import fragment_blocks
from packed_lm.data import Batch, PackedCorpus
from packed_lm.model import Decoder, ModelConfig, next_token_loss


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What is learned from, and how.

    Attributes:
      steps: length of the schedule.
      peak_lr: learning rate after warmup; it falls to a tenth along a cosine.
      warmup_steps: steps of linear warmup.
      clip_norm: global norm that gradients are clipped to.
      weight_decay: of AdamW.
      seed: of parameters and batch order.
      plan_ahead: batches that are planned before the first step is compiled, to size its tables.
    """

    steps: int
    peak_lr: float = 2e-3
    warmup_steps: int = 5
    clip_norm: float = 1.0
    weight_decay: float = 0.1
    seed: int = 0
    plan_ahead: int = 16

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW with warmup-cosine schedule and clipping."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.1 * self.peak_lr,
            self.peak_lr,
            self.warmup_steps,
            max(self.steps, self.warmup_steps + 1),
            0.1 * self.peak_lr,
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(schedule, b2=0.95, weight_decay=self.weight_decay),
        )


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One training step.

    Attributes:
      step: from 0.
      loss: mean cross entropy before the update, nats a token.
      grad_norm: global norm before clipping.
      num_tokens: without padding.
      seconds: wall time from the end of the step before to the end of this one.
      plan_seconds: host time of the plan, spent in a worker process while steps before ran.
      wait_seconds: how long the step waited for its plan.
      widest_segment: ranks that the most spread segment of the batch is on.
      compiled: whether the step was compiled.
    """

    step: int
    loss: float
    grad_norm: float
    num_tokens: int
    seconds: float
    plan_seconds: float
    wait_seconds: float
    widest_segment: int
    compiled: bool

    @property
    def tokens_per_second(self) -> float:
        """Real tokens over wall time."""
        return self.num_tokens / self.seconds


class Trainer:
    """A model in training; everything follows from the configs and the step number."""

    def __init__(
        self,
        model_config: ModelConfig,
        train_config: TrainConfig,
        plan_config: fcp.PlanConfig,
        corpus: PackedCorpus,
        mesh: Mesh | None,
    ):
        """Initializes the model.

        Args:
          model_config: the decoder.
          train_config: optimizer and schedule.
          plan_config: how each batch is planned.
          corpus: the batches.
          mesh: axes ("dp", "cp"), or None for one device, which computes the same.
        """
        self.train_config, self.plan_config = train_config, plan_config
        self.corpus, self.mesh = corpus, mesh
        self.model = Decoder(model_config, mesh, rngs=nnx.Rngs(train_config.seed))
        self.optimizer = nnx.Optimizer(self.model, train_config.optimizer(), wrt=nnx.Param)
        if mesh is not None:
            self._set_state(jax.device_put(self._state(), NamedSharding(mesh, P())))
        self.buckets = PlanBuckets()
        self.step = 0
        self.num_traces = 0
        self._jitted_step = nnx.jit(self._train_step, donate_argnums=(0, 1))

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self.model, nnx.Param)))

    def plan(self, step: int) -> tuple[Batch, fcp.Plan]:
        """Returns the batch of a step and its plan, tables at their own sizes."""
        batch = self.corpus.batch(step)
        return batch, fcp.make_batch_plan(batch.segments, self.plan_config)

    def run(self, until: int) -> Iterator[StepRecord]:
        """Trains up to, not including, step `until`.

        Raises:
          RuntimeError: if a plan was not for its batch.
        """
        if self.buckets.sizes is None:
            ahead = range(self.step, self.step + self.train_config.plan_ahead)
            self.buckets.reserve(self.plan(step)[1] for step in ahead)
        batches = (self.corpus.batch(step) for step in range(self.step, until))
        with fcp.PlanPrefetcher(batches, self.plan_config, rows_of=_segments) as planned:
            yield from self._steps(planned)

    def _steps(self, planned: fcp.PlanPrefetcher[Batch]) -> Iterator[StepRecord]:
        plans = self._prepared(planned)
        upcoming = next(plans, None)
        ended = time.perf_counter()
        while upcoming is not None:
            batch, arrays, plan, wait_seconds = upcoming
            traces = self.num_traces
            metrics = self._jitted_step(self.model, self.optimizer, arrays, plan)
            step, self.step = self.step, self.step + 1
            # The devices are busy from here on; the host prepares the next step meanwhile.
            upcoming = next(plans, None)
            loss, grad_norm, flags = (np.asarray(x).item() for x in metrics)
            if flags:
                raise RuntimeError(f"{step=}: the plan is not for this batch, {flags=}")
            now = time.perf_counter()
            assert plan.stats is not None
            yield StepRecord(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                num_tokens=batch.num_tokens,
                seconds=now - ended,
                plan_seconds=plan.stats.planning_seconds,
                wait_seconds=wait_seconds,
                widest_segment=max(
                    int(ranks_per_segment(plan, row).max(initial=0))
                    for row in range(len(batch.segments))
                ),
                compiled=self.num_traces > traces,
            )
            ended = time.perf_counter()

    def save(self, directory: Path) -> None:
        """Writes a checkpoint of parameters, optimizer and step number."""
        options = ocp.CheckpointManagerOptions(max_to_keep=3)
        with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
            manager.save(self.step, args=ocp.args.StandardSave(self._state()))

    def restore(self, directory: Path) -> bool:
        """Continues from the latest checkpoint; returns whether there was one."""
        if not directory.exists():
            return False
        with ocp.CheckpointManager(directory.absolute()) as manager:
            step = manager.latest_step()
            if step is None:
                return False
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state())
            self._set_state(manager.restore(step, args=ocp.args.StandardRestore(like)))
        self.step = step
        return True

    def _prepared(self, planned: fcp.PlanPrefetcher[Batch]):
        waited = 0.0
        for batch, plan in planned:
            arrays = batch.arrays
            if self.mesh is not None:
                arrays = jax.device_put(arrays, NamedSharding(self.mesh, P("dp", "cp")))
            yield batch, arrays, self.buckets.pad(plan), planned.seconds_waited - waited
            waited = planned.seconds_waited

    def _train_step(self, model: Decoder, optimizer: nnx.Optimizer, arrays, plan: fcp.Plan):
        """One update; its Python body runs once per trace."""
        self.num_traces += 1
        loss_and_grad = nnx.value_and_grad(next_token_loss, has_aux=True)
        (loss, flags), grads = loss_and_grad(model, arrays, plan)
        grad_norm = optax.tree.norm(grads)
        optimizer.update(model, grads)
        return loss, grad_norm, flags

    def _state(self):
        return nnx.state((self.model, self.optimizer))

    def _set_state(self, state) -> None:
        nnx.update((self.model, self.optimizer), state)


def _segments(batch: Batch) -> list[fcp.Segments]:
    return batch.segments


def ranks_per_segment(plan: fcp.Plan, row: int) -> np.ndarray:
    """Counts the ranks that each segment of a row is spread over, int64 [num_segments]."""
    blocks = fragment_blocks(plan, row)
    rank = blocks.block // plan.shape.num_slots
    pairs = np.unique(np.stack([blocks.segment, rank]), axis=1)
    return np.bincount(pairs[0])
