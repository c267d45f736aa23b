"""Ahead-of-time compilation in a process of its own, with a cache of its reports. Loads no jax.

Compilers take minutes and gigabytes, may abort, and need environment variables that are set before jax is loaded. Those
for GPUs and TPUs come from wheels: see `find_compiler`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from nnxdsl import errors
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, PlanError, Problem, RunError, SpecError
from nnxdsl.runs.code_digest import code_digest, code_versions
from nnxdsl.sharding import hardware
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import read_json, write_json

PLUGINS = "NNXDSL_PLAN_PLUGINS"
"""Environment variable: a directory with compilers that are not among Python's own packages."""

CACHE = ".plans"
"""Directory of reports under the home of runs."""

_IGNORED_FIELDS = ("name", "notes", "checkpoint", "evaluation", "rollouts", "tracking")
_READ_BY_COMPILERS = ("XLA_", "JAX_", "LIBTPU_")
_LAST_LINES = 12


@attrs.frozen
class Compiler:
    """An ahead-of-time compiler.

    Attributes:
        directory: Of its packages; None if they are among Python's own.
        versions: Versions of its packages, by name.
    """

    directory: Path | None
    versions: dict[str, str]


def find_compiler(platform: hardware.Platform) -> Compiler:
    """The compiler for a platform; that of the CPU is part of jaxlib, others are wheels.

    Searches the directory of `NNXDSL_PLAN_PLUGINS`, then Python's own packages. In a directory of its own, a compiler
    does not disturb other programs: among Python's packages on a machine without the device, jax warns at each start
    unless JAX_PLATFORMS=cpu is set.

    Raises:
        RunError: It is not installed, or its version is not that of jaxlib; names what to install.
    """
    if platform == "cpu":
        return Compiler(None, {})
    plugins = os.environ.get(PLUGINS, "")
    directory = Path(plugins).expanduser() if plugins else None
    if directory is not None and not directory.is_dir():
        raise RunError(f"{PLUGINS}={plugins}: there is no such directory; {_install(platform)}")
    for packages in (directory, None) if directory else (None,):
        versions = _versions_in(packages)
        if platform == "tpu" and "libtpu" in versions:
            return Compiler(packages, {"libtpu": versions["libtpu"]})
        for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin") if platform == "gpu" else ():
            parts = (plugin, plugin.replace("plugin", "pjrt"))
            if all(part in versions for part in parts):
                return _require_jaxlib_version(Compiler(packages, {part: versions[part] for part in parts}))
    devices = {"gpu": "CUDA GPUs", "tpu": "TPUs"}[platform]
    raise RunError(f"there is no compiler for {devices} here; {_install(platform)}")


def _require_jaxlib_version(compiler: Compiler) -> Compiler:
    jaxlib = importlib.metadata.version("jaxlib")
    other = {name: version for name, version in compiler.versions.items() if version != jaxlib}
    if other:
        listed = ", ".join(f"{name} is {version}" for name, version in other.items())
        raise RunError(f"{listed}, but jaxlib is {jaxlib}, and both must be of one version; {_install('gpu')}")
    return compiler


def _versions_in(directory: Path | None) -> dict[str, str]:
    paths = sys.path if directory is None else [str(directory)]
    packages = importlib.metadata.distributions(path=paths)
    return {(package.metadata["Name"] or "").lower().replace("_", "-"): package.version for package in packages}


def _install(platform: hardware.Platform) -> str:
    extra, wheels = "plan-tpu", "libtpu"
    if platform == "gpu":
        version = importlib.metadata.version("jaxlib")
        extra, wheels = "plan-cuda", f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
    separately = f"pip install --no-deps --target DIR {wheels}"
    return f"install it: pip install 'nnxdsl[{extra}]' (or in a directory of its own: {separately}; {PLUGINS}=DIR)"


def compiled_report(
    experiment: Experiment,
    device_name: str,
    count: int,
    *,
    home: Path,
    topology: str | None = None,
    limit_seconds: float = 300,
    refresh: bool = False,
    on_start: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The report of a step compiled ahead of time; from the cache if there is one.

    Args:
        experiment: The experiment.
        device_name: A name of `nnxdsl.sharding.hardware`.
        count: Number of devices.
        home: The home of runs; reports are cached in its `.plans`.
        topology: The shape of a slice of TPUs, if not the usual one.
        limit_seconds: Time after which the compiler is killed.
        refresh: Whether to ignore the cache.
        on_start: Called with the compiler's process id; not called for a report from the cache.

    Returns:
        That of `nnxdsl.planning.aot.compile_ahead`, with versions of all packages that the result depends on, usable:
        bytes that a program may use on each device (None if unknown), and cached: whether it is from the cache. A
        compiler that exceeds the limit is a `problem`, too.

    Raises:
        RunError: The compiler is not installed, or it crashed.
        PlanError: The experiment is inconsistent with the devices.
    """
    device = hardware.device(device_name)
    shape = device.topology(count, topology, slices=experiment.mesh.slices)
    compiler = find_compiler(device.platform)
    versions = {**code_versions(), **compiler.versions}
    cache_file = home / CACHE / f"{_key(experiment, [device.name, count, shape, versions])}.json"
    cacheable = not any(_third_party_types(to_dict(experiment)))
    if cacheable and not refresh and (cached := _read(cache_file)) is not None:
        return {**cached, "cached": True}
    request = {
        "experiment": to_dict(experiment),
        "device": device.name,
        "count": count,
        "topology": topology,
        "path": [directory for directory in sys.path if directory],
        "plugins": None if compiler.directory is None else str(compiler.directory),
    }
    answer = _compile_in_child(request, _environment(device, count), limit_seconds, on_start)
    target = {"device": device.name, "count": count, "topology": shape, "versions": versions, "usable": device.usable}
    if answer is None:
        problem = f"exceeded its time limit of {limit_seconds:g} s"
        return {**target, **empty_report(), "problem": problem, "cached": False}
    if "error" in answer:
        raise _error(answer["error"])
    report = {**answer, **target}
    if cacheable:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache_file, report)
    return {**report, "cached": False}


def empty_report() -> dict[str, Any]:
    """A report of a program that was not compiled."""
    names = ("collectives", "flows", "lower_seconds", "compile_seconds", "problem")
    return {"memory": dict.fromkeys(hardware.FIGURES), **dict.fromkeys(names)}


def _compile_in_child(
    request: dict[str, Any], environment: dict[str, str], limit_seconds: float, on_start: Callable[[int], None] | None
) -> dict[str, Any] | None:
    """The child's answer; None if it exceeded the limit."""
    with tempfile.TemporaryDirectory(prefix="nnxdsl-plan-") as directory:
        report = Path(directory) / "report.json"
        child = subprocess.Popen(
            # -P: modules in the working directory are not imported.
            [sys.executable, "-P", "-m", "nnxdsl.planning.aot"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if on_start is not None:
                on_start(child.pid)
            output, _ = child.communicate(json.dumps({**request, "report": str(report)}).encode(), limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)
        if child.returncode == 0 and report.exists():
            return read_json(report)
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()][-_LAST_LINES:]
    raise RunError("\n  ".join([f"the compiler for {request['device']} {_exit_reason(child.returncode)}:", *lines]))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and all processes that it started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", perhaps because this machine ran out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


def _environment(device: hardware.Device, count: int) -> dict[str, str]:
    environment = dict(os.environ)
    flags = {
        "cpu": f"--xla_force_host_platform_device_count={count}",
        "gpu": "--xla_gpu_autotune_level=0",  # no GPU to measure kernels on
        "tpu": "",
    }[device.platform]
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    # XLA's cache is of no use without the devices; reports are cached instead.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if device.platform == "tpu":
        environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment["PYTHONPATH"] = process_info.import_path()
    return environment


def _error(error: dict[str, Any]) -> NnxdslError:
    """The error that the child raised."""
    kind = getattr(errors, error["type"], RunError)
    if issubclass(kind, PlanError | SpecError):
        return kind([Problem(path, message) for path, message in error["problems"]], error["where"])
    return kind(error["message"])


def _key(experiment: Experiment, inputs: Iterable[object]) -> str:
    """SHA-256 over everything that the report depends on."""
    tree = {name: value for name, value in to_dict(experiment).items() if name not in _IGNORED_FIELDS}
    flags = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_COMPILERS)}
    text = json.dumps([tree, *inputs, flags, code_digest(), _config_digest(experiment)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _config_digest(experiment: Experiment) -> str | None:
    """SHA-256 of the `config.json` of the weights, which may change the vocabulary."""
    directory = experiment.model.weights.path
    file = Path(directory).expanduser() / "config.json" if directory is not None else None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else None
    except OSError:
        return None


def _third_party_types(value: object) -> Iterator[str]:
    """Third-party types in a tree: their code may change without a version."""
    if isinstance(value, dict):
        tag = value.get("type")
        if isinstance(tag, str) and ":" in tag:
            yield tag
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _third_party_types(item)


def _read(path: Path) -> dict[str, Any] | None:
    """A cached report; None if there is none or the file is not a report."""
    try:
        report = read_json(path)
    except RunError:
        return None
    return report if isinstance(report, dict) and {"memory", "problem", "versions"} <= report.keys() else None
