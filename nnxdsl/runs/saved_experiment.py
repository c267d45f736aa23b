"""The experiment of a run that has saved checkpoints."""

from __future__ import annotations

from pathlib import Path

from nnxdsl.config.core.serialization import from_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import WeightsError
from nnxdsl.runs.checkpoint_format import CheckpointError, find
from nnxdsl.storage.jsonl import read_json


def is_run(path: Path) -> bool:
    """Whether a directory is a run's with a checkpoint, or a checkpoint of one."""
    try:
        directory, _ = find(path)
    except CheckpointError:
        return False
    return (directory.parent / "experiment.json").is_file()


def saved_experiment(path: Path) -> Experiment:
    """The experiment of a run directory, or of one of its checkpoints."""
    directory, _ = find(path.expanduser())
    file = directory.parent / "experiment.json"
    if not file.is_file():
        raise WeightsError(f"{path}: {file} is missing, so that the experiment of the checkpoint is unknown")
    return from_dict(read_json(file), Experiment)
