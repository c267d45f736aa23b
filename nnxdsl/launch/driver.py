"""Runs many experiments: starts them, waits, restarts preempted ones; independent of any engine.

Its state is in files: the runs' own directories, the jobs' directories, and a line in `trials.jsonl` for every event.
Killed at any moment and started again, it resumes: runs that are running are waited for, those that have ended are not
started again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.weights import dependencies_of
from nnxdsl.errors import NnxdslError
from nnxdsl.launch.job import DIRECTORY, Engine, Job, prepare
from nnxdsl.launch.outcome import Outcome, attempts_of, is_alive, outcome_from_status, outcome_of_job
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
class TaskResult:
    """How a task ended."""

    state: State
    step: int | None = None
    error: str | None = None


class Source(Protocol):
    """A queue of tasks, and a callback for their results."""

    @property
    def total(self) -> int:
        """The number of tasks."""
        ...

    def next(self) -> Task | None:
        """The next task; None where there is none now."""
        ...

    def should_stop(self, task: Task) -> bool:
        """Whether to stop a running task early (pruning); called at every poll."""
        ...

    def on_end(self, task: Task, result: TaskResult) -> None:
        """Called when a task has ended."""
        ...


@attrs.define
class _Active:
    tasks: list[Task]
    job: Job
    attempts_before: int
    output_before: int
    tries: int = 1
    is_elsewhere: bool = False
    is_pruned: bool = False
    is_terminating: bool = False


class Driver:
    """Runs the tasks of a source. The caller holds the lock of the directory."""

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
            is_quiet_about_finished: Whether to print nothing for runs that had already finished.
        """
        self._engine, self._home, self._directory, self._display = engine, home, directory, display
        self._variables = variables or {}
        self._retry_failed = retry_failed
        self._is_quiet = is_quiet_about_finished
        self._events = JsonLines(directory / EVENTS)
        self._failed = {row["run"]: str(row.get("error")) for row in last_events(directory) if row["event"] == "failed"}
        self._active: dict[str, _Active] = {}
        self._blocked: list[Task] = []
        self.results: dict[str, TaskResult] = {}
        self._done = 0

    def drive(self, source: Source) -> None:
        """Returns when all tasks have ended or were stopped.

        Raises:
            NnxdslError: the engine cannot start anything at all.
        """
        try:
            while True:
                for active in list(self._active.values()):
                    self._poll(source, active)
                if not self.is_stopping:
                    self._start_due(source)
                if not self._active and (self.is_stopping or not self._blocked):
                    return
                time.sleep(self._engine.poll_seconds)
        finally:
            self._events.close()

    def cancel(self, source: Source, tasks: Iterable[Task]) -> None:
        """Stops running tasks and the runs that they depend on, and waits for them to end.

        The request itself is the file `STOP` in the driver's directory.
        """
        for task in tasks:
            for one in (task, *(Task(dependency) for dependency in dependencies_of(task.experiment))):
                is_running = is_alive(self._home / one.run)  # also where a terminal started it, without an engine
                has_job = (self._home / DIRECTORY / one.run / JOB).exists()
                if one.run in self._active or not (is_running or has_job):
                    continue
                job = prepare(one.experiment, self._home, self._variables)
                if is_running or self._engine.is_active(job):
                    self._attach(one, job)
        if not self._active:
            self._display.say("nothing to stop: no such run is running")
        self.drive(source)

    def start_detached(self, task: Task) -> str:
        """Starts one task without waiting for it; returns its location.

        Raises:
            NnxdslError: the engine cannot start it.
        """
        self._begin(_SingleTask(task), task)
        active = self._active.get(task.run)
        self._events.close()
        return "" if active is None else self._engine.location(active.job)

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return (self._directory / STOP).exists()

    # tasks to start

    def _start_due(self, source: Source) -> None:
        while sum(not active.is_elsewhere for active in self._active.values()) < self._engine.parallel:
            task = self._next_due(source)
            if task is None:
                return
            self._begin(source, task)

    def _next_due(self, source: Source) -> Task | None:
        while True:
            for task in list(self._blocked):
                missing = [
                    dependency for dependency in dependencies_of(task.experiment) if not self._has_finished(dependency)
                ]
                lost = [dependency.id for dependency in missing if dependency.id in self.results]
                if lost:
                    self._blocked.remove(task)
                    result = self.results[lost[0]]
                    self._finish(
                        source,
                        [task],
                        TaskResult(result.state, None, f"{lost[0]}, which it starts from: {result.error}"),
                    )
                    continue
                if not missing:
                    self._blocked.remove(task)
                    return task
                waits = {*self._active, *(blocked.run for blocked in self._blocked)}
                due = next((dependency for dependency in missing if dependency.id not in waits), None)
                if due is not None:
                    if any(not self._has_finished(dependency) for dependency in dependencies_of(due)):
                        self._blocked.insert(0, Task(due))
                        return self._next_due(source)
                    return Task(due)
            if len(self._blocked) >= self._engine.parallel:
                return None
            task = source.next()
            if task is None:
                return None
            if self._has_finished(task.experiment) or not dependencies_of(task.experiment):
                return task
            self._blocked.append(task)

    def _has_finished(self, experiment: Experiment) -> bool:
        outcome = outcome_from_status(self._home / experiment.id)
        return outcome is not None and outcome.state == "finished"

    def _begin(self, source: Source, task: Task) -> None:
        if task.run in self._active:  # two trials of a search may be one experiment
            self._active[task.run].tasks.append(task)
            return
        if task.run in self.results:
            self._finish(source, [task], self.results[task.run])
            return
        run = self._home / task.run
        outcome = outcome_from_status(run)
        if outcome is not None and outcome.state == "finished":
            self._finish(source, [task], TaskResult("finished", outcome.step), is_from_before=True)
            return
        try:
            job = prepare(task.experiment, self._home, self._variables)
        except NnxdslError as error:
            self._finish(source, [task], TaskResult("failed", None, str(error)))
            return
        active = _Active([task], job, attempts_before=-1, output_before=0)
        if self._engine.is_active(job):
            self._attach(task, job)
        elif is_alive(run):
            active.is_elsewhere = True
            self._active[task.run] = active
            self._log_event("elsewhere", task)
            self._display.say(f"{task.run} is already running; waiting")
        elif not self._retry_failed and (before := self._failed_before(task.run, outcome)) is not None:
            self._finish(
                source,
                [task],
                TaskResult("failed", None if outcome is None else outcome.step, before),
                is_from_before=True,
            )
        else:
            self._active[task.run] = active
            self._start(source, active)

    def _attach(self, task: Task, job: Job) -> None:
        record = job.read(JOB)
        before, output_size = int(record.get("attempts_before", -1)), int(record.get("printed_before", 0))
        self._active[task.run] = _Active([task], job, attempts_before=before, output_before=output_size)
        self._log_event("attached", task, location=self._engine.location(job))

    def _failed_before(self, run: str, outcome: Outcome | None) -> str | None:
        if outcome is not None and outcome.state == "failed":
            return outcome.error or "failed"
        return self._failed.get(run)

    def _start(self, source: Source, active: _Active) -> None:
        job, task = active.job, active.tasks[0]
        active.attempts_before = attempts_of(self._home / task.run)
        active.output_before = job.output.stat().st_size if job.output.exists() else 0
        active.is_elsewhere = False
        job.write(
            JOB,
            {
                "attempts_before": active.attempts_before,
                "printed_before": active.output_before,
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
            self._finish(source, active.tasks, TaskResult("failed", None, str(error)))
            return
        self._log_event(
            "started" if is_new else "attached", task, location=self._engine.location(job), attempt=active.tries
        )

    # running jobs

    def _poll(self, source: Source, active: _Active) -> None:
        run = self._home / active.job.run
        if self._engine.is_active(active.job):
            self._stop_early(source, active, run)
            return
        if is_alive(run):  # started by another process, or left by a lost engine
            if not active.is_elsewhere:
                active.is_elsewhere, active.attempts_before = True, -1
                self._log_event("elsewhere", active.tasks[0])
            self._stop_early(source, active, run)
            return
        code = None if active.is_elsewhere else self._engine.exit_code(active.job)
        result = outcome_of_job(run, active.attempts_before, code, active.job.output_tail(active.output_before))
        if result.state == "preempted" and not self.is_stopping and not active.is_pruned:
            if active.tries <= self._engine.retries:
                self._log_event("preempted", active.tasks[0], attempt=active.tries, error=result.error)
                self._display.say(f"{active.job.run}: {result.error}; restarting")
                active.tries += 1
                self._start(source, active)
                return
            result = attrs.evolve(result, error=f"{result.error}; no attempts left after {active.tries}")
        elif result.state == "preempted":
            result = Outcome("stopped", result.step, result.error)
        del self._active[active.job.run]
        state: State = "pruned" if active.is_pruned and result.state == "stopped" else result.state
        self._finish(source, active.tasks, TaskResult(state, result.step, result.error))

    def _stop_early(self, source: Source, active: _Active, run: Path) -> None:
        """Stops a pruned or cancelled run: by a stop file once it has begun, by SIGTERM before that."""
        if not active.is_pruned and any(source.should_stop(task) for task in active.tasks):
            active.is_pruned = True
            self._log_event("pruning", active.tasks[0])
        if not (active.is_pruned or self.is_stopping):
            return
        if is_alive(run):
            directory = RunDirectory(run)
            if not directory.stop_requested():  # a run that begins removes earlier requests
                directory.request_stop()
        elif not active.is_terminating:
            active.is_terminating = True
            self._engine.terminate(active.job)

    # results

    def _finish(self, source: Source, tasks: list[Task], result: TaskResult, *, is_from_before: bool = False) -> None:
        for task in tasks:
            self.results[task.run] = result
            if not is_from_before:
                self._log_event(result.state, task, step=result.step, error=result.error)
            if task.index is not None:
                self._done += 1
                source.on_end(task, result)
            if not (is_from_before and self._is_quiet and result.state == "finished"):
                self._print_result(task, result, source.total, is_from_before=is_from_before)

    def _print_result(self, task: Task, result: TaskResult, total: int, *, is_from_before: bool) -> None:
        number = "earlier run" if task.index is None else f"{self._done}/{total}"
        before = " before" if is_from_before else ""
        line = f"{number}  {task.run}  {result.state}{before}"
        if result.error and result.state != "finished":
            line += f": {result.error.splitlines()[0]}"
        self._display.say(line)

    def _log_event(self, event: str, task: Task, **more: Any) -> None:
        fields = {name: value for name, value in more.items() if value is not None}
        self._events.append(
            {"time": process_info.utc(), "event": event, "run": task.run, "point": task.index, **fields}
        )


@attrs.frozen
class _SingleTask:
    task: Task
    total: int = 1

    def next(self) -> Task | None:
        return None

    def should_stop(self, task: Task) -> bool:
        return False

    def on_end(self, task: Task, result: TaskResult) -> None:
        return None


def last_events(directory: Path) -> list[dict[str, Any]]:
    """The last event of each run in a driver's directory."""
    events: dict[str, dict[str, Any]] = {}
    for row in JsonLines(directory / EVENTS).read():
        if isinstance(row.get("run"), str) and isinstance(row.get("event"), str):
            events[row["run"]] = row
    return list(events.values())
