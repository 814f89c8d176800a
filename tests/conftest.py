"""Eight host devices for every test; must run before anything imports jax."""

import os

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # A collective that can never complete aborts the process instead of hanging the suite.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS)).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
