"""What XLA must be told on GPUs so that transfers hide behind compute."""

from fcp_jax.plan import Plan


def gpu_compiler_options(plan: Plan) -> dict[str, bool | int]:
    """Returns compiler options for a program that runs `attention` with plans like this one.

    XLA schedules one collective at a time by default and makes the others synchronous; a stage has
    all pulls of its rounds in flight, and a backward stage as many pushes.

    Args:
      plan: any plan of the run.

    Returns:
      For `jax.jit(..., compiler_options=...)` or `.compile(compiler_options=...)`.
    """
    widest = max((len(group) for group in plan.shape.groups), default=1)
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2 * widest,
    }
