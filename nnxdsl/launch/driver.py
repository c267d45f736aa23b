"""Runs many experiments: starts what is due, waits, restarts what was preempted; independent of any engine.

Its state is in files: the runs' own directories, the jobs' directories, and a line in `trials.jsonl` for every event.
Killed at any moment and started again, it resumes: runs that are running are waited for, those that have ended are not
started again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import attrs

from nnxdsl.config.core.base import Spec, declared
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.weights import From
from nnxdsl.errors import NnxdslError
from nnxdsl.launch.job import DIRECTORY, Engine, Job, prepare
from nnxdsl.launch.outcome import Ended, attempts_of, ended, is_alive, standing
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines
from nnxdsl.terminal.display import Display

EVENTS = "trials.jsonl"
STOP = "stop"
"""A file of this name in the driver's directory makes it stop all its runs and end."""
JOB = "job.json"

State = Literal["finished", "stopped", "failed", "preempted", "pruned"]


@attrs.frozen
class Task:
    """A run to be done.

    Attributes:
        experiment: The experiment.
        index: Its number, from 0; None for an earlier run that others start from.
    """

    experiment: Experiment
    index: int | None = None

    @property
    def run(self) -> str:
        """The id of its run."""
        return self.experiment.id


@attrs.frozen
class Settled:
    """How a task ended."""

    state: State
    step: int | None = None
    error: str | None = None


class Source(Protocol):
    """Gives the next task, and is called when one has ended."""

    @property
    def total(self) -> int:
        """The number of tasks."""
        ...

    def next(self) -> Task | None:
        """The next task; None where there is none now."""
        ...

    def is_to_end(self, task: Task) -> bool:
        """Whether a running run is to be stopped early; called at every poll."""
        ...

    def settled(self, task: Task, how: Settled) -> None:
        """Called when a task has ended."""
        ...


@attrs.define
class _Active:
    tasks: list[Task]
    job: Job
    attempts_before: int
    printed_before: int
    tries: int = 1
    is_elsewhere: bool = False
    is_pruned: bool = False
    is_terminating: bool = False


class Driver:
    """Drives the tasks of a source. One at a time may use a directory; its caller has the lock."""

    def __init__(
        self,
        engine: Engine,
        home: Path,
        directory: Path,
        display: Display,
        *,
        variables: Mapping[str, str] | None = None,
        retry_failed: bool = False,
        is_quiet_about_finished: bool = False,
    ) -> None:
        """Starts nothing.

        Args:
            engine: Starts the runs.
            home: Directory of all runs.
            directory: Where events are logged.
            display: The display.
            variables: Variables added to the environment of the runs.
            retry_failed: Whether runs that failed before are started again.
            is_quiet_about_finished: Whether nothing is printed for runs that had finished before.
        """
        self._engine, self._home, self._directory, self._display = engine, home, directory, display
        self._variables = variables or {}
        self._retry_failed = retry_failed
        self._is_quiet = is_quiet_about_finished
        self._events = JsonLines(directory / EVENTS)
        self._failed = {row["run"]: str(row.get("error")) for row in last_events(directory) if row["event"] == "failed"}
        self._active: dict[str, _Active] = {}
        self._blocked: list[Task] = []
        self.settled: dict[str, Settled] = {}
        self._done = 0

    def drive(self, source: Source) -> None:
        """Returns when all tasks have ended or were stopped.

        Raises:
            NnxdslError: the engine cannot start anything at all.
        """
        try:
            while True:
                for active in list(self._active.values()):
                    self._look(source, active)
                if not self.is_stopping:
                    self._fill(source)
                if not self._active and (self.is_stopping or not self._blocked):
                    return
                time.sleep(self._engine.poll_seconds)
        finally:
            self._events.close()

    def cancel(self, source: Source, tasks: Iterable[Task]) -> None:
        """Stops those of some tasks, and of the earlier runs that they need, that are running; waits for their end.

        The request itself is the file `STOP` in the driver's directory.
        """
        for task in tasks:
            for one in (task, *(Task(earlier) for earlier in earlier_of(task.experiment))):
                is_running = is_alive(self._home / one.run)  # also where a terminal started it, without an engine
                has_job = (self._home / DIRECTORY / one.run / JOB).exists()
                if one.run in self._active or not (is_running or has_job):
                    continue
                job = prepare(one.experiment, self._home, self._variables)
                if is_running or self._engine.is_at_work(job):
                    self._attach(one, job)
        if not self._active:
            self._display.say("nothing to stop: no such run is running")
        self.drive(source)

    def start_and_leave(self, task: Task) -> str:
        """Starts one task without waiting for it; returns its location.

        Raises:
            NnxdslError: the engine cannot start it.
        """
        self._begin(_OnlyOne(task), task)
        active = self._active.get(task.run)
        self._events.close()
        return "" if active is None else self._engine.where(active.job)

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return (self._directory / STOP).exists()

    # what is due

    def _fill(self, source: Source) -> None:
        while sum(not active.is_elsewhere for active in self._active.values()) < self._engine.parallel:
            task = self._take(source)
            if task is None:
                return
            self._begin(source, task)

    def _take(self, source: Source) -> Task | None:
        while True:
            for task in list(self._blocked):
                missing = [earlier for earlier in earlier_of(task.experiment) if not self._has_finished(earlier)]
                lost = [earlier.id for earlier in missing if earlier.id in self.settled]
                if lost:
                    self._blocked.remove(task)
                    how = self.settled[lost[0]]
                    self._settle(
                        source, [task], Settled(how.state, None, f"{lost[0]}, which it starts from: {how.error}")
                    )
                    continue
                if not missing:
                    self._blocked.remove(task)
                    return task
                waits = {*self._active, *(blocked.run for blocked in self._blocked)}
                due = next((earlier for earlier in missing if earlier.id not in waits), None)
                if due is not None:
                    if any(not self._has_finished(earlier) for earlier in earlier_of(due)):
                        self._blocked.insert(0, Task(due))
                        return self._take(source)
                    return Task(due)
            if len(self._blocked) >= self._engine.parallel:
                return None
            task = source.next()
            if task is None:
                return None
            if self._has_finished(task.experiment) or not earlier_of(task.experiment):
                return task
            self._blocked.append(task)

    def _has_finished(self, experiment: Experiment) -> bool:
        found = standing(self._home / experiment.id)
        return found is not None and found.became == "finished"

    def _begin(self, source: Source, task: Task) -> None:
        if task.run in self._active:  # two trials of a search may be one experiment
            self._active[task.run].tasks.append(task)
            return
        if task.run in self.settled:
            self._settle(source, [task], self.settled[task.run])
            return
        run = self._home / task.run
        found = standing(run)
        if found is not None and found.became == "finished":
            self._settle(source, [task], Settled("finished", found.step), was_before=True)
            return
        try:
            job = prepare(task.experiment, self._home, self._variables)
        except NnxdslError as error:
            self._settle(source, [task], Settled("failed", None, str(error)))
            return
        active = _Active([task], job, attempts_before=-1, printed_before=0)
        if self._engine.is_at_work(job):
            self._attach(task, job)
        elif is_alive(run):
            active.is_elsewhere = True
            self._active[task.run] = active
            self._note("elsewhere", task)
            self._display.say(f"{task.run} is already running; waiting")
        elif not self._retry_failed and (before := self._failed_before(task.run, found)) is not None:
            self._settle(
                source, [task], Settled("failed", None if found is None else found.step, before), was_before=True
            )
        else:
            self._active[task.run] = active
            self._start(source, active)

    def _attach(self, task: Task, job: Job) -> None:
        noted = job.noted(JOB)
        before, printed = int(noted.get("attempts_before", -1)), int(noted.get("printed_before", 0))
        self._active[task.run] = _Active([task], job, attempts_before=before, printed_before=printed)
        self._note("attached", task, where=self._engine.where(job))

    def _failed_before(self, run: str, found: Ended | None) -> str | None:
        if found is not None and found.became == "failed":
            return found.error or "failed"
        return self._failed.get(run)

    def _start(self, source: Source, active: _Active) -> None:
        job, task = active.job, active.tasks[0]
        active.attempts_before = attempts_of(self._home / task.run)
        active.printed_before = job.output.stat().st_size if job.output.exists() else 0
        active.is_elsewhere = False
        job.note(
            JOB,
            {
                "attempts_before": active.attempts_before,
                "printed_before": active.printed_before,
                "command": [process_info.redact(word) for word in job.command()],
                "cwd": str(job.cwd),
                "time": process_info.utc(),
                "by": {"pid": os.getpid(), "host": process_info.hostname()},
            },
        )
        try:
            is_new = self._engine.start(job)
        except NnxdslError as error:
            del self._active[task.run]
            self._settle(source, active.tasks, Settled("failed", None, str(error)))
            return
        self._note("started" if is_new else "attached", task, where=self._engine.where(job), attempt=active.tries)

    # what is at work

    def _look(self, source: Source, active: _Active) -> None:
        run = self._home / active.job.run
        if self._engine.is_at_work(active.job):
            self._stop_early(source, active, run)
            return
        if is_alive(run):  # started by another process, or left by a lost engine
            if not active.is_elsewhere:
                active.is_elsewhere, active.attempts_before = True, -1
                self._note("elsewhere", active.tasks[0])
            self._stop_early(source, active, run)
            return
        code = None if active.is_elsewhere else self._engine.exit_code(active.job)
        how = ended(run, active.attempts_before, code, active.job.printed(active.printed_before))
        if how.became == "preempted" and not self.is_stopping and not active.is_pruned:
            if active.tries <= self._engine.retries:
                self._note("preempted", active.tasks[0], attempt=active.tries, error=how.error)
                self._display.say(f"{active.job.run}: {how.error}; restarting")
                active.tries += 1
                self._start(source, active)
                return
            how = attrs.evolve(how, error=f"{how.error}; no attempts left after {active.tries}")
        elif how.became == "preempted":
            how = Ended("stopped", how.step, how.error)
        del self._active[active.job.run]
        state: State = "pruned" if active.is_pruned and how.became == "stopped" else how.became
        self._settle(source, active.tasks, Settled(state, how.step, how.error))

    def _stop_early(self, source: Source, active: _Active, run: Path) -> None:
        """Stops a run that is to be stopped: by a file once it has begun, by a signal before that."""
        if not active.is_pruned and any(source.is_to_end(task) for task in active.tasks):
            active.is_pruned = True
            self._note("pruning", active.tasks[0])
        if not (active.is_pruned or self.is_stopping):
            return
        if is_alive(run):
            directory = RunDirectory(run)
            if not directory.stop_requested():  # a run that begins removes earlier requests
                directory.request_stop()
        elif not active.is_terminating:
            active.is_terminating = True
            self._engine.terminate(active.job)

    # what has ended

    def _settle(self, source: Source, tasks: list[Task], how: Settled, *, was_before: bool = False) -> None:
        for task in tasks:
            self.settled[task.run] = how
            if not was_before:
                self._note(how.state, task, step=how.step, error=how.error)
            if task.index is not None:
                self._done += 1
                source.settled(task, how)
            if not (was_before and self._is_quiet and how.state == "finished"):
                self._say(task, how, source.total, was_before=was_before)

    def _say(self, task: Task, how: Settled, total: int, *, was_before: bool) -> None:
        number = "earlier run" if task.index is None else f"{self._done}/{total}"
        before = " before" if was_before else ""
        line = f"{number}  {task.run}  {how.state}{before}"
        if how.error and how.state != "finished":
            line += f": {how.error.splitlines()[0]}"
        self._display.say(line)

    def _note(self, event: str, task: Task, **more: Any) -> None:
        fields = {name: value for name, value in more.items() if value is not None}
        self._events.append(
            {"time": process_info.utc(), "event": event, "run": task.run, "point": task.index, **fields}
        )


@attrs.frozen
class _OnlyOne:
    task: Task
    total: int = 1

    def next(self) -> Task | None:
        return None

    def is_to_end(self, task: Task) -> bool:
        return False

    def settled(self, task: Task, how: Settled) -> None:
        return None


def last_events(directory: Path) -> list[dict[str, Any]]:
    """The last event of each run in a driver's directory."""
    found: dict[str, dict[str, Any]] = {}
    for row in JsonLines(directory / EVENTS).read():
        if isinstance(row.get("run"), str) and isinstance(row.get("event"), str):
            found[row["run"]] = row
    return list(found.values())


def earlier_of(experiment: Experiment) -> list[Experiment]:
    """The experiments whose weights one needs, each once: for its model, its reference, its teacher."""
    return list({found.id: found for found in _inside(experiment)}.values())


def _inside(value: object) -> Iterator[Experiment]:
    if isinstance(value, From):
        yield value.experiment
    elif isinstance(value, Spec):
        for name in declared(type(value)):
            yield from _inside(getattr(value, name))
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _inside(item)
