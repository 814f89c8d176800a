"""Why a step or a product does not run as FlashComm asks: values, counters and log lines.

Reasons are static: they are decided on the host while a program is traced, before any collective,
from values that are the same on every rank. So they are counted and logged once per decision (a
context that is built, a layer that is traced), not once per execution of a compiled program.
"""

import collections
import enum
import logging
import threading

logger = logging.getLogger("flashcomm_jax")


class FallbackReason(enum.StrEnum):
    """Conditions under which the original or the unfused path runs."""

    # The whole step keeps the original program.
    DISABLED = "flashcomm1_disabled"
    EMPTY = "empty"
    DECODE = "decode"
    MIXED_BATCH = "mixed_batch"
    SINGLE_RANK = "tp_is_1"
    CONTEXT_PARALLEL = "cp_is_not_1"
    BELOW_THRESHOLD = "below_min_prefill_tokens"
    NO_CONTEXT = "no_communication_context"
    # One product runs as plain matmul + reduce-scatter, or all-gather + matmul.
    FUSION_DISABLED = "mmrs_fusion_disabled"
    COMM_MODE_NONE = "mmrs_comm_mode_none"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_SHAPE = "unsupported_shape"
    UNSUPPORTED_BIAS = "unsupported_bias"
    CUSTOM_DOT_GENERAL = "custom_dot_general"
    SLOWER_THAN_UNFUSED = "slower_than_unfused"


# Switches that were left off. Nothing was asked for, so nothing falls back.
_NOT_ASKED = {FallbackReason.DISABLED, FallbackReason.FUSION_DISABLED}


class FlashCommFallbackError(ValueError):
    """A fallback under `FlashCommConfig(strict=True)`."""

    def __init__(self, reason: FallbackReason, detail: str):
        """Makes the error of one decision."""
        super().__init__(f"FC1 MMRS skipped: {reason} ({detail})")
        self.reason = reason


_counts: collections.Counter[FallbackReason] = collections.Counter()
_lock = threading.Lock()


def fallback_counts() -> dict[FallbackReason, int]:
    """Number of fallback decisions by reason since the last `reset_fallback_counts`."""
    with _lock:
        return dict(_counts)


def reset_fallback_counts() -> None:
    """Sets every counter to zero."""
    with _lock:
        _counts.clear()


def report(reason: FallbackReason, detail: str, strict: bool) -> None:
    """Counts and logs one fallback decision; every one, so that silence means fused.

    Args:
      reason: what applies.
      detail: the values that made it apply.
      strict: raise instead. The master switch left off counts (a strict caller asked for
        FlashComm); MMRS left off does not, because nothing was asked of it.

    Raises:
      FlashCommFallbackError: if `strict`.
    """
    with _lock:
        _counts[reason] += 1
    if strict and reason is not FallbackReason.FUSION_DISABLED:
        raise FlashCommFallbackError(reason, detail)
    level = logging.INFO if reason in _NOT_ASKED else logging.WARNING
    logger.log(level, "FC1 MMRS skipped: %s (%s)", reason, detail)
