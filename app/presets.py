"""The project's experiments: code that the app does not run itself; a child process says what each of them is."""

from __future__ import annotations

import threading
from pathlib import Path

from nnxdsl.config.experiment import Experiment

from .experiments import from_tree
from .jobs import Job, Jobs, files_of

LIMIT_SECONDS = 60.0
MOST = 60


class Presets:
    """`experiments/*.py` of the directory in which the app was started."""

    def __init__(self, place: Path, project: Path) -> None:
        """Reads nothing yet."""
        self.place = place
        self._jobs = Jobs(project, LIMIT_SECONDS, width=2)
        self._lock = threading.Lock()

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

    def close(self) -> None:
        """Ends what is being read."""
        self._jobs.close()


def _beginning(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")[:100_000]
    except (OSError, UnicodeError):
        return ""
