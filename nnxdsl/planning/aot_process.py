"""Starts the compiler for devices that are not there, in a process of its own, and keeps its reports; imports no jax.

In a process of its own because compilers take minutes and gigabytes, may abort, and need an environment that is set
before jax is loaded. Compilers for devices that are not there come from wheels: see `find_compiler`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import sysconfig
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
from nnxdsl.storage.jsonl import read_json, write_json

PLUGINS = "NNXDSL_PLAN_PLUGINS"
"""Names the environment variable that names a directory with compilers; for those who keep them out of Python's own."""

CACHE = ".plans"
"""The directory of reports under the home of runs."""

_ROOT = Path(__file__).parents[2]
_NOT_COMPILED = ("name", "notes", "checkpoint", "evaluation")
_READ_BY_COMPILERS = ("XLA_", "JAX_", "LIBTPU_")
_LAST_LINES = 12


@attrs.frozen
class Compiler:
    """A compiler for devices that need not be there.

    Attributes:
        directory: Where its packages are; None if among Python's own.
        versions: Of its packages, by name.
    """

    directory: Path | None
    versions: dict[str, str]


def find_compiler(platform: hardware.Platform) -> Compiler:
    """The compiler for a platform: XLA's for the CPU is always there, others come as wheels.

    The directory that `NNXDSL_PLAN_PLUGINS` names is looked at first, then Python's own packages. In a directory of its
    own, a compiler does not meet ordinary programs: on a machine without the device, jax would complain of it whenever
    it starts (unless JAX_PLATFORMS=cpu is set).

    Raises:
        RunError: it is not installed, or of another version than jaxlib: says what to install.
    """
    if platform == "cpu":
        return Compiler(None, {})
    named = os.environ.get(PLUGINS, "")
    directory = Path(named).expanduser() if named else None
    if directory is not None and not directory.is_dir():
        raise RunError(f"{PLUGINS}={named}: there is no such directory; {_install(platform)}")
    for place in (directory, None) if directory else (None,):
        versions = _versions_in(place)
        if platform == "tpu" and "libtpu" in versions:
            return Compiler(place, {"libtpu": versions["libtpu"]})
        for plugin in ("jax-cuda12-plugin", "jax-cuda13-plugin") if platform == "gpu" else ():
            parts = (plugin, plugin.replace("plugin", "pjrt"))
            if all(part in versions for part in parts):
                return _matching(Compiler(place, {part: versions[part] for part in parts}))
    raise RunError(f"there is no compiler for {_WHAT[platform]} here; {_install(platform)}")


_WHAT = {"gpu": "CUDA GPUs", "tpu": "TPUs"}


def _matching(compiler: Compiler) -> Compiler:
    jaxlib = importlib.metadata.version("jaxlib")
    other = {name: version for name, version in compiler.versions.items() if version != jaxlib}
    if other:
        found = ", ".join(f"{name} is {version}" for name, version in other.items())
        raise RunError(f"{found}, but jaxlib is {jaxlib}, and both must be of one version; {_install('gpu')}")
    return compiler


def _versions_in(directory: Path | None) -> dict[str, str]:
    paths = sys.path if directory is None else [str(directory)]
    found = importlib.metadata.distributions(path=paths)
    return {(one.metadata["Name"] or "").lower().replace("_", "-"): one.version for one in found}


def _install(platform: hardware.Platform) -> str:
    extra, wheels = "plan-tpu", "libtpu"
    if platform == "gpu":
        version = importlib.metadata.version("jaxlib")
        extra, wheels = "plan-cuda", f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}"
    aside = f"pip install --no-deps --target DIR {wheels}"
    return f"install it: pip install 'nnxdsl[{extra}]' (or aside: {aside}; {PLUGINS}=DIR)"


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
    """What a step takes on devices that are not there, by compiling it for them; from the cache if it was done before.

    Args:
        experiment: What is asked for.
        device_name: A name of `nnxdsl.sharding.hardware`.
        count: How many devices there are.
        home: The directory of all runs; reports are kept under it in `.plans`.
        topology: The shape of a slice of TPUs, if not the usual one.
        limit_seconds: After so many seconds the compiler is killed.
        refresh: Whether to compile even if it was done before.
        on_start: Called with the compiler's process id when it begins; not called for a report from the cache.

    Returns:
        As `nnxdsl.planning.aot.compile_ahead`, and versions of all packages that matter, usable: bytes that a program
        may take on each device (None if unknown), cached: whether it was read from the cache. A compiler that takes too
        long is a `problem`, too.

    Raises:
        RunError: the compiler is not installed, or it crashed.
        PlanError: the experiment does not fit the devices.
    """
    device = hardware.device(device_name)
    shape = device.topology(count, topology, slices=experiment.mesh.slices)
    compiler = find_compiler(device.platform)
    versions = {**code_versions(), **compiler.versions}
    cache_file = home / CACHE / f"{_key(experiment, [device.name, count, shape, versions])}.json"
    repeatable = not any(_foreign(to_dict(experiment)))
    if repeatable and not refresh and (cached := _read(cache_file)) is not None:
        return {**cached, "cached": True}
    request = {
        "experiment": to_dict(experiment),
        "device": device.name,
        "count": count,
        "topology": topology,
        "path": [place for place in sys.path if place],
        "plugins": None if compiler.directory is None else str(compiler.directory),
    }
    answer = _compile_in_child(request, _environment(device, count), limit_seconds, on_start)
    target = {"device": device.name, "count": count, "topology": shape, "versions": versions, "usable": device.usable}
    if answer is None:
        nothing = dict.fromkeys(("collectives", "flows", "lower_seconds", "compile_seconds"))
        memory = dict.fromkeys(hardware.FIGURES)
        return {
            **target,
            "memory": memory,
            **nothing,
            "problem": f"exceeded its time limit of {limit_seconds:g} s",
            "cached": False,
        }
    if "error" in answer:
        raise _error(answer["error"])
    report = {**answer, **target}
    if repeatable:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache_file, report)
    return {**report, "cached": False}


def _compile_in_child(
    request: dict[str, Any], environment: dict[str, str], limit_seconds: float, on_start: Callable[[int], None] | None
) -> dict[str, Any] | None:
    """The child's answer; None if it took too long."""
    with tempfile.TemporaryDirectory(prefix="nnxdsl-plan-") as place:
        report = Path(place) / "report.json"
        child = subprocess.Popen(
            # -P: the working directory is no place to import from, as long as nobody says so.
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
    """Kills what is left of the child and of all that it started."""
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
    return f"was ended by {signal.Signals(-code).name}{memory}"


def _environment(device: hardware.Device, count: int) -> dict[str, str]:
    environment = dict(os.environ)
    flags = {
        "cpu": f"--xla_force_host_platform_device_count={count}",
        "gpu": "--xla_gpu_autotune_level=0",  # there is nothing to measure kernels on
        "tpu": "",
    }[device.platform]
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    # XLA's own cache has no use for programs of devices that are not there; reports are kept instead.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if device.platform == "tpu":
        environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if str(_ROOT) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # run from its sources
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), environment.get("PYTHONPATH")]))
    return environment


def _error(error: dict[str, Any]) -> NnxdslError:
    """The child's error as it was raised there."""
    kind = getattr(errors, error["type"], RunError)
    if issubclass(kind, PlanError | SpecError):
        return kind([Problem(path, message) for path, message in error["problems"]], error["where"])
    return kind(error["message"])


def _key(experiment: Experiment, inputs: Iterable[object]) -> str:
    """SHA-256 over all that the compiler's answer depends on, and some more."""
    tree = {name: value for name, value in to_dict(experiment).items() if name not in _NOT_COMPILED}
    flags = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_COMPILERS)}
    text = json.dumps([tree, *inputs, flags, code_digest(), _config_digest(experiment)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _config_digest(experiment: Experiment) -> str | None:
    """SHA-256 of the `config.json` beside the weights, which may give the network another vocabulary."""
    directory = experiment.model.weights.path
    file = Path(directory).expanduser() / "config.json" if directory is not None else None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else None
    except OSError:
        return None


def _foreign(value: object) -> Iterator[str]:
    """Types of third parties in a tree: their code may change without a change of version."""
    if isinstance(value, dict):
        tag = value.get("type")
        if isinstance(tag, str) and ":" in tag:
            yield tag
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _foreign(item)


def _read(path: Path) -> dict[str, Any] | None:
    """A report that was kept; None if there is none, or none that could have been written here."""
    try:
        report = read_json(path)
    except RunError:
        return None
    return report if isinstance(report, dict) and {"memory", "problem", "versions"} <= report.keys() else None
