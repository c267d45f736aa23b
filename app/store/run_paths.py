"""The only code that converts a run id of a request to a directory of the home."""

from __future__ import annotations

import os
from pathlib import Path

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import checked_path

FILES = frozenset(
    {
        *("run.json", "status.json", "experiment.json", "experiment.py", "attempts.jsonl", "layout.json"),
        *("metrics.jsonl", "events.jsonl", "samples.jsonl", "rollouts.jsonl", "log.txt", "control", "lock"),
    }
)
"""Files of a run that the app reads or writes; none of them may be a link."""


def directory_path(home: Path, run: str) -> Path:
    """Returns the directory of a run id, which need not exist; raises if the id is invalid, or a link's name."""
    path = home / run
    try:
        if path.name != run or path.parent != home:
            raise RunError(f"'{run[:100]}' is not a run id; a run is a directory directly in {home}")
        if path.is_symlink():
            raise RunError(f"'{run}' is a link in {home}, which the app does not follow")
        return checked_path(path)
    except (ValueError, OSError) as error:  # a NUL; too long for the file system
        raise RunError(f"{run[:100]!r} is not a run id") from error


def run_path(home: Path, run: str) -> Path:
    """Returns `directory_path`; raises also if a file that the app reads or writes is a link."""
    path = directory_path(home, run)
    try:
        with os.scandir(path) as entries:
            links = sorted(entry.name for entry in entries if entry.name in FILES and entry.is_symlink())
    except OSError:  # missing, or not a directory: opening it raises the error
        return path
    if links:
        raise RunError(f"{run}: {links[0]} is a link, which the app does not follow; put the file itself there")
    return path
