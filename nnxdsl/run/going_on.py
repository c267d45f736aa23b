"""Where a run goes on, and what should be there and is not: said, or refused, never passed over; knows files alone."""

from __future__ import annotations

from nnxdsl.run.checkpoint import Checkpoints
from nnxdsl.run.store import RunDirectory
from nnxdsl.spec.errors import RunError


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


def gap(directory: RunDirectory, start: int) -> str | None:
    """What is missing of the figures before the step at which a run goes on; None where they are all there."""
    last = directory.last_metrics(1)
    if not start or (last and last[0].get("step") == start - 1):
        return None
    ends = f"ends at step {last[0].get('step')}" if last else "is empty"
    return f"warning: metrics.jsonl {ends}, and goes on at step {start}: what was written between them is gone"
