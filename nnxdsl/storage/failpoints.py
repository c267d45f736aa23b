"""Named points of a run at which tests end its process, to see what a kill leaves behind; elsewhere they cost nothing.

`NNXDSL_FAILPOINT=commit-renamed` ends the process, as `kill -9` does, when it comes to that point; `commit-renamed@3`
when it comes there for the third time; `commit-renamed@3:pause` has it stop there (SIGSTOP) until it is sent SIGCONT.
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
    "processes-joined": "several processes have found each other, and none has looked for its devices",
    "run-made": "a new run is whole, under its hidden name",
    "run-renamed": "a new run has its name",
    "lock-taken": "the lock is held, and does not say by whom",
    "lock-recorded": "the lock says who holds it",
    "file-written": "a file that replaces another is on the disk, under its hidden name",
    "file-renamed": "it has the other's name, and the directory is not on the disk",
    "attempt-appended": "a start of the run is written down",
    "event-appended": "an event is written down",
    "metrics-appended": "a step's figures are written",
    "evaluation-appended": "held-out figures are written",
    "sample-appended": "an answer is written",
    "rows-copied": "rows beyond the step of a resume are dropped from a copy",
    "rows-dropped": "the copy has the file's name",
    "status-unwritten": "the status is about to be replaced",
    "status-written": "the status is replaced",
    "save-begun": "the directory of a new step is there, and empty",
    "save-started": "orbax has the arrays, and writes them",
    "save-written": "orbax says that the arrays are written",
    "manifest-digested": "all files are on the disk and digested, and the manifest is not there",
    "manifest-written": "the manifest is there, and the directories are not on the disk",
    "commit-unnamed": "all of the step is on the disk, under its hidden name",
    "commit-replaced": "a damaged step of the same number is out of the way",
    "commit-renamed": "the step has its name, and the directory is not on the disk",
    "commit-durable": "the step is committed, and none is retired yet",
    "trash-unnamed": "a step is about to be retired",
    "trash-renamed": "a retired step has lost its name",
    "trash-durable": "its loss is on the disk, and its files are still there",
    "trash-swept": "its files are gone",
    "save-cleared": "a save has cleared its directory away, and nobody was told of the commit",
}
"""Each point, and what has been done when a process comes to it."""

_TOLD = re.compile(r"(?P<point>[a-z-]+)(@(?P<visit>[1-9]\d*))?(?P<pause>:pause)?")


@attrs.frozen
class _Failpoint:
    point: str
    visit: int
    signal: int
    visits: itertools.count[int] = attrs.Factory(lambda: itertools.count(1))  # its `next` is whole between threads


def reached(point: str) -> None:
    """Says that the process has come to a point.

    Raises:
        RunError: The variable names no point of ours.
    """
    failpoint = _from_environment()
    if failpoint is not None and failpoint.point == point and next(failpoint.visits) == failpoint.visit:
        os.kill(os.getpid(), failpoint.signal)


@functools.cache
def _from_environment() -> _Failpoint | None:
    told = os.environ.get(VARIABLE)
    if not told:
        return None
    match = _TOLD.fullmatch(told)
    if match is None:
        raise RunError(f"{VARIABLE}: expected a point, and perhaps '@3' or ':pause' behind it, got '{told}'")
    if match["point"] not in POINTS:
        raise RunError(f"{VARIABLE}: there is no point '{match['point']}'{suggest(match['point'], POINTS)}")
    return _Failpoint(match["point"], int(match["visit"] or 1), signal.SIGSTOP if match["pause"] else signal.SIGKILL)
