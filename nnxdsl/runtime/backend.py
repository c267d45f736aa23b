"""The backend on which jax would run here, the host as a device, and the choice of the CPU backend."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax


def local_platform() -> str:
    """The platform of this machine, "cpu", "gpu" or "tpu", detected without initializing a device."""
    platform = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if platform:
        return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
    if any(map(importlib.util.find_spec, plugins)) and any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
        return "gpu"
    return "tpu" if importlib.util.find_spec("libtpu") and any(Path("/dev").glob("accel*")) else "cpu"


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
