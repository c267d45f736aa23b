"""Automatic rematerialization: the first policy with which a step fits the device."""

from __future__ import annotations

import attrs

from nnxdsl.models.remat import Remat
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.memory import Trace, memory

REMAT_POLICIES: tuple[Remat, ...] = ("none", "products", "attention", "inputs", "full")
"""From least to most recomputation, and most often from most to least memory."""


def resolve_remat(blueprint: Blueprint, usable: int | None, trace: Trace | None = None) -> tuple[Blueprint, str]:
    """The blueprint with `memory.remat="auto"` replaced by a policy, and the reason for it.

    Args:
        blueprint: The program without devices.
        usable: Bytes that a program may use on the device; None if unknown.
        trace: See `memory.memory`.
    """
    if blueprint.experiment.memory.remat != "auto":
        return blueprint, "set by memory.remat"
    if usable is None:
        return with_remat(blueprint, "none"), "the device's memory is unknown"
    if not blueprint.longest.trunk:
        return with_remat(blueprint, "none"), "row lengths are unknown"
    needed: dict[Remat, int] = {}
    for remat in REMAT_POLICIES:
        chosen = with_remat(blueprint, remat)
        needed[remat] = sum(part.bytes for part in memory(chosen, trace) if part.memory == "device")
        if needed[remat] <= usable:
            return chosen, "fits" if remat == REMAT_POLICIES[0] else "first that fits"
    return with_remat(blueprint, min(needed, key=lambda remat: needed[remat])), "none fits; this takes the least memory"


def with_remat(blueprint: Blueprint, remat: Remat) -> Blueprint:
    """The blueprint with this rematerialization policy."""
    experiment = blueprint.experiment
    return blueprint.with_placement(attrs.evolve(experiment, memory=attrs.evolve(experiment.memory, remat=remat)))
