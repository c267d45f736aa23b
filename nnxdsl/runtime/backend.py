"""The host as a jax device, and the choice of the CPU backend."""

from __future__ import annotations

from typing import Any

import jax


def use_cpu() -> None:
    """Makes jax use the CPU only, so that planning or reading weights takes no device memory from a run."""
    jax.config.update("jax_platforms", "cpu")


def host_device() -> Any:
    """The CPU device; the first device if `JAX_PLATFORMS` excludes the CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def host_sharding() -> jax.sharding.Sharding:
    """Places an array on `host_device`."""
    return jax.sharding.SingleDeviceSharding(host_device())
