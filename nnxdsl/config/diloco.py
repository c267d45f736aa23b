"""Local SGD: workers that train separately for many steps and synchronize then; see `nnxdsl/program/diloco.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import positive, probability
from nnxdsl.config.sharding import BATCH_AXES, Mesh
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import diloco as members
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Outer(Spec):
    """How several workers, each with the experiment's own optimizer, synchronize every so many steps.

    Every batch is cut into as many consecutive parts as there are workers. Each worker takes its step on its own part
    alone, from its own weights and with its own optimizer state and gradient clipping. After so many steps, and after
    the last step of the run, an outer optimizer moves the outer weights towards the mean of the workers, which all
    continue from there; their optimizer states are not changed.

    Checkpoints have all of it. Evaluations, samples, exports and whatever else reads the weights of a run have the
    outer weights, those of the last synchronization. A step that a guard skips does not count.

    Attributes:
        workers: Number of workers. With a multiple of the mesh's `data` each worker has devices of its own, and no
            gradient is reduced over `data` between synchronizations.
        every_steps: Optimizer steps between synchronizations (the paper's H).
    """

    DiLoCo: ClassVar[type[members.DiLoCo]]

    workers: int = attrs.field(default=2, validator=positive)
    every_steps: int = attrs.field(default=50, validator=positive)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Each worker has rows of its own, and all that its loss compares."""
        return gather(
            lambda: self._check_rows(experiment),
            lambda: self._check_objective(experiment),
            lambda: self._check_stages(experiment),
        )

    def _check_rows(self, experiment: Experiment) -> Iterable[Problem]:
        rows, mesh = experiment.rows_at_once, experiment.mesh
        if rows % self.workers:
            message = f"{rows} rows cannot be shared by outer.workers={self.workers}; use a multiple of it"
            yield Problem(experiment.rows_path, message)
            return
        if mesh.splits_unevenly:
            return
        worker_mesh_axis = worker_axis(self.workers, mesh)
        axes = {axis: size for axis in BATCH_AXES if (size := mesh.sizes[axis]) > 1 and axis != worker_mesh_axis}
        if (rows // self.workers) % math.prod(axes.values()):
            cut = " x ".join(f"{axis}={size}" for axis, size in axes.items())
            message = f"{rows // self.workers} rows of each of outer.workers={self.workers} cannot be split over {cut}"
            yield Problem(experiment.rows_path, message)

    def _check_objective(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.objective.compares_across_batch:
            name = type(experiment.objective).__qualname__
            message = f"{name} compares all rows of a batch, and a worker has some of them; set None, or use a loss of "
            yield Problem("outer", message + "single rows")

    def _check_stages(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.mesh.stage > 1:
            message = f"stages of a pipeline compute one model, and there are {self.workers} workers; use fsdp, "
            yield Problem("mesh.stage", message + "set stage=1")


@attrs.frozen(kw_only=True)
class DiLoCo(Outer):
    """Nesterov momentum on the mean change of the workers (Douillard et al. 2023, arXiv:2311.08105, algorithm 1).

    With one worker, a rate of 1 and no momentum it is the inner optimizer.

    Attributes:
        lr: The outer learning rate.
        momentum: Decay of the outer velocity; 0 keeps none.
    """

    lr: float = attrs.field(default=0.7, validator=positive)
    momentum: float = attrs.field(default=0.9, validator=probability)


def worker_axis(workers: int, mesh: Mesh) -> str | None:
    """The mesh axis over which workers are split; None where each device has a part of all of them."""
    return "data" if mesh.data > 1 and workers % mesh.data == 0 else None
