"""Where a run goes on, and what should be there and is not: said, or refused, never passed over; knows files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.runs.checkpointer import Checkpoints, Targets
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage.records import is_number


def newest_step(directory: RunDirectory, checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    """The newest step whose every byte is as it was written, and what there is to say of newer ones.

    Args:
        directory: Whose status still says which step was saved last.
        checkpoints: Of the run.

    Raises:
        RunError: There are steps and all are damaged, or one was saved and there is none.
    """
    good = checkpoints.latest_good()
    said = [f"{damage}; going back to step {good.step}" for damage in good.damaged]
    saved = directory.status().get("checkpoint") or 0
    if good.step is None and saved:
        raise RunError(
            f"{directory.path}: step {saved} was saved, and {checkpoints.directory} holds no step; "
            "put it back, or begin again with --restart"
        )
    if good.step is not None and saved > max(good.step, *(damage.step for damage in good.damaged), 0):
        said.append(f"checkpoint step {saved} was saved and is gone; going back to step {good.step}")
    return good.step, said


def require_room(checkpoints: Checkpoints, experiment: Experiment, step: int, targets: Mapping[str, Targets]) -> None:
    """Refuses a run whose next save the disk has no room for, before it computes anything.

    Raises:
        CheckpointError: How much it takes, and how much is free.
    """
    every = experiment.checkpoint.every_steps
    if step < experiment.steps:
        checkpoints.require_room(min((step // every + 1) * every, experiment.steps), targets)


def by_step(directory: RunDirectory, complain: Callable[[str], object] | None = None) -> dict[int, dict[str, float]]:
    """Held-out metrics of all evaluations.

    Args:
        directory: Of the run.
        complain: Told of a line that cannot be read, which does not make a failure of what is trained and saved.

    Raises:
        RunError: A line cannot be read, and there is nobody to complain to.
    """
    try:
        rows = directory.evaluations()
    except RunError as error:
        if complain is None:
            raise
        complain(f"warning: {error}")
        rows = []
    return {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/") and is_number(v)} for row in rows}
