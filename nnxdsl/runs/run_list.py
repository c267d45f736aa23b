"""A summary of each run in a home directory; damaged runs are listed with their problem."""

from __future__ import annotations

from pathlib import Path

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Liveness


@attrs.frozen
class RunSummary:
    """One run of a list; `problem` names the damage, the other fields hold what could be read."""

    id: str
    path: Path
    state: Liveness | None = None
    step: int | None = None
    total: int | None = None
    created: str | None = None
    problem: str | None = None


def list_runs(home: Path) -> list[RunSummary]:
    """All runs under `home`, newest first; a damaged one is listed with its problem. A missing home has none.

    Directories without a `run.json`, and hidden ones, are skipped.

    Raises:
        RunError: `home` is no directory.
    """
    if home.exists() and not home.is_dir():
        raise RunError(f"{home}: is no directory; give the directory of all runs with --home")
    if not home.is_dir():
        return []
    summaries = [
        _summary(path)
        for path in sorted(home.iterdir())
        if not path.name.startswith(".") and path.is_dir() and (path / "run.json").exists()
    ]
    return sorted(summaries, key=lambda run: run.created or "", reverse=True)


def last_metrics(run: Path) -> dict[str, float]:
    """The last metrics of a run: of training, and of evaluation (`eval/...`)."""
    try:
        directory = RunDirectory(run)
        rows = [*directory.metrics()[-1:], *directory.evaluations()[-1:]]
    except RunError:
        return {}
    metrics: dict[str, float] = {}
    for row in rows:
        metrics |= {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "attempt")
        }
    return metrics


def _summary(path: Path) -> RunSummary:
    try:
        run = RunDirectory(path)
    except RunError as error:
        return RunSummary(path.name, path, problem=str(error))
    try:
        status = run.status()
        step, total, inconsistency = status.get("step"), status.get("total"), run.inconsistency()
        return RunSummary(run.id, path, run.liveness(), step, total, run.created, inconsistency)
    except RunError as error:
        return RunSummary(run.id, path, created=run.created, problem=str(error))
