"""Compiles an experiment's step for devices that are not there, and says what it takes; run in a process of its own.

`python -m nnxdsl.planning.aot` reads a request as JSON from its input and writes a report as JSON to the file that the
request names; compilers write to both outputs. `nnxdsl/planning/aot_process.py` starts it, in the environment it needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from nnxdsl.config.core.serialization import from_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, PlanError, SpecError
from nnxdsl.planning.collectives import collectives
from nnxdsl.program import compile
from nnxdsl.sharding import hardware
from nnxdsl.sharding.rules import Axes

_TOO_LARGE = (
    re.compile(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+[KMGT])\)"),
    re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+[KMGT]) \w+"),
)
_CUDNN = 91000
"""A version of cuDNN that has all that is asked of it: 9.10."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_ahead(experiment: Experiment, device: str, count: int, topology: str | None = None) -> dict[str, Any]:
    """Lower and compile one step.

    Args:
        experiment: What is asked for.
        device: A name of `nnxdsl.sharding.hardware`. GPUs and TPUs need their compilers to be importable; a CPU must
            have been divided by `--xla_force_host_platform_device_count` before jax looked at it.
        count: How many devices there are.
        topology: The shape of a slice of TPUs, if not the usual one.

    Returns:
        Plain JSON values:
        device, count, topology: what was asked for, and what the compiler was told.
        memory: bytes per device, None where unknown. arguments; outputs; aliased: outputs that take the place of
            arguments; temporaries; allocated: arguments + outputs - aliased + temporaries, which the device must have;
            host: what of all of these lies in the host's memory; peak: the most that is in use at one time. XLA:CPU
            leaves temporaries out of its peak, so there it is what is allocated; it also computes bfloat16 in float32.
        collectives: of one step, as `Traffic` has them; None if unknown.
        flows: where the activations lie that the modules name: axes, shape and spec of each kind; empty on one device
            and in a pipeline, None if unknown.
        lower_seconds, compile_seconds: what it took.
        versions: of jax and jaxlib.
        problem: why it would not run; None if it would.

    Raises:
        PlanError: what does not fit before the compiler is asked.
    """
    kind = hardware.device(device)
    slices = experiment.mesh.slices
    shape = kind.topology(count, topology, slices=slices)
    devices = _devices(kind, count, shape, slices)
    report: dict[str, Any] = {
        "device": kind.name,
        "count": count,
        "topology": shape,
        "memory": dict.fromkeys(hardware.FIGURES),
        "collectives": None,
        "flows": None,
        "lower_seconds": None,
        "compile_seconds": None,
        "versions": {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")},
        "problem": None,
    }
    started = time.perf_counter()
    seen: dict[tuple[Any, ...], list[Any]] = {}

    def told(axes: Axes, shape: tuple[int, ...], found: Any) -> None:
        entries = [*found.spec, *(None,) * (len(shape) - len(found.spec))]
        seen[axes, shape] = [list(target) if isinstance(target, tuple) else target for target in entries]

    program = compile.compile(experiment, devices, told)
    lowered = program.lower()
    report["lower_seconds"] = round(time.perf_counter() - started, 3)
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # What is known without the compiler: every array that lives between steps.
        report["memory"]["arguments"] = sum(program.layout.device_bytes().values())
        report["problem"], report["memory"]["peak"] = _refusal(str(error))
        return report
    finally:
        report["compile_seconds"] = round(time.perf_counter() - started, 3)
    report["memory"] = found = memory(compiled.memory_analysis(), kind.platform)
    report["flows"] = [{"axes": list(a), "shape": list(s), "spec": spec} for (a, s), spec in seen.items()]
    report["collectives"] = [attrs.asdict(one) for one in collectives(compiled.as_text() or "")]
    if kind.usable is not None and found["allocated"] > kind.usable:  # XLA:GPU compiles what no GPU could hold
        report["problem"] = f"out of memory: {found['allocated'] / 2**30:.2f}G of {kind.usable / 2**30:.2f}G"
    return report


def memory(analysis: Any, platform: str) -> dict[str, int]:
    """XLA's figures of a compiled program in the report's words, bytes per device."""
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp"}
    found = {name: int(getattr(analysis, f"{word}_size_in_bytes")) for name, word in names.items()}
    host = {name: int(getattr(analysis, f"host_{word}_size_in_bytes")) for name, word in names.items()}
    allocated = _together(found)
    peak = allocated if platform == "cpu" else int(analysis.peak_memory_in_bytes)
    return {**found, "allocated": allocated, "host": _together(host), "peak": peak}


def _together(sizes: Mapping[str, int]) -> int:
    return sizes["arguments"] + sizes["outputs"] - sizes["aliased"] + sizes["temporaries"]


def _devices(kind: hardware.Device, count: int, shape: str, slices: int) -> Sequence[Any]:
    if kind.platform == "cpu":
        return jax.devices("cpu")[:count]
    if kind.platform == "gpu":
        # What jax asks of cuDNN before it uses it, it asks of a GPU; the compiler asks again, of the target.
        fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN
        fused_attention_stablehlo.check_compute_capability = lambda least: True
        described = topologies.get_topology_desc(platform="cuda", target_config=kind.target, topology=shape)
    else:
        options: dict[str, Any] = dict(kind.options)
        if slices > 1:
            options["num_slices"] = slices
        described = topologies.get_topology_desc(platform="tpu", topology_name=shape, **options)
    return described.devices


def _refusal(message: str) -> tuple[str, int | None]:
    """A compiler's error as one line, and the bytes that it asked for if it says so."""
    for pattern in _TOO_LARGE:
        if found := pattern.search(message):
            needed, unit, there = found.groups()
            return f"out of memory: {needed}{unit} of {there}", int(float(needed) * _UNITS[unit])
    first = message.strip().partition("\n")[0]
    return f"the compiler refuses it: {first}", None


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a request, or `{"error": ...}` with what nnxdsl says is wrong with it."""
    try:
        experiment = from_dict(request["experiment"], Experiment)
        return compile_ahead(experiment, request["device"], request["count"], request.get("topology"))
    except (PlanError, SpecError) as error:
        problems = [[problem.path, problem.message] for problem in error.problems]
        return {"error": {"type": type(error).__name__, "problems": problems, "where": error.where}}
    except NnxdslError as error:
        return {"error": {"type": type(error).__name__, "message": str(error)}}


def main() -> int:
    """Answers the request on stdin; `path` and `plugins` of it are places to import from, after all others."""
    request = json.load(sys.stdin)
    places = (*request.get("path", ()), request.get("plugins"))
    sys.path += [place for place in dict.fromkeys(places) if place and place not in sys.path]
    importlib.invalidate_caches()
    Path(request["report"]).write_text(json.dumps(answer(request)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
