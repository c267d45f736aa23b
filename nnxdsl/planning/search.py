"""The mesh, micro-batch and rematerialisation with the lowest estimated step time, of those that fit."""

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
from nnxdsl.sharding.mesh_candidates import divisors, factorizations

SEARCHED = ("data", "fsdp", "context", "tensor")
"""The mesh axes that are searched; `expert`, `stage` and `slices` stay as in the experiment."""

TOLERANCE = 0.05
"""Placements whose estimated times differ by less, which is within the estimate's error, are ranked by memory."""


@attrs.frozen
class Placement:
    """A mesh, a micro-batch size and a rematerialisation for an experiment.

    Attributes:
        changes: Values of the experiment by path.
        bytes: Estimated memory per device.
        cost: Estimated time of a step.
    """

    changes: dict[str, object]
    bytes: int
    cost: Cost


def search(
    experiment: Experiment, device: Device, count: int, *, on_progress: Callable[[int, int], None] = lambda *_: None
) -> tuple[list[Placement], int]:
    """The placements of an experiment that fit `count` devices, quickest first, and the number of those tried.

    `on_progress` is called with the number of meshes done and of all meshes.

    Raises:
        PlanError: The catalogue has no figures of the device, or the data's lengths are unknown.
    """
    longest = lengths(experiment.data)
    if device.usable is None or device.flops is None or not longest.trunk:
        why = (
            f"'{device.name}' has no published memory and speed" if longest.trunk else "the data's lengths are unknown"
        )
        raise PlanError([Problem("", f"{why}, so nothing can be compared")], f"Experiment '{experiment.name}'")
    unplaced, residuals = build_unplaced(experiment, device.platform), _ResidualBytes()
    fitting: list[Placement] = []
    tried = 0
    meshes = _meshes(experiment, device, count)
    for number, mesh in enumerate(meshes):
        on_progress(number, len(meshes))
        on_mesh = unplaced.with_placement(mesh)
        if on_mesh.layout.problems():
            continue
        for candidate in _candidates(mesh):
            if on_mesh.layout.batch_problems(candidate.rows_at_once):
                continue
            tried += 1
            placed = on_mesh.with_placement(candidate)
            size = sum(part.bytes for part in memory(placed, residuals) if part.memory == "device")
            if size <= device.usable:
                fitting.append(Placement(_changes(candidate), size, cost(placed, device)))
    on_progress(len(meshes), len(meshes))
    return sorted(fitting, key=lambda one: (int(math.log(one.cost.step, 1 + TOLERANCE)), one.bytes)), tried


def _meshes(experiment: Experiment, device: Device, count: int) -> list[Experiment]:
    """The experiment on every valid mesh of `count` devices; `tensor` and `context` stay within a fast domain."""
    fixed = experiment.mesh.expert * experiment.mesh.stage
    if count % fixed:
        axes = f"expert={experiment.mesh.expert} x stage={experiment.mesh.stage}"
        message = f"{count} devices cannot be divided by {axes}"
        raise PlanError([Problem("mesh", message)], f"Experiment '{experiment.name}'")
    experiments: list[Experiment] = []
    for split in factorizations(count // fixed, len(SEARCHED)):
        sizes = dict(zip(SEARCHED, split, strict=True))
        if sizes["tensor"] * sizes["context"] > device.domain:
            continue
        with contextlib.suppress(SpecError):  # rows or slices that the mesh does not divide
            mesh = attrs.evolve(experiment.mesh, **sizes)
            experiments.append(attrs.evolve(experiment, mesh=mesh, microbatch_size=None))
    return experiments


def _candidates(experiment: Experiment) -> Iterator[Experiment]:
    """Every micro-batch size and every rematerialisation."""
    for parts in divisors(experiment.batch_size):
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


class _ResidualBytes:
    """Bytes of residuals, linear in the rows of a device: traced for one and two rows of each share."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Share, str], tuple[int, int]] = {}

    def __call__(self, share: Share, rows: int, remat: Remat) -> int:
        key = (share, remat)
        if key not in self._lines:
            one, two = (residual_bytes(share, rows, remat) for rows in (1, 2))
            self._lines[key] = one, two
        one, two = self._lines[key]
        return one + (rows - 1) * (two - one)
