"""What became of a run that was started: by its directory, and where that says nothing by how its process ended."""

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
        became: "stopped" on request, "preempted" where it was killed or told to go and has not come to its end.
        step: The last step that it told of; None if it did not begin.
        error: Why, in words.
    """

    became: Became
    step: int | None = None
    error: str | None = None


def is_alive(run: Path) -> bool:
    """Whether a process writes the run, here or on a machine from which it was heard of lately."""
    try:
        return RunDirectory(run).liveness() in ("running", "silent")
    except RunError:
        return False


def attempts_of(run: Path) -> int:
    """How often it was begun."""
    try:
        return len(RunDirectory(run).attempts())
    except RunError:
        return 0


def standing(run: Path) -> Ended | None:
    """How a run that is not at work ended, by its own word; None where it never began or is at work."""
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
        return Ended("preempted", step, "its process ended without a word")
    if liveness == "stopped":
        code = status.get("exit_code") or 0
        return Ended("preempted", step, f"stopped by signal {code - 128}") if code > 128 else Ended("stopped", step)
    return None


def ended(run: Path, attempts_before: int, exit_code: int | None, printed: str) -> Ended:
    """What became of a run whose job has ended.

    Args:
        run: Its directory, which need not be there.
        attempts_before: How often it had been begun before the job.
        exit_code: Of the process, negative for a signal; None where nobody saw it.
        printed: What the process printed.
    """
    said = standing(run)
    if said is not None and (said.became == "finished" or attempts_of(run) > attempts_before):
        return said
    step = None if said is None else said.step
    complaint = complaint_in(printed)
    if exit_code == 0:
        return Ended("stopped", step, "an earlier run that it starts from was stopped")
    if exit_code is not None and (exit_code < 0 or exit_code > 128):
        number = -exit_code if exit_code < 0 else exit_code - 128
        return Ended("preempted", step, f"ended by signal {number} before it began")
    if complaint or exit_code is not None:
        return Ended("failed", step, complaint or f"exit code {exit_code}")
    return Ended("preempted", step, "ended without a word before it began")


def complaint_in(printed: str) -> str:
    """The error at the end of what a process printed, all its lines; empty where there is none."""
    found = list(_ERROR.finditer(printed))
    return printed[found[-1].start() :].strip()[:SHOWN] if found else ""
