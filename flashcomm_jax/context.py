"""The static decision of one step: does this prefill run on token shards?"""

import dataclasses
import operator
from typing import Literal, TypeGuard

import jax
from jax.sharding import AbstractMesh, Mesh

from flashcomm_jax.config import FlashCommConfig, ParallelConfig
from flashcomm_jax.reasons import FallbackReason, report

Stage = Literal["prefill", "decode", "mixed"]


@dataclasses.dataclass(frozen=True)
class FlashCommContext:
    """One step's decision. Hashable and static: part of the compile key, never ambient.

    It is computed from host values that every rank shares, so every rank decides the same. Pass
    it to each layer (a model with a draft model beside it passes each its own), and to `jax.jit`
    as a static argument or through a closure.

    Attributes:
      parallel: mesh and axes.
      config: the switches it was built from.
      stage: "prefill", "decode", or "mixed" (both kinds of sequences in one batch).
      original_num_tokens: tokens on the token axis of one row, before padding.
      padded_num_tokens: the next multiple of tp if active, else `original_num_tokens`.
      padded_local_num_tokens: tokens a rank holds: padded_num_tokens / tp if active.
      pad_size: padded_num_tokens - original_num_tokens.
      reason: why it is inactive; None if active.
    """

    parallel: ParallelConfig
    config: FlashCommConfig
    stage: Stage
    original_num_tokens: int
    padded_num_tokens: int
    padded_local_num_tokens: int
    pad_size: int
    reason: FallbackReason | None

    @property
    def active(self) -> bool:
        """Whether hidden states live as token shards."""
        return self.reason is None

    @classmethod
    def build(
        cls,
        num_tokens: int,
        parallel: ParallelConfig | Mesh | AbstractMesh | None,
        config: FlashCommConfig,
        stage: Stage,
    ) -> "FlashCommContext":
        """Decides whether a step runs on token shards.

        Args:
          num_tokens: tokens of one row (one data-parallel rank's tokens), a host integer.
          parallel: mesh and axes; a bare mesh has its axes named as `ParallelConfig` expects.
          config: the switches.
          stage: "prefill" (a chunk of a chunked prefill is one too), "decode" or "mixed".

        Returns:
          The context: active only for a prefill of at least `flashcomm1_min_prefill_tokens`
          (and at least one) tokens, with tp > 1 and cp == 1.

        Raises:
          ValueError: if an argument is not one of the above; a traced token count in particular.
          FlashCommFallbackError: if the context would be inactive and `config.strict`.
        """
        if parallel is None or isinstance(parallel, Mesh | AbstractMesh):
            parallel = ParallelConfig(parallel)
        if not isinstance(parallel, ParallelConfig):
            raise ValueError(f"parallel must be a ParallelConfig or a mesh, got {parallel!r}")
        if not isinstance(config, FlashCommConfig):
            raise ValueError(f"config must be a FlashCommConfig, got {config!r}")
        if stage not in ("prefill", "decode", "mixed"):
            raise ValueError(f"stage must be 'prefill', 'decode' or 'mixed', got {stage!r}")
        if isinstance(num_tokens, jax.core.Tracer):
            raise ValueError(
                "num_tokens must be a host integer (take it from a shape): the decision is "
                "static and the same on all ranks, so it cannot depend on traced values"
            )
        try:
            num_tokens = operator.index(num_tokens)
        except TypeError:
            raise ValueError(f"num_tokens must be an integer, got {num_tokens!r}") from None
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be >= 0, got {num_tokens}")

        reason = _inactive_reason(num_tokens, parallel, config, stage)
        padded, local = num_tokens, num_tokens
        if reason is None:
            local = -(-num_tokens // parallel.tp)
            padded = local * parallel.tp
        else:
            threshold = config.flashcomm1_min_prefill_tokens
            report(
                reason,
                f"{stage=}, {num_tokens=}, tp={parallel.tp}, cp={parallel.cp}, min={threshold}",
                config.strict,
            )
        return cls(parallel, config, stage, num_tokens, padded, local, padded - num_tokens, reason)


def is_active(context: FlashCommContext | None) -> TypeGuard[FlashCommContext]:
    """Whether there is a context, and it is active."""
    return context is not None and context.active


def _inactive_reason(
    num_tokens: int, parallel: ParallelConfig, config: FlashCommConfig, stage: str
) -> FallbackReason | None:
    if not config.enable_flashcomm1:
        return FallbackReason.DISABLED
    if num_tokens == 0:
        return FallbackReason.EMPTY
    if stage == "decode":
        return FallbackReason.DECODE
    if stage == "mixed":
        return FallbackReason.MIXED_BATCH
    if parallel.tp == 1:
        return FallbackReason.SINGLE_RANK
    if parallel.cp != 1:
        return FallbackReason.CONTEXT_PARALLEL
    if num_tokens < config.flashcomm1_min_prefill_tokens:
        return FallbackReason.BELOW_THRESHOLD
    return None
