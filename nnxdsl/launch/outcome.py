"""The outcome of a run: from its status, else from the exit code and the output of its process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

OutcomeState = Literal["finished", "stopped", "failed", "preempted"]

SHOWN = 2_000
"""Characters of an error."""

_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b.*", re.MULTILINE)


@attrs.frozen
class Outcome:
    """How a run ended.

    Attributes:
        state: "stopped" on request; "preempted" if it was killed or got SIGTERM before its end.
        step: Its last reported step; None if it did not begin.
        error: The error message.
    """

    state: OutcomeState
    step: int | None = None
    error: str | None = None


def is_alive(run: Path) -> bool:
    """Whether a process writes the run, here or on another machine with a recent heartbeat."""
    try:
        return RunDirectory(run).liveness() in ("running", "silent")
    except RunError:
        return False


def attempts_of(run: Path) -> int:
    """The number of its attempts."""
    try:
        return len(RunDirectory(run).attempts())
    except RunError:
        return 0


def outcome_from_status(run: Path) -> Outcome | None:
    """The outcome of a run by its `status.json`; None if it never began or is running."""
    try:
        directory = RunDirectory(run)
        status, liveness = directory.status(), directory.liveness()
    except RunError:
        return None
    step = status.get("step")
    if liveness == "finished":
        return Outcome("finished", step)
    if liveness == "failed":
        return Outcome("failed", step, status.get("error"))
    if liveness == "lost":
        return Outcome("preempted", step, "its process ended without a message")
    if liveness == "stopped":
        code = status.get("exit_code") or 0
        return Outcome("preempted", step, f"stopped by signal {code - 128}") if code > 128 else Outcome("stopped", step)
    return None


def outcome_of_job(run: Path, attempts_before: int, exit_code: int | None, output: str) -> Outcome:
    """The outcome of a run whose job has ended.

    Args:
        run: Its directory, which need not exist.
        attempts_before: The number of its attempts before the job.
        exit_code: Of the process, negative for a signal; None where it is unknown.
        output: The output of the process.
    """
    recorded = outcome_from_status(run)
    if recorded is not None and (recorded.state == "finished" or attempts_of(run) > attempts_before):
        return recorded
    step = None if recorded is None else recorded.step
    error = error_in_output(output)
    if exit_code == 0:
        return Outcome("stopped", step, "an earlier run that it starts from was stopped")
    if exit_code is not None and (exit_code < 0 or exit_code > 128):
        number = -exit_code if exit_code < 0 else exit_code - 128
        return Outcome("preempted", step, f"ended by signal {number} before it began")
    if error or exit_code is not None:
        return Outcome("failed", step, error or f"exit code {exit_code}")
    return Outcome("preempted", step, "ended without a message before it began")


def error_in_output(output: str) -> str:
    """The last error in the output of a process, all its lines; empty if there is none."""
    matches = list(_ERROR.finditer(output))
    return output[matches[-1].start() :].strip()[:SHOWN] if matches else ""
