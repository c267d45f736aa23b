"""XLA flags that overlap communication with computation, set before jax is loaded.

XLA aborts the process on unknown flags, which differ between versions. So flags are tried in a subprocess, and the
result is cached for that version. Flags that the user has set take precedence.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nnxdsl.errors import RunError
from nnxdsl.runtime import allocator
from nnxdsl.storage.jsonl import read_json, write_json
from nnxdsl.storage.process_info import installed_versions

Platform = Literal["cpu", "gpu", "tpu"]

DIRECTORY = ".cache"
"""Cache directory in the home of all runs. It may be deleted at any time."""

PROBE_SECONDS = 120.0

GPU_MEMORY_FRACTION = 0.95
"""Share of a GPU's memory that JAX takes in a run, unless the user sets another, and that plans count as usable.

JAX's own default is 0.75. The rest is for what is not allocated by JAX: the CUDA context, handles of cuBLAS and cuDNN,
and NCCL's buffers, 1.2 GiB of an RTX 4090 and 4 GiB of an H100.
"""

# The sets with which MaxText trains dense models (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py and its
# configurations for GPUs); none of them changes results. A single device has no communication.
_GPU = (
    # Collectives start as early and end as late as their dependencies allow, across iterations of the loop over layers.
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    # Few large collectives instead of many small ones.
    "--xla_gpu_all_reduce_combine_threshold_bytes=134217728",
    "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
    "--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864",
)
_TPU = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
)
_FLAGS: dict[Platform, tuple[str, tuple[str, ...]]] = {
    "cpu": ("XLA_FLAGS", ()),
    "gpu": ("XLA_FLAGS", _GPU),
    "tpu": ("LIBTPU_INIT_ARGS", _TPU),
}
_PACKAGES = ("jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "libtpu")
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")

# Every build of jaxlib knows the GPU flags, so that the probe needs no GPU; only libtpu knows those of TPUs.
_PROBES: dict[str, str] = {
    "XLA_FLAGS": "from jaxlib import xla_client; xla_client.make_cpu_client()",
    "LIBTPU_INIT_ARGS": "import jax; jax.devices('tpu')",
}


def prepare(home: Path, devices: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets XLA's flags in the environment of this process, before it loads jax. Never fails.

    Args:
        home: The directory of all runs; supported flags are cached there.
        devices: Number of devices of the run.
        environment: The environment to change.
    """
    backend = platform(environment)
    if backend == "cpu":
        # For a cached program XLA:CPU logs long lines about a missing feature "+prefer-no-gather", which is only a
        # tuning hint (https://github.com/openxla/xla/issues/44565). Errors are raised in any case.
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        allocator.use_one_arena(environment)
    if backend == "gpu" and not any(name.startswith("XLA_PYTHON_CLIENT_") for name in environment):
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(GPU_MEMORY_FRACTION)
    name, flags = _FLAGS[backend]
    set_already = environment.get(name, "").split()
    taken = {flag.partition("=")[0] for flag in set_already}
    flags = tuple(flag for flag in flags if flag.partition("=")[0] not in taken) if devices > 1 else ()
    if flags and (usable := supported(name, flags, home / DIRECTORY / "xla_flags.json")):
        environment[name] = " ".join([*set_already, *usable])


def platform(environment: Mapping[str, str] = os.environ) -> Platform:
    """The platform that jax will use, without loading it: from `JAX_PLATFORMS`, else from drivers and plugins."""
    chosen = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    if chosen:
        return {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}.get(chosen, "cpu")  # pyright: ignore[reportReturnType]
    has_gpu = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    if has_gpu and any(importlib.util.find_spec(name) for name in _PLUGINS):
        return "gpu"
    has_tpu = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    return "tpu" if has_tpu and importlib.util.find_spec("libtpu") else "cpu"


def supported(name: str, flags: Sequence[str], cache: Path) -> list[str]:
    """The flags that the installed version of XLA supports; none if the probe fails.

    Args:
        name: The environment variable for the flags.
        flags: The flags to try.
        cache: A JSON file with earlier results; updated with new ones.
    """
    versions = installed_versions(_PACKAGES)
    key = " ".join([name, *(f"{package}={version}" for package, version in versions.items())])
    before = _read(cache)
    verdicts: dict[str, bool] = dict(before.get(key, {}))
    untried = [flag for flag in flags if flag not in verdicts]
    if untried:
        if _is_supported(name, untried):
            verdicts |= dict.fromkeys(untried, True)
        else:
            verdicts |= {flag: _is_supported(name, [flag]) for flag in untried}
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, {**before, key: verdicts})
        except (OSError, RunError):
            pass  # the flags are tried again the next time
    return [flag for flag in flags if verdicts[flag]]


def _is_supported(name: str, flags: Sequence[str]) -> bool:
    """Whether a process with these flags starts."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBES[name]],
            env={**os.environ, name: " ".join(flags)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except RunError:
        return {}
    return value if isinstance(value, dict) else {}
