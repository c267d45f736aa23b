"""What a run's status says, and whether the process that wrote it is still alive."""

from __future__ import annotations

import time
from typing import Any, Literal, TypedDict, cast

from nnxdsl.storage import process_info

State = Literal["queued", "starting", "compiling", "running", "stopping", "stopped", "finished", "failed"]


Liveness = Literal["queued", "running", "silent", "lost", "stopped", "finished", "failed"]


SILENT_SECONDS = 120.0  # without a heartbeat for so long, a run is "silent" ("lost" on another machine)


ENDED = ("stopped", "finished", "failed")


class Status(TypedDict, total=False):
    """What `status.json` says; times in seconds, `heartbeat` as `process.clock` gives it."""

    state: State
    stage: str | None  # what the loop is doing, in words
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


_heard: dict[tuple[process_info.Process, Any], tuple[Any, float, bool]] = {}  # of other machines; see `_is_heard`


def writer_of(status: Status) -> process_info.Process | None:
    """The process that writes the run, or wrote it last; None where the status names none."""
    pid, host = status.get("pid"), status.get("host")
    return None if pid is None or host is None else process_info.Process(pid, status.get("pid_started"), host)


def liveness_of(status: Status) -> Liveness:
    """What is true of a run whose writer last said `status`; see `RunDirectory.liveness`."""
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
    """Whether a writer on another machine has been heard of, whatever the clocks of both machines say.

    A heartbeat that this process has seen to change is timed by this process's own clock, which does not jump; one that
    it sees for the first time can but be compared with the wall clock (`fresh`).
    """
    now, machine = time.monotonic(), (writer, heartbeat.get("boot"))
    beat = heartbeat.get("monotonic")
    last, since, has_changed = _heard.get(machine, (beat, now, False))
    if isinstance(beat, float) and isinstance(last, float) and beat > last:
        since, has_changed = now, True
    _heard[machine] = beat, since, has_changed
    return now - since <= SILENT_SECONDS if has_changed else fresh
