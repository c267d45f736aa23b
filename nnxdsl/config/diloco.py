"""Several workers that train apart for many steps and then come together; `nnxdsl/program/diloco.py` does it."""

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
    """How workers that train apart, each with the experiment's own optimizer, become one model from time to time.

    Every batch is cut into as many consecutive parts as there are workers. Each worker takes its step on its own part
    alone, from its own weights and with its own state of the optimizer, its own clipping of gradients among it. After
    so many steps, and after the last step of the run, an outer optimizer moves the outer weights towards the mean of
    the workers, which all begin again there; the state of their optimizers goes on.

    Checkpoints hold all of it. Evaluations, samples, exports and whatever else reads the weights of a run have the
    outer weights, which are those of the last time that the workers came together. A step that a guard skips is none:
    workers come together after so many steps that were taken.

    Attributes:
        workers: How many. A multiple of the mesh's `data` gives each worker devices of its own, and no gradient goes
            over `data` until they come together.
        every_steps: Optimizer steps from one time that they come together to the next (the paper's H).
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
        own_axis = over(self.workers, mesh)
        axes = {axis: size for axis in BATCH_AXES if (size := mesh.sizes[axis]) > 1 and axis != own_axis}
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
    """Nesterov's momentum on the mean of what the workers did (Douillard et al. 2023, arXiv:2311.08105, algorithm 1).

    With one worker, a rate of 1 and no momentum it is the inner optimizer.

    Attributes:
        workers: How many. A multiple of the mesh's `data` gives each worker devices of its own, and no gradient goes
            over `data` until they come together.
        every_steps: Optimizer steps from one time that they come together to the next (the paper's H).
        lr: The outer learning rate.
        momentum: Decay of the outer velocity; 0 keeps none.
    """

    lr: float = attrs.field(default=0.7, validator=positive)
    momentum: float = attrs.field(default=0.9, validator=probability)


def over(workers: int, mesh: Mesh) -> str | None:
    """The mesh axis over which workers are cut; None where each device has something of all of them."""
    return "data" if mesh.data > 1 and workers % mesh.data == 0 else None
