"""Named failpoints at which tests kill a process, to check what a crash leaves on disk; inactive otherwise.

`NNXDSL_FAILPOINT=commit-renamed` kills the process with SIGKILL when it reaches that point; `commit-renamed@3` when it
reaches it for the third time; `commit-renamed@3:pause` stops it there (SIGSTOP) until it is sent SIGCONT.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal

import attrs

from nnxdsl.errors import RunError, suggest

VARIABLE = "NNXDSL_FAILPOINT"

POINTS = {
    "processes-joined": "the processes have joined `jax.distributed`; none has initialized its devices",
    "run-made": "a new run directory is complete, under its temporary name",
    "run-renamed": "a new run directory has been renamed to its final name",
    "lock-taken": "the lock is acquired; the record of its holder is not written",
    "lock-recorded": "the record of the lock's holder is written",
    "file-written": "the new version of a file is synced, under its temporary name",
    "file-renamed": "the new version is renamed to the file; the directory is not synced",
    "attempt-appended": "the row of an attempt is appended",
    "event-appended": "an event is appended",
    "metrics-appended": "the metrics of a step are appended",
    "evaluation-appended": "the metrics of an evaluation are appended",
    "sample-appended": "a generated sample is appended",
    "rows-copied": "a copy of a file without rows after the resumed step is written",
    "rows-dropped": "the copy has replaced the file",
    "status-unwritten": "status.json is about to be replaced",
    "status-written": "status.json is replaced",
    "save-begun": "the temporary directory of a new step exists and is empty",
    "save-started": "orbax has started to write the arrays",
    "save-written": "orbax has written the arrays",
    "manifest-digested": "all files are synced and their digests computed; there is no manifest",
    "manifest-written": "the manifest is written; the directories are not synced",
    "commit-unnamed": "the whole step is synced, under its temporary name",
    "commit-replaced": "a damaged step of the same number is deleted",
    "commit-renamed": "the step is renamed to its final name; the directory is not synced",
    "commit-durable": "the step is committed; no older step is deleted yet",
    "trash-unnamed": "an older step is about to be deleted",
    "trash-renamed": "the older step is renamed into the trash",
    "trash-durable": "the rename is synced; its files still exist",
    "trash-swept": "its files are deleted",
    "save-cleared": "the temporary directory of a save is deleted; `wait` and `poll` do not return its step yet",
}
"""Each failpoint, and the state of the disk when a process reaches it."""

_SETTING = re.compile(r"(?P<point>[a-z-]+)(@(?P<visit>[1-9]\d*))?(?P<pause>:pause)?")


@attrs.frozen
class _Failpoint:
    point: str
    visit: int
    signal: int
    visits: itertools.count[int] = attrs.Factory(lambda: itertools.count(1))  # its `next` is atomic between threads


def hit_failpoint(point: str) -> None:
    """Marks a failpoint: kills or pauses the process here if the environment variable selects it.

    Raises:
        RunError: The variable does not name a failpoint.
    """
    failpoint = _from_environment()
    if failpoint is not None and failpoint.point == point and next(failpoint.visits) == failpoint.visit:
        os.kill(os.getpid(), failpoint.signal)


@functools.cache
def _from_environment() -> _Failpoint | None:
    setting = os.environ.get(VARIABLE)
    if not setting:
        return None
    match = _SETTING.fullmatch(setting)
    if match is None:
        raise RunError(f"{VARIABLE}: expected a failpoint, optionally followed by '@3' or ':pause', got '{setting}'")
    if match["point"] not in POINTS:
        raise RunError(f"{VARIABLE}: there is no failpoint '{match['point']}'{suggest(match['point'], POINTS)}")
    return _Failpoint(match["point"], int(match["visit"] or 1), signal.SIGSTOP if match["pause"] else signal.SIGKILL)
