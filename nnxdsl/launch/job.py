"""A job (the command of one run) and the protocol of the engines that start it.

An engine starts processes and reports whether they are running. How a run ended is in the run's directory, whatever
started it; see `outcome.py`.
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
"""Prefixes of the variables that are forwarded to machines with another environment."""

TAIL_BYTES = 16_000


@attrs.frozen
class Job:
    """One run in processes of its own.

    Attributes:
        run: Its id.
        directory: The files of the launch: the experiment, the processes' output, their ids.
        argv: The arguments of `python -m nnxdsl`.
        cwd: The working directory.
        variables: Variables added to the environment.
    """

    run: str
    directory: Path
    argv: tuple[str, ...]
    cwd: Path
    variables: Mapping[str, str] = attrs.field(factory=dict[str, str])

    @property
    def output(self) -> Path:
        """The output of its processes, of all attempts one after the other."""
        return self.directory / "output.txt"

    def command(self, python: str = sys.executable, *more: str) -> list[str]:
        """The command, with `more` arguments at its end."""
        return [python, "-m", "nnxdsl", *self.argv, *more]

    def environment(self) -> dict[str, str]:
        """This process's environment with the job's variables."""
        return {**os.environ, **self.variables}

    def forwarded(self) -> dict[str, str]:
        """The variables for a machine that does not share this one's environment."""
        variables = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        return {**variables, **self.variables}

    def write(self, name: str, value: Any) -> None:
        """Writes a JSON file in the job's directory, atomically."""
        write_json(self.directory / name, value)

    def read(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the job's directory; empty if it is missing or damaged."""
        try:
            value = read_json(self.directory / name)
        except RunError:
            return {}
        return cast("dict[str, Any]", value) if isinstance(value, dict) else {}

    def output_tail(self, since: int = 0) -> str:
        """The last `TAIL_BYTES` of its output after the first `since` bytes, with secrets redacted."""
        try:
            with self.output.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(since, end - TAIL_BYTES))
                data = file.read(TAIL_BYTES)
        except OSError:
            return ""
        return process_info.redact(data.decode("utf-8", errors="replace"))


class Engine(Protocol):
    """Starts jobs somewhere; its state is in their directories, so that another engine can continue.

    Attributes:
        parallel: Maximum number of concurrent jobs.
        retries: How often a job that was preempted or killed is restarted.
        poll_seconds: Seconds between polls.
    """

    parallel: int
    retries: int
    poll_seconds: float

    def start(self, job: Job) -> bool:
        """Starts a job; False if it is running already, whatever started it."""
        ...

    def is_active(self, job: Job) -> bool:
        """Whether it is queued or running."""
        ...

    def exit_code(self, job: Job) -> int | None:
        """The exit code of its last process, negative for a signal; None where it is unknown."""
        ...

    def location(self, job: Job) -> str:
        """Its location for people: `process 4711`."""
        ...

    def terminate(self, job: Job) -> None:
        """Makes it save and end (SIGTERM), or removes it from the queue."""
        ...

    def close(self) -> None:
        """Releases all connections; jobs continue."""
        ...


def prepare(experiment: Experiment, home: Path, variables: Mapping[str, str]) -> Job:
    """The job of an experiment, its directory made and the experiment written into it.

    Raises:
        RunError: the directory cannot be made.
        SpecError: the experiment has a class that another process could not import.
    """
    home = checked_path(home.resolve() / experiment.id).parent
    directory = home / DIRECTORY / experiment.id
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory}: cannot be made: {error.strerror}") from error
    write_json(directory / "experiment.json", to_dict(experiment))
    replace(directory / "experiment.py", to_python(experiment).encode())
    argv = ("run", str(directory / "experiment.json"), "--home", str(home))
    return Job(experiment.id, directory, argv, Path.cwd(), variables)


def import_path(directory: Path) -> dict[str, str]:
    """Variables with which a process imports modules in `directory`, besides those of this process's PYTHONPATH."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = dict.fromkeys([str(directory.resolve()), *(value for value in inherited if value)])
    return {"PYTHONPATH": os.pathsep.join(places)}
