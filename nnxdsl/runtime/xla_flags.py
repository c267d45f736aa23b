"""Flags for XLA's compilers, set before jax reads them: those that hide transfers behind products; knows no jax.

A compiler ends its process if it is given a flag that it does not know, and flags come and go with its versions. So
each set is tried in a process of its own, and what was found is kept for that version. What the user has set, stays.
"""

from __future__ import annotations

import importlib.metadata
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

Platform = Literal["cpu", "gpu", "tpu"]

DIRECTORY = ".cache"
"""Under the home of all runs. It may be deleted at any time: what is missing is made anew."""

PROBE_SECONDS = 120.0

# The sets with which MaxText trains dense models (AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py and its
# configurations for GPUs); none of them changes what is computed. On one device there is nothing to hide.
_GPU = (
    # Transfers begin as early, and end as late, as their neighbours allow; across iterations of the loop over layers.
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    # Few large transfers instead of many small ones.
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
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

# The flags of GPUs are known to every build of jaxlib, so that no GPU is touched; those of TPUs to libtpu alone.
_PROBES: dict[str, str] = {
    "XLA_FLAGS": "from jaxlib import xla_client; xla_client.make_cpu_client()",
    "LIBTPU_INIT_ARGS": "import jax; jax.devices('tpu')",
}


def prepare(home: Path, devices: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what compilers should be told, in the environment of this process, before it loads jax. Never fails.

    Args:
        home: Of all runs; what a compiler knows is kept under it.
        devices: How many devices the run has.
        environment: Where it is set.
    """
    found = platform(environment)
    if found == "cpu":
        # Of a program from the cache, XLA:CPU says in long lines that this machine lacks "+prefer-no-gather", which is
        # no feature but a taste (https://github.com/openxla/xla/issues/44565). What is an error is raised as well.
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        allocator.one_arena(environment)
    if found == "gpu" and not any(name.startswith("XLA_PYTHON_CLIENT_") for name in environment):
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ".95"  # of the default of .75, a quarter of the GPU lies idle
    name, wanted = _FLAGS[found]
    set_already = environment.get(name, "").split()
    taken = {flag.partition("=")[0] for flag in set_already}
    wanted = tuple(flag for flag in wanted if flag.partition("=")[0] not in taken) if devices > 1 else ()
    if wanted and (usable := supported(name, wanted, home / DIRECTORY / "xla_flags.json")):
        environment[name] = " ".join([*set_already, *usable])


def platform(environment: Mapping[str, str] = os.environ) -> Platform:
    """What jax will run on, without asking it: what it was told to, else what there is a driver and a plugin for."""
    told = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    if told:
        return {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}.get(told, "cpu")  # pyright: ignore[reportReturnType]
    if Path("/dev/nvidiactl").exists() and any(importlib.util.find_spec(name) for name in _PLUGINS):
        return "gpu"
    has_tpu = Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()
    return "tpu" if has_tpu and importlib.util.find_spec("libtpu") else "cpu"


def supported(name: str, flags: Sequence[str], cache: Path) -> list[str]:
    """Those of the flags that this version's compiler knows; none if that cannot be found out.

    Args:
        name: The environment variable that bears them.
        flags: To try.
        cache: A file with what was found before; written if it is new.
    """
    versions = {package: version for package in _PACKAGES if (version := _version(package))}
    key = " ".join([name, *(f"{package}={version}" for package, version in versions.items())])
    before = _read(cache)
    verdicts: dict[str, bool] = dict(before.get(key, {}))
    untried = [flag for flag in flags if flag not in verdicts]
    if untried:
        if _is_taken(name, untried):
            verdicts |= dict.fromkeys(untried, True)
        else:
            verdicts |= {flag: _is_taken(name, [flag]) for flag in untried}
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, {**before, key: verdicts})
        except (OSError, RunError):
            pass  # it is tried again the next time
    return [flag for flag in flags if verdicts[flag]]


def _is_taken(name: str, flags: Sequence[str]) -> bool:
    """Whether a process that is given these flags lives."""
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except RunError:
        return {}
    return found if isinstance(found, dict) else {}
