"""FCP context parallelism: packed sequences, any placement, congestion-free rounds.

Planning needs numpy only. Everything that runs on devices is imported on first use, so that a
planning process never imports jax.
"""

import importlib
from typing import TYPE_CHECKING

from fcp_jax._pytree import register_when_jax_is_imported
from fcp_jax.buckets import PlanBuckets
from fcp_jax.config import PlanConfig
from fcp_jax.gpu import gpu_compiler_options
from fcp_jax.plan import Plan, PlanShape, bucket_size, pad_plan
from fcp_jax.planner import make_batch_plan, make_plan
from fcp_jax.prefetch import PlanPrefetcher
from fcp_jax.segments import Segments
from fcp_jax.stats import PlanStats
from fcp_jax.validate import InvalidPlanError, validate_plan

if TYPE_CHECKING:
    from fcp_jax.check import check_batch
    from fcp_jax.explanation import explain
    from fcp_jax.layers import FCPAttention, FCPAttentionFn, apply_rope
    from fcp_jax.reshuffle import dispatch, undispatch
    from fcp_jax.staged_attention import attention

_ON_FIRST_USE = {
    "attention": "fcp_jax.staged_attention",
    "check_batch": "fcp_jax.check",
    "dispatch": "fcp_jax.reshuffle",
    "explain": "fcp_jax.explanation",
    "undispatch": "fcp_jax.reshuffle",
    "FCPAttention": "fcp_jax.layers",
    "FCPAttentionFn": "fcp_jax.layers",
    "apply_rope": "fcp_jax.layers",
}

__all__ = [
    "FCPAttention",
    "FCPAttentionFn",
    "InvalidPlanError",
    "Plan",
    "PlanBuckets",
    "PlanConfig",
    "PlanPrefetcher",
    "PlanShape",
    "PlanStats",
    "Segments",
    "apply_rope",
    "attention",
    "bucket_size",
    "check_batch",
    "dispatch",
    "explain",
    "gpu_compiler_options",
    "make_batch_plan",
    "make_plan",
    "pad_plan",
    "undispatch",
    "validate_plan",
]

register_when_jax_is_imported()


def __getattr__(name: str):
    if name in _ON_FIRST_USE:
        value = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
