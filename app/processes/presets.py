"""The project's recipes: a child process executes each file and returns its experiment, the app itself does not.

A run that is based on a recipe is started through the recipe's file, `python experiments/NAME.py path=value ...`, so
that rewards and classes which the file defines are available.
"""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from nnxdsl.config.core.codegen import parse_value, render
from nnxdsl.config.core.serialization import diff, evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError, SpecError

from ..store.experiments import from_tree
from .jobs import Job, Jobs

LIMIT_SECONDS = 60.0
MOST, READ = 60, 100_000  # most recipes, and characters of a file that are looked at


class Presets:
    """The files `experiments/*.py` of the directory in which the app was started."""

    def __init__(self, place: Path, project: Path) -> None:
        self.place = place
        self._project = project
        self._jobs = Jobs(project, LIMIT_SECONDS, width=2, most=None)

    def names(self) -> list[str]:
        """Names of the files that look like experiments, without `.py`."""
        names: list[str] = []
        for path in sorted(self.place.glob("*.py")):
            with contextlib.suppress(OSError, UnicodeError):
                names += [path.stem] if "Experiment(" in path.read_text("utf-8")[:READ] else []
        return names[:MOST]

    def summary(self, name: str) -> str:
        """The first line of a preset's docstring; empty without one. The file is parsed, not executed."""
        with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError):
            return (ast.get_docstring(ast.parse(self.file(name).read_text("utf-8"))) or "").partition("\n")[0]
        return ""

    def file(self, name: str) -> Path:
        """Path of a preset."""
        return self.place / f"{name}.py"

    def job(self, name: str, *, again: bool = False) -> Job | None:
        """Returns the job that reads a preset; None if there is none of this name.

        Files are read again when they change, or on request.
        """
        if name not in self.names():
            return None
        # Recipes import each other, so any file may change any of them.
        stats = [(path.name, path.stat()) for path in sorted(self.place.glob("*.py")) if path.is_file()]
        key = f"{name} {[(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats]}"
        job = self._jobs.get(key)
        if job is not None and not again:
            return job
        return self._jobs.start(key, ("-m", "nnxdsl", "show", str(self.file(name)), "--json"))

    def experiment(self, name: str, wait_seconds: float = 0.0) -> Experiment | None:
        """Returns the experiment of a preset, which it waits for; None if it is still read, raises if it cannot be."""
        job, file, until = self.job(name), self.file(name), time.monotonic() + wait_seconds
        if job is None:
            raise RunError(f"{file} does not exist: there is no such recipe; restore it, or import the draft's JSON")
        while not job.is_over and time.monotonic() < until:
            time.sleep(0.1)
        if job.is_over and job.state != "done":
            raise RunError(f"{file.relative_to(self._project)} cannot be read: {job.error or job.state}")
        return from_tree(job.result) if job.is_over else None

    def command(self, name: str, experiment: Experiment, wait_seconds: float = 0.0) -> tuple[str, ...]:
        """Returns the arguments of `python` that run an experiment through a recipe: the file, and `path=value`s.

        Waits so long for the child process that reads the recipe; raises if that fails, or if arguments cannot do it.
        """
        file, recipe = self.file(name).relative_to(self._project), self.experiment(name, wait_seconds)
        if recipe is None:
            raise RunError(f"{file} is still being read; try again in a moment")
        changes = {path: render(value) for path, value in diff(recipe, experiment).items()}
        try:
            is_reached = evolve(recipe, {path: parse_value(text) for path, text in changes.items()}) == experiment
        except SpecError:
            is_reached = False
        if not is_reached:
            raise RunError(f"path=value arguments cannot change {', '.join(changes)} of {file}; edit the file itself")
        return str(file), *(f"{path}={text}" for path, text in changes.items())

    def named_in(self, argv: Iterable[object], cwd: Path) -> str:
        """Name of the recipe whose file is in a command line; empty if there is none."""
        files = {self.file(name).resolve(): name for name in self.names()}
        scripts = [word for word in argv if isinstance(word, str) and word.endswith(".py")]
        return next((files[path] for word in scripts if (path := (cwd / word).resolve()) in files), "")

    def close(self) -> None:
        """Cancels running jobs."""
        self._jobs.close()
