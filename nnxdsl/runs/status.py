"""The fields of `status.json`, and the check whether the process that wrote it is still alive."""

from __future__ import annotations

import time
from typing import Any, Literal, TypedDict, cast

from nnxdsl.storage import process_info

State = Literal["queued", "starting", "compiling", "running", "stopping", "stopped", "finished", "failed"]
Liveness = Literal["queued", "running", "silent", "lost", "stopped", "finished", "failed"]

SILENT_SECONDS = 120.0
"""A run whose heartbeat is older is "silent" ("lost" on another machine)."""

ENDED = ("stopped", "finished", "failed")


class Status(TypedDict, total=False):
    """The fields of `status.json`; times in seconds, `heartbeat` from `process_info.clock`."""

    state: State
    stage: str | None  # what the process is doing, for display
    attempt: int | None
    step: int | None
    total: int | None
    eta_seconds: float | None
    checkpoint: int | None  # the newest committed step
    pid: int | None
    pid_started: int | None
    host: str | None
    error: str | None
    exit_code: int | None
    heartbeat: dict[str, Any] | None


# The last heartbeat of each process on another machine, when it changed, and whether it ever did; see `_is_heard`.
_heard: dict[tuple[process_info.Process, Any], tuple[Any, float, bool]] = {}


def writer_of(status: Status) -> process_info.Process | None:
    """The process that writes the run, or wrote it last; None if the status names none."""
    pid, host = status.get("pid"), status.get("host")
    return None if pid is None or host is None else process_info.Process(pid, status.get("pid_started"), host)


def liveness_of(status: Status) -> Liveness:
    """The actual state of a run with this status; see `RunDirectory.liveness`."""
    state = status.get("state", "queued")
    if state in ("queued", *ENDED):
        return cast(Liveness, state)
    writer = writer_of(status)
    if writer is None:
        return "lost"
    heartbeat = status.get("heartbeat") or {}
    fresh = process_info.seconds_since(heartbeat) <= SILENT_SECONDS
    if not writer.is_here():
        return "running" if _is_heard(writer, heartbeat, fresh) else "lost"
    if not writer.is_alive():
        return "lost"
    return "running" if fresh else "silent"


def _is_heard(writer: process_info.Process, heartbeat: dict[str, Any], fresh: bool) -> bool:
    """Whether a writer on another machine still renews its heartbeat, even if the clocks of the machines differ.

    Once this process has seen the heartbeat change, it measures its age with its own monotonic clock; before that, it
    can only compare wall clocks (`fresh`).
    """
    now, machine = time.monotonic(), (writer, heartbeat.get("boot"))
    beat = heartbeat.get("monotonic")
    last, since, has_changed = _heard.get(machine, (beat, now, False))
    if isinstance(beat, float) and isinstance(last, float) and beat > last:
        since, has_changed = now, True
    _heard[machine] = beat, since, has_changed
    return now - since <= SILENT_SECONDS if has_changed else fresh
