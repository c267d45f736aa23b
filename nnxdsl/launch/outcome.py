"""How a started run ended: by its directory, else by its process's exit code and output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

Became = Literal["finished", "stopped", "failed", "preempted"]

SHOWN = 2_000
"""Characters of an error."""

_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b.*", re.MULTILINE)


@attrs.frozen
class Ended:
    """How a run ended.

    Attributes:
        became: "stopped" on request; "preempted" where it was killed or got SIGTERM before its end.
        step: Its last reported step; None if it did not begin.
        error: The error message.
    """

    became: Became
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


def standing(run: Path) -> Ended | None:
    """How a run ended by its own status; None where it never began or is running."""
    try:
        directory = RunDirectory(run)
        status, liveness = directory.status(), directory.liveness()
    except RunError:
        return None
    step = status.get("step")
    if liveness == "finished":
        return Ended("finished", step)
    if liveness == "failed":
        return Ended("failed", step, status.get("error"))
    if liveness == "lost":
        return Ended("preempted", step, "its process ended without a message")
    if liveness == "stopped":
        code = status.get("exit_code") or 0
        return Ended("preempted", step, f"stopped by signal {code - 128}") if code > 128 else Ended("stopped", step)
    return None


def ended(run: Path, attempts_before: int, exit_code: int | None, printed: str) -> Ended:
    """How a run whose job has ended has ended itself.

    Args:
        run: Its directory, which need not be there.
        attempts_before: The number of its attempts before the job.
        exit_code: Of the process, negative for a signal; None where it is unknown.
        printed: What the process printed.
    """
    by_status = standing(run)
    if by_status is not None and (by_status.became == "finished" or attempts_of(run) > attempts_before):
        return by_status
    step = None if by_status is None else by_status.step
    complaint = complaint_in(printed)
    if exit_code == 0:
        return Ended("stopped", step, "an earlier run that it starts from was stopped")
    if exit_code is not None and (exit_code < 0 or exit_code > 128):
        number = -exit_code if exit_code < 0 else exit_code - 128
        return Ended("preempted", step, f"ended by signal {number} before it began")
    if complaint or exit_code is not None:
        return Ended("failed", step, complaint or f"exit code {exit_code}")
    return Ended("preempted", step, "ended without a message before it began")


def complaint_in(printed: str) -> str:
    """The error at the end of what a process printed, all its lines; empty where there is none."""
    found = list(_ERROR.finditer(printed))
    return printed[found[-1].start() :].strip()[:SHOWN] if found else ""
