"""Which mesh, micro-batch and rematerialisation would be quickest on given devices, of those that fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import attrs

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import PlanError, Problem, SpecError
from nnxdsl.models.remat import Remat
from nnxdsl.planning.step_time import Cost, cost
from nnxdsl.program.auto_remat import REMAT_POLICIES
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import build_unplaced
from nnxdsl.program.memory import Share, memory, residual_bytes
from nnxdsl.sharding.hardware import Device
from nnxdsl.sharding.mesh_candidates import factorizations

SEARCHED = ("data", "fsdp", "context", "tensor")
"""The axes over which devices are spread; `expert`, `stage` and `slices` stay as they are asked for."""


ALIKE = 0.05
"""Placements whose times differ by less, which is less than the estimate is good for, are ranked by memory."""


@attrs.frozen
class Found:
    """One way to place an experiment.

    Attributes:
        changes: What to set, as `path=value`.
        bytes: On each device, estimated.
        cost: Of one step, estimated.
    """

    changes: dict[str, object]
    bytes: int
    cost: Cost


def search(
    experiment: Experiment, device: Device, count: int, *, told: Callable[[int, int], None] = lambda *_: None
) -> tuple[list[Found], int]:
    """The placements that fit, quickest first, and how many were tried.

    Args:
        experiment: What is to be placed; its mathematics stays as it is.
        device: The kind of device.
        count: How many of them.
        told: Called with how many meshes are done, and of how many.

    Raises:
        PlanError: the device has no published figures, or nothing is known of the data's lengths.
    """
    longest = lengths(experiment.data)
    if device.usable is None or device.flops is None or not longest.trunk:
        what = (
            f"'{device.name}' has no published memory and speed" if longest.trunk else "the data's lengths are unknown"
        )
        raise PlanError([Problem("", f"{what}, so nothing can be compared")], f"Experiment '{experiment.name}'")
    drawn, trace = build_unplaced(experiment, device.platform), _Rows()
    found: list[Found] = []
    tried = 0
    meshes = _meshes(experiment, device, count)
    for number, mesh in enumerate(meshes):
        told(number, len(meshes))
        here = drawn.with_placement(mesh)
        if here.layout.problems():
            continue
        for placement in _placements(mesh):
            if here.layout.batch_problems(placement.rows_at_once):
                continue
            tried += 1
            placed = here.with_placement(placement)
            size = sum(part.bytes for part in memory(placed, longest, trace) if part.memory == "device")
            if size <= device.usable:
                found.append(Found(_changes(placement), size, cost(placed, longest, device)))
    told(len(meshes), len(meshes))
    return sorted(found, key=lambda one: (int(math.log(one.cost.step, 1 + ALIKE)), one.bytes)), tried


def _meshes(experiment: Experiment, device: Device, count: int) -> list[Experiment]:
    """The experiment on every mesh of `count` devices that it may be on; `tensor` stays within a fast domain."""
    fixed = experiment.mesh.expert * experiment.mesh.stage
    if count % fixed:
        message = (
            f"{count} devices cannot be divided by expert={experiment.mesh.expert} x stage={experiment.mesh.stage}"
        )
        raise PlanError([Problem("mesh", message)], f"Experiment '{experiment.name}'")
    found: list[Experiment] = []
    for split in factorizations(count // fixed, len(SEARCHED)):
        sizes = dict(zip(SEARCHED, split, strict=True))
        if sizes["tensor"] * sizes["context"] > device.domain:
            continue
        with contextlib.suppress(SpecError):  # rows or slices that cannot be cut so
            mesh = attrs.evolve(experiment.mesh, **sizes)
            found.append(attrs.evolve(experiment, mesh=mesh, microbatch_size=None))
    return found


def _placements(experiment: Experiment) -> Iterator[Experiment]:
    """Every number of rows at a time, and every rematerialisation."""
    for parts in range(1, experiment.batch_size + 1):
        if experiment.batch_size % parts:
            continue
        for remat in REMAT_POLICIES:
            with contextlib.suppress(SpecError):
                yield attrs.evolve(
                    experiment,
                    microbatch_size=None if parts == 1 else experiment.batch_size // parts,
                    memory=attrs.evolve(experiment.memory, remat=remat),
                )


def _changes(experiment: Experiment) -> dict[str, object]:
    return {
        **{f"mesh.{axis}": experiment.mesh.sizes[axis] for axis in SEARCHED},
        "microbatch_size": experiment.microbatch_size,
        "memory.remat": experiment.memory.remat,
    }


class _Rows:
    """What a derivative holds on to, as a line over the rows of a device: traced for one and two rows of each share."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Share, str], tuple[int, int]] = {}

    def __call__(self, share: Share, rows: int, remat: Remat) -> int:
        key = (share, remat)
        if key not in self._lines:
            one, two = (residual_bytes(share, rows, remat) for rows in (1, 2))
            self._lines[key] = one, two
        one, two = self._lines[key]
        return one + (rows - 1) * (two - one)
