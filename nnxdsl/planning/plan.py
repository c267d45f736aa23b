"""The plan of a run without devices: its steps, memory, layout and estimated speed, as JSON values.

`docs/reference/plan_json.md` describes them; the command line and the app print them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import attrs

from nnxdsl.adapters import targets
from nnxdsl.adapters.weight_only_quant import QVALUE, SCALE
from nnxdsl.config.batching import Packed
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.reference import Checkpoint, Synced
from nnxdsl.errors import SpecError
from nnxdsl.models.attention.row_layout import packed, sequence
from nnxdsl.models.params import is_mtp_param
from nnxdsl.planning.step_time import cost
from nnxdsl.program import layout_warnings
from nnxdsl.program.activation_sharding import Flow, flows
from nnxdsl.program.auto_remat import REMAT_POLICIES, resolve_remat, with_remat
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import Blueprint, build_blueprint
from nnxdsl.program.memory import Part, activations, memory, reward_memory, rows_of, top_bytes
from nnxdsl.sharding.hardware import Device
from nnxdsl.sharding.layout import Layout, Placed, starred
from nnxdsl.sharding.mesh_candidates import divisors
from nnxdsl.sharding.rules import Target

SCHEMA = 1
"""Version of the JSON values, raised with each incompatible change."""

_DEVICE_FIELDS = ("name", "description", "memory", "usable")


def plan(experiment: Experiment, platform: str = "cpu", device: Device | None = None) -> dict[str, Any]:
    """The plan of an experiment on a platform ("cpu", "gpu" or "tpu"), with a verdict if a device is given.

    Raises:
        PlanError: Names everything that is inconsistent.
    """
    blueprint, why = resolve_remat(build_blueprint(experiment, platform), None if device is None else device.usable)
    layout, longest = blueprint.layout, blueprint.longest
    parts = memory(blueprint)
    device_bytes, rows = _bytes(parts, "device"), experiment.steps and experiment.steps * experiment.batch_size
    remats = REMAT_POLICIES if longest.trunk else ()
    has_speed = device is not None and device.flops is not None and longest.trunk
    return {
        "schema": SCHEMA,
        "id": experiment.id,
        "steps": experiment.steps,
        "epochs": experiment.epochs,
        "batch_size": experiment.batch_size,
        "rows": rows,
        "tokens_at_most": rows and rows // blueprint.num_generations * longest.trunk,
        "microbatches": experiment.microbatches,
        "parameters": blueprint.parameters,
        "compute": blueprint.compute.name,
        "platform": platform,
        "reference": _reference(blueprint),
        "quantization": _quantization(blueprint),
        "outer": _outer(blueprint),
        "attention": _attention(blueprint),
        "memory": [attrs.asdict(part) for part in parts],
        "bytes_per_device": device_bytes,
        "host_bytes_per_device": _bytes(parts, "host"),
        "remat": blueprint.remat,
        "remat_why": why,
        "activations": {remat: activations(blueprint, rows_of(blueprint), remat).trunk for remat in remats},
        "device": None if device is None else {name: getattr(device, name) for name in _DEVICE_FIELDS},
        "verdict": None
        if device is None or device.usable is None
        else _verdict(blueprint, device_bytes, device.usable),
        "step_seconds": attrs.asdict(cost(blueprint, device)) if device and has_speed else None,
        "warnings": [attrs.asdict(warning) for warning in warnings(blueprint)],
        "flows": [{"axes": list(flow.axes), **_shape(flow)} for flow in flows(blueprint)],
        "compiled": None,
        **describe(layout),
    }


def warnings(blueprint: Blueprint) -> list[layout_warnings.Warning]:
    """Parts of a layout that work and are probably not intended, and what is missing in the plan."""
    experiment, heads = blueprint.experiment, (blueprint.config.num_heads, blueprint.config.num_kv_heads)
    length = lengths(experiment.data).trunk
    misplaced = layout_warnings.warnings(blueprint.layout, experiment.rows_at_once, length, heads)
    _, unknown = reward_memory(blueprint)
    return misplaced + [layout_warnings.Warning("memory", one.path, f"not counted: {one.message}") for one in unknown]


def describe(layout: Layout) -> dict[str, Any]:
    """A layout: its mesh, its rules and every array; a run saves it as `layout.json`."""
    return {
        "mesh": layout.mesh.sizes,
        "slices": layout.mesh.slices,
        "across": layout.mesh.across,
        "devices": layout.mesh.device_count,
        "rules": [[logical, _plain(target)] for logical, target in layout.rules],
        "arrays": [_array(placed) for placed in layout],
    }


def _array(placed: Placed) -> dict[str, Any]:
    return {
        "path": placed.path,
        "group": starred(placed.path),
        "part": placed.part,
        "axes": [axis if isinstance(axis, str) else None for axis in placed.axes],
        "dtype": placed.dtype,
        **_shape(placed),
        "bytes": placed.bytes,
        "device_bytes": placed.device_bytes,
        "replicas": placed.replicas,
        "memory": placed.memory,
        "why": [{**attrs.asdict(tried), "axes": _plain(tried.axes)} for tried in placed.resolved.trace],
    }


def _shape(array: Placed | Flow) -> dict[str, Any]:
    spec = [_plain(target) for target in array.spec]
    return {"shape": list(array.shape), "spec": spec, "device_shape": list(array.device_shape)}


def _plain(target: Target) -> str | list[str] | None:
    return list(target) if isinstance(target, tuple) else target


def _bytes(parts: list[Part], memory: str) -> int:
    return sum(part.bytes for part in parts if part.memory == memory)


def _verdict(blueprint: Blueprint, needed: int, usable: int) -> dict[str, Any]:
    share = f"{needed / 2**30:.1f} of {usable / 2**30:.1f} GiB, {abs(usable - needed) / 2**30:.1f} GiB"
    if needed <= usable:
        return {"fits": True, "share": needed / usable, "message": f"fits: {share} free"}
    remedy = _remedy(blueprint, usable) or "--search may find a mesh on which it fits"
    return {"fits": False, "share": needed / usable, "message": f"does not fit: {share} too much; {remedy}"}


def _remedy(blueprint: Blueprint, usable: int) -> str | None:
    """Overrides that fit on this mesh: the largest micro-batch that does with full rematerialisation.

    With the smallest micro-batch another policy may take less than "full", so these are tried last.
    """
    experiment = blueprint.experiment
    sizes = [experiment.batch_size // parts for parts in divisors(experiment.batch_size)]
    sizes = [rows for rows in sizes if rows <= experiment.rows_at_once and not blueprint.layout.batch_problems(rows)]
    for remat in reversed(REMAT_POLICIES):
        for rows in sizes if remat == "full" else sizes[-1:]:
            with contextlib.suppress(SpecError):  # micro-batches of which pipeline stages cannot be fed
                candidate = with_remat(blueprint.with_placement(attrs.evolve(experiment, microbatch_size=rows)), remat)
                size = _bytes(memory(candidate), "device")
                if size <= usable:
                    return f"with memory.remat={remat} microbatch_size={rows} it would take {size / 2**30:.1f} GiB"
    return None


def _attention(blueprint: Blueprint) -> str:
    layout, longest = packed if isinstance(blueprint.experiment.batching, Packed) else sequence, blueprint.longest
    choice = blueprint.kernels.choose(layout(longest.trunk) if longest.trunk else None)
    return f"{choice.kernel}: {choice.why}"


def _quantization(blueprint: Blueprint) -> str | None:
    quantization = blueprint.experiment.quantization
    if quantization is None:
        return None
    kind, block = type(quantization).__name__, quantization.block_size
    scaled = "a scale for each output" if block is None else f"a scale for each {block} inputs"
    if not quantization.freezes:
        kernels = (path for path in blueprint.base if path.endswith(".kernel") and not is_mtp_param(path))
        count = sum(targets.is_targeted(path, quantization) for path in kernels)
        return f"{kind}: products of {count} arrays, {scaled}; the weights stay float32"
    size = sum(placed.bytes for placed in blueprint.layout if placed.path.endswith((QVALUE, SCALE)))
    leaves = [leaf for path, leaf in blueprint.base.items() if path + QVALUE in blueprint.frozen]
    share = size / sum(math.prod(leaf.shape) * 4 for leaf in leaves)
    return f"{kind}: {len(leaves)} arrays, {scaled}: {size / 2**20:.4g} MiB with their scales, {share:.1%} of float32"


def _precomputed_top_k(blueprint: Blueprint) -> str:
    experiment, size = blueprint.experiment, top_bytes(blueprint)
    rows, targets = (experiment.steps or 0) * experiment.batch_size, lengths(experiment.data).head
    total = f", at most {rows * targets * size / 2**20:,.1f} MiB for {rows:,} rows" if rows * targets else ""
    return (
        f"precomputed top {experiment.objective.teacher_top_k:,} tokens of each target (before step 0; then its "
        f"weights are freed): {size:,} bytes for each target{total}"
    )


def _outer(blueprint: Blueprint) -> str | None:
    """The workers of DiLoCo, their devices and their memory."""
    outer, layout = blueprint.experiment.outer, blueprint.layout
    if outer is None:
        return None
    size = sum(placed.device_bytes for placed in layout.arrays["optimizer"].values() if placed.has_worker_axis)
    data = layout.mesh.data
    share = "" if data == 1 else f", {layout.workers_per_device} of them on each of data={data}"
    return (
        f"{type(outer).__name__}: {outer.workers} workers{share}; their weights and optimizers, {size / 2**20:.4g} MiB "
        f"per device, are in the optimizer's part; synchronized every {outer.every_steps:,} steps, and after the last"
    )


def _reference(blueprint: Blueprint) -> str:
    experiment, teacher, mode = blueprint.experiment, blueprint.teacher, blueprint.experiment.reference_mode
    if mode == "none" and experiment.objective.needs_reference:
        return "none: all answers count as equally likely, by Reference.Uniform"
    if teacher is not None:
        size = sum(math.prod(leaf.shape) for leaf in teacher.base.values())
        use = _precomputed_top_k(blueprint) if teacher.is_precomputed else "run on every batch"
        return f"none; a frozen teacher of {size:,} parameters, {use}"
    if mode == "none":
        return "none: the objective has no reference"
    reference, adapter = experiment.reference, experiment.adapter
    if isinstance(reference, Synced):
        return (
            f"online: a float32 copy of {'the weights' if adapter is None else 'the adapter'}, synced every "
            f"{reference.every_steps:,} steps (ref_model_mixup_alpha={reference.ref_model_mixup_alpha:g}); part of the "
            f"state and of its checkpoints"
        )
    model = _reference_model(blueprint)
    if mode == "cached":
        return f"cached: precomputed from {model} before step 0; no reference weights in a step, no per-step cost"
    return f"online: {model}, run on every batch"


def _reference_model(blueprint: Blueprint) -> str:
    experiment = blueprint.experiment
    if isinstance(experiment.reference, Checkpoint):
        return f"the weights of {type(experiment.reference.weights).__qualname__}"
    if experiment.reference_mode == "cached":
        return "the initial policy"
    adapter, quantization = experiment.adapter, experiment.quantization
    if blueprint.reference.arrays and adapter is None:
        return "a frozen copy of the initial weights"
    if blueprint.reference.arrays:
        whole = adapter is not None and adapter.start is not None
        return f"the frozen base with a copy of the initial adapter{'' if whole else chr(39) + 's magnitudes'}"
    base = "the frozen base" if quantization is None else f"the frozen base in {type(quantization).__name__}"
    return f"{base} with the adapter off (no copy)"
