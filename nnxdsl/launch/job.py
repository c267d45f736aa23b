"""What is started, the command that a person would type, and what every engine can do with it; knows no engine.

An engine starts processes and says whether they are at work. How a run ended stands in the run's directory, whoever
started it and whoever is there to see it; see `outcome.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import attrs

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import checked_path
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import read_json, replace, write_json

DIRECTORY = ".launch"
"""Under the home of all runs, passed over where runs are listed: one directory for each run that was launched."""

FORWARDED = ("JAX_", "XLA_", "NNXDSL_")
"""How the variables begin that go along to machines which do not share this one's environment."""

TAIL_BYTES = 16_000


@attrs.frozen
class Job:
    """One run that is to be computed by processes of its own.

    Attributes:
        run: Its id.
        directory: What the launch needs and leaves: the experiment, what the processes print, who they are.
        words: What follows `python -m nnxdsl`.
        cwd: Where the command is typed.
        variables: What is added to the environment.
    """

    run: str
    directory: Path
    words: tuple[str, ...]
    cwd: Path
    variables: Mapping[str, str] = attrs.field(factory=dict[str, str])

    @property
    def output(self) -> Path:
        """What its processes print, those of all attempts, one after the other."""
        return self.directory / "output.txt"

    def command(self, python: str = sys.executable, *more: str) -> list[str]:
        """The words of the command, `more` after the rest."""
        return [python, "-m", "nnxdsl", *self.words, *more]

    def environment(self) -> dict[str, str]:
        """This process's environment with the job's variables."""
        return {**os.environ, **self.variables}

    def forwarded(self) -> dict[str, str]:
        """What a machine that does not share this one's environment is told of it."""
        told = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        return {**told, **self.variables}

    def note(self, name: str, value: Any) -> None:
        """Replaces a JSON file of the job's directory."""
        write_json(self.directory / name, value)

    def noted(self, name: str) -> dict[str, Any]:
        """What such a file holds; nothing where there is none, or it is damaged."""
        try:
            found = read_json(self.directory / name)
        except RunError:
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def printed(self, since: int = 0) -> str:
        """The end of what it printed after so many bytes, secrets blotted out."""
        try:
            with self.output.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(since, end - TAIL_BYTES))
                data = file.read(TAIL_BYTES)
        except OSError:
            return ""
        return process_info.redact(data.decode("utf-8", errors="replace"))


class Engine(Protocol):
    """Starts jobs somewhere; what it knows of them stands in their directories, so that another one can go on.

    Attributes:
        parallel: Jobs at one time.
        retries: How often a job that was preempted or killed is started again.
        poll_seconds: How often it is worth asking.
    """

    parallel: int
    retries: int
    poll_seconds: float

    def start(self, job: Job) -> bool:
        """Starts a job; False if it is at work already, whoever started it."""
        ...

    def is_at_work(self, job: Job) -> bool:
        """Whether it waits for its turn or computes."""
        ...

    def exit_code(self, job: Job) -> int | None:
        """How its last process ended, negative for a signal; None where nobody saw it."""
        ...

    def where(self, job: Job) -> str:
        """What people may look for: `process 4711`."""
        ...

    def terminate(self, job: Job) -> None:
        """Asks it to save and end (SIGTERM), or takes it out of the queue."""
        ...

    def close(self) -> None:
        """Lets go of everything; jobs go on."""
        ...


def prepare(experiment: Experiment, home: Path, variables: Mapping[str, str]) -> Job:
    """The job of an experiment, its directory made and the experiment written into it.

    Raises:
        RunError: the directory cannot be made.
        SpecError: the experiment has a class that another process could not import.
    """
    place = checked_path(home.resolve() / experiment.id).parent
    directory = place / DIRECTORY / experiment.id
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory}: cannot be made: {error.strerror}") from error
    write_json(directory / "experiment.json", to_dict(experiment))
    replace(directory / "experiment.py", to_python(experiment).encode())
    words = ("run", str(directory / "experiment.json"), "--home", str(place))
    return Job(experiment.id, directory, words, Path.cwd(), variables)
