"""The backend on which jax would run here, and the choice of the CPU for work that needs no accelerator."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import jax


def local_platform() -> str:
    """Where this machine would run: "cpu", "gpu" or "tpu"; detected without initializing a device."""
    platform = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if platform:
        return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
    if any(map(importlib.util.find_spec, plugins)) and any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
        return "gpu"
    return "tpu" if importlib.util.find_spec("libtpu") and any(Path("/dev").glob("accel*")) else "cpu"


def use_cpu() -> None:
    """Has jax use the CPU alone, so that planning or reading weights takes no memory from a run on the same machine."""
    jax.config.update("jax_platforms", "cpu")
