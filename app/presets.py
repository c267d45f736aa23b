"""The project's experiments: code that the app does not run itself; a child process reads each of them.

A run that begins as a recipe is started as the recipe's own file, `python experiments/NAME.py path=value ...`, so that
what the file defines beside its experiment (rewards, classes) is there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from nnxdsl.config.core.codegen import parse_value, render
from nnxdsl.config.core.serialization import diff, evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError, SpecError

from .experiments import from_tree
from .jobs import Job, Jobs, files_of

LIMIT_SECONDS = 60.0
MOST = 60


class Presets:
    """`experiments/*.py` of the directory in which the app was started."""

    def __init__(self, place: Path, project: Path) -> None:
        """Reads nothing yet."""
        self.place = place
        self._project = project
        self._jobs = Jobs(project, LIMIT_SECONDS, width=2)

    def names(self) -> list[str]:
        """The files that look like experiments, without their `.py`."""
        if not self.place.is_dir():
            return []
        found = [path for path in sorted(self.place.glob("*.py")) if "Experiment(" in _beginning(path)]
        return [path.stem for path in found[:MOST]]

    def file(self, name: str) -> Path:
        """The file of a preset."""
        return self.place / f"{name}.py"

    def job(self, name: str, *, again: bool = False) -> Job | None:
        """What reads a preset; None if there is no such preset.

        Args:
            name: Its file's, without `.py`.
            again: Whether to read it once more if that failed; otherwise only when a file has changed.
        """
        if name not in self.names():
            return None
        # Recipes import each other, so any file may change any of them.
        key = name + files_of({path.name: path for path in sorted(self.place.glob("*.py"))})
        found = self._jobs.get(key)
        if found is not None and not again:
            return found
        return self._jobs.start(key, ("-m", "nnxdsl", "show", str(self.file(name)), "--json"))

    def experiment(self, name: str) -> Experiment | None:
        """The experiment of a preset, once it has been read.

        Raises:
            SpecError: it names classes that are not nnxdsl's own.
        """
        job = self.job(name)
        return from_tree(job.result) if job is not None and job.state == "done" else None

    def command(self, name: str, experiment: Experiment, wait_seconds: float = 0.0) -> tuple[str, ...]:
        """What comes after `python` to run an experiment as a recipe's file: the file, and `path=value` arguments.

        Args:
            name: The recipe's file, without `.py`.
            experiment: What is to run: the recipe with some fields changed.
            wait_seconds: How long to wait for the child process that reads the recipe.

        Raises:
            RunError: The recipe is gone or cannot be read, or arguments cannot make this experiment of it.
        """
        job, until = self.job(name), time.monotonic() + wait_seconds
        if job is None:
            raise RunError(f"{self.file(name)} is gone; put it back, or import the draft's JSON as a draft of its own")
        while not job.is_over and time.monotonic() < until:
            time.sleep(0.05)
        file = self.file(name).relative_to(self._project)
        if not job.is_over:
            raise RunError(f"{file} is still being read; try again in a moment")
        if job.state != "done":
            raise RunError(f"{file} cannot be read: {job.error or job.state}")
        recipe = from_tree(job.result)
        changes = {path: render(value) for path, value in diff(recipe, experiment).items()}
        try:
            is_reached = evolve(recipe, {path: parse_value(text) for path, text in changes.items()}) == experiment
        except SpecError:
            is_reached = False
        if not is_reached:
            raise RunError(f"path=value arguments cannot change {', '.join(changes)} of {file}; edit the file itself")
        return str(file), *(f"{path}={text}" for path, text in changes.items())

    def named_in(self, argv: Iterable[object], cwd: Path) -> str:
        """The recipe whose file a command names; empty if it names none."""
        files = {self.file(name).resolve(): name for name in self.names()}
        words = [word for word in argv if isinstance(word, str) and word.endswith(".py")]
        return next((files[path] for word in words if (path := (cwd / word).resolve()) in files), "")

    def close(self) -> None:
        """Ends what is being read."""
        self._jobs.close()


def _beginning(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")[:100_000]
    except (OSError, UnicodeError):
        return ""
