"""Turns a run's id, as a request names it, into a directory of the home: the one place that does."""

from __future__ import annotations

import os
from pathlib import Path

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import checked_path

FILES = frozenset(
    {
        *("run.json", "status.json", "experiment.json", "experiment.py", "attempts.jsonl", "layout.json"),
        *("metrics.jsonl", "events.jsonl", "samples.jsonl", "log.txt", "control", "lock"),
    }
)
"""What the app reads and writes of a run; none of them may be a link, wherever it leads."""


def directory_path(home: Path, run: str) -> Path:
    """The path that the run of this id has, or would have; not whether it exists.

    Raises:
        RunError: It is no run's id, or there is a link of this name: what a link leads to is never looked at.
    """
    path = home / run
    try:
        if path.name != run or path.parent != home:
            raise RunError(f"'{run[:100]}' is no run's id; a run is a directory of {home} itself")
        if path.is_symlink():
            raise RunError(f"'{run}' is a link in {home}, which the app does not follow; a run is a directory there")
        return checked_path(path)
    except (ValueError, OSError) as error:  # a NUL; too long for the file system
        raise RunError(f"{run[:100]!r} is no run's id") from error


def run_path(home: Path, run: str) -> Path:
    """`directory_path`, of which no file that the app reads or writes is a link.

    Raises:
        RunError: It is no run's id, or links are in the way.
    """
    path = directory_path(home, run)
    try:
        with os.scandir(path) as entries:
            links = sorted(entry.name for entry in entries if entry.name in FILES and entry.is_symlink())
    except OSError:  # nothing there yet, or no directory: whoever opens it says so
        return path
    if links:
        raise RunError(f"{run}: {links[0]} is a link, which the app does not follow; put the file itself there")
    return path
