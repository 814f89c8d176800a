"""Which implementation of an operation runs: the Hopper kernels, or plain JAX."""

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "xla")
_H200_SMS = 132


def choose(name: str | None, unsupported: str | None) -> str:
    """The implementation to run.

    Args:
      name: what was asked for; None for the Hopper kernels where they serve the case here.
      unsupported: why the kernels cannot serve the operands, None where they can.

    Returns:
      "mosaic_gpu" or "xla".

    Raises:
      ValueError: if `name` is unknown, or names the kernels and they cannot serve the operands.
    """
    if name is None:
        return "xla" if no_device() or unsupported else "mosaic_gpu"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS} or None, got {name!r}")
    # A named implementation may also be compiled for a device that is not here.
    if name == "mosaic_gpu" and unsupported:
        raise ValueError(f"implementation 'mosaic_gpu' cannot be used: {unsupported}")
    return name


def explain(name: str | None, unsupported: str | None) -> str:
    """Says in a sentence what `choose` chooses, and why."""
    chosen = choose(name, unsupported)
    if name is not None:
        return f"{chosen}: asked for"
    if chosen == "mosaic_gpu":
        return f"{chosen}: the Hopper kernels serve these operands on this device"
    return f"{chosen}: mosaic_gpu is not used, as {no_device() or unsupported}"


def no_device() -> str | None:
    """Says why the kernels cannot run on the default device, or None where they can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs a GPU, and the default device is of platform {device.platform!r}"
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return (
            f"it needs compute capability 9.0 (Hopper), and {device.device_kind} has {capability}"
        )
    return None


def num_sms() -> int:
    """Multiprocessors of the default device; those of an H200 where it is not a GPU."""
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    return (getattr(device, "core_count", None) if on_gpu else None) or _H200_SMS
