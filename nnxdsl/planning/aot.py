"""Ahead-of-time compilation of an experiment's step, and a report of its memory and collectives.

`python -m nnxdsl.planning.aot` reads a request as JSON from stdin and writes a report as JSON to the file that the
request names, since compilers write to both outputs. `nnxdsl/planning/aot_process.py` starts it.
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
from nnxdsl.planning.aot_process import empty_report
from nnxdsl.planning.collectives import collectives
from nnxdsl.program import compile
from nnxdsl.sharding import hardware
from nnxdsl.sharding.rules import Axes

_TOO_LARGE = (
    re.compile(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+[KMGT])\)"),
    re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+[KMGT]) \w+"),
)
_CUDNN = 91000
"""cuDNN 9.10, which supports every attention that the program uses."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_ahead(experiment: Experiment, device: str, count: int, topology: str | None = None) -> dict[str, Any]:
    """Lower and compile one step.

    Args:
        experiment: The experiment.
        device: A name of `nnxdsl.sharding.hardware`. Compilers of GPUs and TPUs must be importable; for a CPU,
            `--xla_force_host_platform_device_count` must have been set before jax is initialized.
        count: Number of devices.
        topology: The shape of a slice of TPUs, if not the usual one.

    Returns:
        Plain JSON values:
        device, count, topology: the request's, and the compiler's name of the topology.
        memory: bytes per device, None where unknown. arguments; outputs; aliased: outputs in the buffers of arguments;
            temporaries; allocated: arguments + outputs - aliased + temporaries; host: the same sum in host memory;
            peak: the most that is in use at one time. XLA:CPU leaves temporaries out of its peak, so there it equals
            allocated; it also computes bfloat16 in float32.
        collectives: of one step, by the fields of `Traffic`; None if unknown.
        flows: axes, shape and spec of each kind of activation with logical axes; empty on one device and in a pipeline,
            None if unknown.
        lower_seconds, compile_seconds: wall time.
        versions: of jax and jaxlib.
        problem: why it would not run; None if it would.

    Raises:
        PlanError: The experiment is inconsistent with the devices, found before compilation.
    """
    kind = hardware.device(device)
    slices = experiment.mesh.slices
    shape = kind.topology(count, topology, slices=slices)
    devices = _devices(kind, count, shape, slices)
    versions = {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
    report = {"device": kind.name, "count": count, "topology": shape, **empty_report(), "versions": versions}
    started = time.perf_counter()
    specs: dict[tuple[Any, ...], list[Any]] = {}

    def on_sharding(axes: Axes, shape: tuple[int, ...], sharding: Any) -> None:
        entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
        specs[axes, shape] = [list(target) if isinstance(target, tuple) else target for target in entries]

    # Memory and collectives do not depend on the number of steps.
    program = compile.compile(experiment, devices, on_sharding, steps=experiment.steps or 1)
    lowered = program.lower()
    report["lower_seconds"] = round(time.perf_counter() - started, 3)
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # The layout still gives the arrays that live between steps.
        report["memory"]["arguments"] = sum(program.layout.device_bytes().values())
        report["problem"], report["memory"]["peak"] = _compile_problem(str(error))
        return report
    finally:
        report["compile_seconds"] = round(time.perf_counter() - started, 3)
    report["memory"] = figures = memory(compiled.memory_analysis(), kind.platform)
    report["flows"] = [{"axes": list(a), "shape": list(s), "spec": spec} for (a, s), spec in specs.items()]
    report["collectives"] = [attrs.asdict(traffic) for traffic in collectives(compiled.as_text() or "")]
    if kind.usable is not None and figures["allocated"] > kind.usable:  # XLA:GPU does not check
        report["problem"] = f"out of memory: {figures['allocated'] / 2**30:.2f}G of {kind.usable / 2**30:.2f}G"
    return report


def memory(analysis: Any, platform: str) -> dict[str, int]:
    """XLA's memory figures of a compiled program under the report's names, bytes per device."""
    names = {"arguments": "argument", "outputs": "output", "aliased": "alias", "temporaries": "temp"}
    on_device, on_host = (
        {name: int(getattr(analysis, f"{prefix}{xla}_size_in_bytes")) for name, xla in names.items()}
        for prefix in ("", "host_")
    )
    allocated = _allocated(on_device)
    peak = allocated if platform == "cpu" else int(analysis.peak_memory_in_bytes)
    return {**on_device, "allocated": allocated, "host": _allocated(on_host), "peak": peak}


def _allocated(sizes: Mapping[str, int]) -> int:
    return sizes["arguments"] + sizes["outputs"] - sizes["aliased"] + sizes["temporaries"]


def _devices(kind: hardware.Device, count: int, shape: str, slices: int) -> Sequence[Any]:
    if kind.platform == "cpu":
        return jax.devices("cpu")[:count]
    if kind.platform == "gpu":
        # jax checks the cuDNN of an attached GPU; the compiler checks that of the target.
        fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN
        fused_attention_stablehlo.check_compute_capability = lambda minimum: True
        topology = topologies.get_topology_desc(platform="cuda", target_config=kind.target, topology=shape)
    else:
        options: dict[str, Any] = dict(kind.options)
        if slices > 1:
            options["num_slices"] = slices
        topology = topologies.get_topology_desc(platform="tpu", topology_name=shape, **options)
    return topology.devices


def _compile_problem(message: str) -> tuple[str, int | None]:
    """A compiler's error as one line, and the bytes that it needs if the error names them."""
    for pattern in _TOO_LARGE:
        if match := pattern.search(message):
            needed, unit, available = match.groups()
            return f"out of memory: {needed}{unit} of {available}", int(float(needed) * _UNITS[unit])
    first = message.strip().partition("\n")[0]
    return f"the compiler failed: {first}", None


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a request, or `{"error": ...}` with an nnxdsl error."""
    try:
        experiment = from_dict(request["experiment"], Experiment)
        return compile_ahead(experiment, request["device"], request["count"], request.get("topology"))
    except (PlanError, SpecError) as error:
        problems = [[problem.path, problem.message] for problem in error.problems]
        return {"error": {"type": type(error).__name__, "problems": problems, "where": error.where}}
    except NnxdslError as error:
        return {"error": {"type": type(error).__name__, "message": str(error)}}


def main() -> int:
    """Answers the request on stdin; its `path` and `plugins` are appended to `sys.path`."""
    request = json.load(sys.stdin)
    directories = (*request.get("path", ()), request.get("plugins"))
    sys.path += [directory for directory in dict.fromkeys(directories) if directory and directory not in sys.path]
    importlib.invalidate_caches()
    Path(request["report"]).write_text(json.dumps(answer(request)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
