"""Opens saved checkpoints: a run's experiment, blueprint and arrays at one step, and checkpoints of weights only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs
import jax
import numpy as np

from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import Mesh
from nnxdsl.errors import WeightsError
from nnxdsl.program.blueprint import Blueprint, build_blueprint
from nnxdsl.runs.checkpoint_format import find
from nnxdsl.runs.checkpoint_reader import CheckpointReader, DamagedStep
from nnxdsl.runs.saved_experiment import saved_experiment
from nnxdsl.runtime.backend import host_sharding

TRAINABLE = "trainable"
"""The group of a run's checkpoint with the model's trained arrays."""
PARAMS = "params"
"""The group of a checkpoint of weights only."""


def open_checkpoint(path: Path) -> tuple[CheckpointReader, int, tuple[DamagedStep, ...]]:
    """Opens the newest undamaged checkpoint, or the step that `path` names; also returns newer damaged steps.

    Raises:
        WeightsError: There is no checkpoint yet.
        CheckpointError: `path` holds no checkpoints, or all are damaged.
    """
    directory, step = find(path)
    checkpoints = CheckpointReader(directory)
    if step is not None:
        return checkpoints, step, ()
    good = checkpoints.latest_good()
    if good.step is None:
        raise WeightsError(f"{path} has no checkpoint yet; run its experiment first")
    return checkpoints, good.step, good.damaged


@attrs.frozen
class SavedRun:
    """A run at one of its checkpoints.

    Attributes:
        directory: The run directory.
        step: Number of optimizer steps done.
        experiment: The experiment.
        blueprint: Its blueprint on one device, with the dtypes of the run.
        damaged: Newer checkpoints that are damaged.
        checkpoints: The reader of its checkpoints.
    """

    directory: Path
    step: int
    experiment: Experiment
    blueprint: Blueprint
    damaged: tuple[DamagedStep, ...]
    checkpoints: CheckpointReader

    @classmethod
    def open(cls, path: Path) -> SavedRun:
        """Opens the newest undamaged checkpoint of a run, or one step of it.

        Args:
            path: A run directory, its `checkpoints`, or one step inside that.

        Raises:
            WeightsError: There is no checkpoint yet, or the run's experiment is missing.
            CheckpointError: There is no such run, or its checkpoints are damaged.
        """
        experiment = saved_experiment(path)
        checkpoints, step, damaged = open_checkpoint(path)
        # The dtypes of the run, which may depend on a device that this machine does not have.
        compute = checkpoints.meta(step)["identity"]["compute"]
        blueprint = build_blueprint(evolve(experiment, {"mesh": Mesh(), "precision.compute": compute}))
        return cls(find(path)[0].parent, step, experiment, blueprint, damaged, checkpoints)

    def restore(self, paths: Iterable[str] | None = None) -> dict[str, jax.Array]:
        """Reads trained arrays by path, float32, into the memory of the host; all by default."""
        trainable = self.blueprint.trainable
        targets = {
            path: jax.ShapeDtypeStruct(trainable[path].shape, trainable[path].dtype, sharding=host_sharding())
            for path in (trainable if paths is None else paths)
        }
        return self.checkpoints.restore(self.step, {TRAINABLE: targets})[TRAINABLE]


class WeightsCheckpoint:
    """A checkpoint of weights only, as `nnxdsl convert --to checkpoint` writes it.

    Attributes:
        arrays: Shapes and dtypes by path.

    Raises:
        WeightsError: It holds no weights.
    """

    def __init__(self, path: Path) -> None:
        self._checkpoints, self._step, _ = open_checkpoint(path)
        contents = self._checkpoints.contents(self._step).get(PARAMS)
        if contents is None:
            raise WeightsError(f"{path}: is of a run whose experiment.json is missing, so that its model is unknown")
        self.arrays = {
            name: jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype), sharding=host_sharding())
            for name, info in contents.items()
        }

    def read(self, path: str) -> np.ndarray:
        """Reads one array as it is stored."""
        return np.asarray(self._checkpoints.restore(self._step, {PARAMS: {path: self.arrays[path]}})[PARAMS][path])
