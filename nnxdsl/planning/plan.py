"""What a run will do and what it takes on each device, before a device is touched, as plain JSON values.

`docs/guides/plan.md` describes the form; the command line and the app read it.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import attrs

from nnxdsl.adapters import lora
from nnxdsl.config.batching import Packed
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.reference import Checkpoint, Synced
from nnxdsl.errors import SpecError
from nnxdsl.models.attention.row_layout import packed, sequence
from nnxdsl.models.params import is_mtp_param
from nnxdsl.planning.step_time import cost
from nnxdsl.program import layout_warnings
from nnxdsl.program.activation_sharding import Flow, flows
from nnxdsl.program.auto_remat import REMAT_POLICIES, resolve_remat
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import Blueprint, build_blueprint
from nnxdsl.program.memory import Part, activations, memory, rows_of, top_bytes
from nnxdsl.sharding.hardware import Device
from nnxdsl.sharding.layout import Layout, Placed, starred
from nnxdsl.sharding.rules import Target

SCHEMA = 1
"""Of the form; raised when a reader of an older one would misread it."""


def plan(experiment: Experiment, platform: str = "cpu", device: Device | None = None) -> dict[str, Any]:
    """The plan of an experiment.

    Args:
        experiment: What is asked for.
        platform: "cpu", "gpu" or "tpu": what `Precision.compute="auto"` goes by.
        device: The device that it is meant for; None for no verdict.

    Raises:
        PlanError: with everything that does not fit.
    """
    blueprint, why = resolve_remat(build_blueprint(experiment, platform), None if device is None else device.usable)
    layout, longest = blueprint.layout, lengths(experiment.data)
    parts = memory(blueprint, longest)
    here, away = _bytes(parts, "device"), _bytes(parts, "host")
    return {
        "schema": SCHEMA,
        "id": experiment.id,
        "steps": experiment.steps,
        "batch_size": experiment.batch_size,
        "rows": experiment.steps * experiment.batch_size,
        "tokens_at_most": experiment.steps * experiment.batch_size * longest.trunk,
        "microbatches": experiment.microbatches,
        "parameters": blueprint.parameters,
        "compute": blueprint.compute.name,
        "platform": platform,
        "reference": _reference(blueprint),
        "quantization": _quantization(blueprint),
        "outer": _outer(blueprint),
        "attention": _attention(blueprint, longest),
        "memory": [attrs.asdict(part) for part in parts],
        "bytes_per_device": here,
        "host_bytes_per_device": away,
        "remat": blueprint.remat,
        "remat_why": why,
        "activations": _by_policy(blueprint, longest),
        "device": None if device is None else _device(device),
        "verdict": None if device is None or device.usable is None else _verdict(blueprint, here, device.usable),
        "step_seconds": None if device is None or device.flops is None else _seconds(blueprint, longest, device),
        "warnings": [attrs.asdict(found) for found in warnings(blueprint)],
        "flows": [_flow(flow) for flow in flows(blueprint)],
        "compiled": None,
        **describe(layout),
    }


def warnings(blueprint: Blueprint) -> list[layout_warnings.Warning]:
    """Everything about a layout that works, and is probably not what was meant."""
    experiment, heads = blueprint.experiment, (blueprint.config.num_heads, blueprint.config.num_kv_heads)
    return layout_warnings.warnings(blueprint.layout, experiment.rows_at_once, lengths(experiment.data).trunk, heads)


def describe(layout: Layout) -> dict[str, Any]:
    """A layout: its mesh, its rules, and every array; what a run keeps as `layout.json`."""
    return {
        "mesh": layout.mesh.sizes,
        "slices": layout.mesh.slices,
        "across": layout.mesh.across,
        "devices": layout.mesh.device_count,
        "rules": [[logical, _plain(target)] for logical, target in layout.rules],
        "arrays": [_array(placed) for placed in layout],
    }


def _array(placed: Placed) -> dict[str, Any]:
    """One array and where it lives."""
    return {
        "path": placed.path,
        "group": starred(placed.path),
        "part": placed.part,
        "axes": [axis if isinstance(axis, str) else None for axis in placed.axes],
        "dtype": placed.dtype,
        "shape": list(placed.shape),
        "spec": [_plain(target) for target in placed.spec],
        "device_shape": list(placed.device_shape),
        "bytes": placed.bytes,
        "device_bytes": placed.device_bytes,
        "replicas": placed.replicas,
        "memory": placed.memory,
        "why": [{**attrs.asdict(tried), "axes": _plain(tried.axes)} for tried in placed.resolved.trace],
    }


def _plain(target: Target) -> str | list[str] | None:
    return list(target) if isinstance(target, tuple) else target


def _flow(flow: Flow) -> dict[str, Any]:
    return {
        "axes": list(flow.axes),
        "shape": list(flow.shape),
        "spec": [_plain(target) for target in flow.spec],
        "device_shape": list(flow.device_shape),
    }


def _by_policy(blueprint: Blueprint, longest: Lengths) -> dict[str, int]:
    """Bytes that are kept for the backward pass, by rematerialisation policy."""
    if not longest.trunk:
        return {}
    rows = rows_of(blueprint)
    return {remat: activations(blueprint, rows, remat).trunk for remat in REMAT_POLICIES}


def _device(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "description": device.description,
        "memory": device.memory,
        "usable": device.usable,
    }


def _bytes(parts: list[Part], where: str) -> int:
    return sum(part.bytes for part in parts if part.memory == where)


def _verdict(blueprint: Blueprint, needed: int, usable: int) -> dict[str, Any]:
    fits, of = needed <= usable, f"{needed / 2**30:.1f} of {usable / 2**30:.1f} GiB"
    left = f"{abs(usable - needed) / 2**30:.1f} GiB"
    if fits:
        return {"fits": True, "share": needed / usable, "message": f"fits: {of}, {left} free"}
    cure = _cure(blueprint, usable) or "--search may find a mesh on which it fits"
    return {"fits": False, "share": needed / usable, "message": f"does not fit: {of}, {left} too much; {cure}"}


def _cure(blueprint: Blueprint, usable: int) -> str | None:
    """On this mesh: the most rows at a time that fit, everything else computed again, in words to paste."""
    experiment, longest = blueprint.experiment, lengths(blueprint.experiment.data)
    for parts in range(experiment.microbatches, experiment.batch_size + 1):
        if experiment.batch_size % parts:
            continue
        with contextlib.suppress(SpecError):  # parts that the devices cannot be cut into
            candidate = attrs.evolve(
                experiment,
                microbatch_size=experiment.batch_size // parts,
                memory=attrs.evolve(experiment.memory, remat="full"),
            )
            size = _bytes(memory(blueprint.with_placement(candidate), longest), "device")
            if size <= usable:
                words = f"memory.remat=full microbatch_size={candidate.microbatch_size}"
                return f"with {words} it would take {size / 2**30:.1f} GiB"
    return None


def _seconds(blueprint: Blueprint, longest: Lengths, device: Device) -> dict[str, float] | None:
    return attrs.asdict(cost(blueprint, longest, device)) if longest.trunk else None


def _attention(blueprint: Blueprint, longest: Lengths) -> str:
    layout = packed if isinstance(blueprint.experiment.batching, Packed) else sequence
    choice = blueprint.kernels.choose(layout(longest.trunk) if longest.trunk else None)
    return f"{choice.kernel}: {choice.why}"


def _quantization(blueprint: Blueprint) -> str | None:
    quantization = blueprint.experiment.quantization
    if quantization is None:
        return None
    kind, block = type(quantization).__name__, quantization.block_size
    scaled = "a scale for each output" if block is None else f"a scale for each {block} inputs"
    if not quantization.freezes:
        linears = (path for path in blueprint.base if path.endswith(".kernel") and not is_mtp_param(path))
        meant = [path for path in linears if lora.is_targeted(path, quantization)]
        return f"{kind}: products of {len(meant)} arrays, {scaled}; the weights stay float32"
    few = [placed for placed in blueprint.layout if placed.path.endswith((lora.QVALUE, lora.SCALE))]
    whole = [leaf for path, leaf in blueprint.base.items() if path + lora.QVALUE in blueprint.frozen]
    size, before = (sum(placed.bytes for placed in few), sum(math.prod(leaf.shape) * 4 for leaf in whole))
    share = f"{size / 2**20:.4g} MiB with their scales, {size / before:.1%} of float32"
    return f"{kind}: {len(whole)} arrays, {scaled}: {share}"


def _precomputed_top_k(blueprint: Blueprint) -> str:
    experiment, size = blueprint.experiment, top_bytes(blueprint)
    rows, targets = experiment.steps * experiment.batch_size, lengths(experiment.data).head
    stored_size = f"{size:,} bytes for each target"
    if targets:
        stored_size += f", at most {rows * targets * size / 2**20:,.1f} MiB for {rows:,} rows"
    assert isinstance(experiment.objective, Distill)
    count = experiment.objective.top_k
    return f"precomputed top {count:,} tokens of each target (before step 0; then its weights are freed): {stored_size}"


def _outer(blueprint: Blueprint) -> str | None:
    """Workers that train apart, where they are, and what they take."""
    outer, layout = blueprint.experiment.outer, blueprint.layout
    if outer is None:
        return None
    arrays = layout.arrays["optimizer"].values()
    own = sum(placed.device_bytes for placed in arrays if placed.of_workers)
    here, data = layout.workers_here, layout.mesh.data
    where = (
        f"{outer.workers} workers" if data == 1 else f"{outer.workers} workers, {here} of them on each of data={data}"
    )
    return (
        f"{type(outer).__name__}: {where}; their weights and optimizers, {own / 2**20:.4g} MiB on a device, are in the "
        f"optimizer's part; they meet after every {outer.every_steps:,} steps, and after the last"
    )


def _reference(blueprint: Blueprint) -> str:
    mode = blueprint.experiment.reference_mode
    if mode == "none" and blueprint.experiment.objective.needs_reference:
        return "none: all answers count as equally likely, since Reference.Uniform says so"
    if blueprint.teacher is not None:
        size, name = sum(math.prod(leaf.shape) for leaf in blueprint.teacher.base.values()), "a frozen teacher"
        if blueprint.teacher.is_precomputed:
            return f"none; {name} of {size:,} parameters, {_precomputed_top_k(blueprint)}"
        return f"none; {name} of {size:,} parameters reads every batch"
    if mode == "none":
        return "none: the objective compares with nothing"
    if isinstance(follows := blueprint.experiment.reference, Synced):
        what = "the weights" if blueprint.experiment.adapter is None else "the adapter"
        return (
            f"online: a float32 copy of {what} that takes {follows.ref_model_mixup_alpha:g} of the policy after every "
            f"{follows.every_steps:,} steps; part of the state and of its checkpoints"
        )
    if isinstance(other := blueprint.experiment.reference, Checkpoint):
        named = f"the weights of {type(other.weights).__qualname__}"
        if mode == "cached":
            return f"cached: {named} say it of each pair once, before the first step, and are gone by then"
        return f"online: {named} beside the policy's, asked at every step"
    if mode == "cached":
        return "cached: the first policy says it of each pair once, before the first step; no copy, no time in a step"
    adapter = blueprint.experiment.adapter
    if blueprint.reference.arrays and adapter is None:
        return "online: a frozen copy of the first weights, asked at every step"
    if blueprint.reference.arrays:
        whole = adapter is not None and adapter.start is not None
        return (
            f"online: the frozen base with a copy of the adapter{'' if whole else chr(39) + 's magnitudes'} as it began"
        )
    quantization = blueprint.experiment.quantization
    base = "the frozen base" if quantization is None else f"the frozen base in {type(quantization).__name__}"
    return f"online: {base} with the adapter off, asked at every step; no copy"
