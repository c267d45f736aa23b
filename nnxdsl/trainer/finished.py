"""Checks whether a run has finished, and whether its data files have changed since."""

from __future__ import annotations

from pathlib import Path

from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.weights import dependencies_of
from nnxdsl.data.loaders.sources import content_digest
from nnxdsl.data.loaders.token_cache import TOKENS
from nnxdsl.data.sources.digests import DIGEST_CACHE, Digests
from nnxdsl.errors import RunError
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory


def is_finished(experiment: Experiment, home: Path) -> bool:
    """Whether an experiment's run is complete.

    Raises:
        RunError: its directory holds something else.
    """
    directory = RunDirectory.find(home / experiment.id, identity=canonical(experiment))
    return directory is not None and unfinished_reason(directory) is None


def unfinished_reason(directory: RunDirectory) -> str | None:
    """None if a run has finished; else why its status "finished" is wrong, or "" for another status."""
    try:
        return directory.inconsistency() if directory.status().get("state") == "finished" else ""
    except RunError:  # damaged: the checkpoints show the last step
        return ""


def require_same_data(experiment: Experiment, home: Path) -> None:
    """Refuses to reuse a finished run, or one that it started from, if a data file has changed.

    Raises:
        RunError: names the file, and what to do.
    """
    for earlier in dependencies_of(experiment):
        require_same_data(earlier, home)
    directory, data = home / experiment.id, experiment.data
    if not is_finished(experiment, home):
        return
    now = content_digest(data, Digests(home / TOKENS / DIGEST_CACHE))
    if now is None:
        return
    with CheckpointReader(directory / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
        before = checkpoints.meta(steps[-1])["batches"]["digest"] if steps else None
    if before is not None and before != now:
        raise RunError(
            f"{directory} has finished with another {data.name} (sha256 {before[:12]}... then, {now[:12]}... now); "
            f"restore the file, or run {experiment.name} again with --restart"
        )
