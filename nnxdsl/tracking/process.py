"""The process that writes a run's metrics to its trackers: `python -m nnxdsl.tracking.process RUN_DIRECTORY ATTEMPT`.

A trainer starts it (`handle.py`). It reads `metrics.jsonl`, each tracker in a thread of its own. Its standard output
tells the trainer, one JSON object a line, that a tracker is open, or why it has stopped. It ends when standard input
does, after a last line that says how the run ended; there is none if the trainer was killed. What the trackers'
packages print goes to standard error, which is `tracking/output.txt`. With `--check` in place of its arguments it only
imports third parties' trackers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, cast

import attrs

from nnxdsl.config.core.serialization import from_dict
from nnxdsl.config.recording.tracking import Tracking
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage.file_mutex import file_lock
from nnxdsl.storage.jsonl import read_json, write_json
from nnxdsl.tracking.base import End, TrackedRun, open_tracker, require_registered
from nnxdsl.tracking.feed import START, Feed, Position
from nnxdsl.tracking.handle import CHECK, FILES

NICENESS = 10
POLL_SECONDS = 0.5
PARENT_SECONDS = 1.0
"""Time between two looks whether the trainer is there."""
DRAIN_SECONDS = 300.0
"""Time after the end of the run within which the trackers take what is left."""

MAX_REASON = 500
"""Characters of a warning."""


class EndOfRun:
    """Waits for the end of the run in a thread.

    Attributes:
        how: How the run ended; "killed" until it says otherwise.
        deadline: Time of the monotonic clock at which this process gives up; infinite while the run goes on.
    """

    def __init__(self) -> None:
        """Starts to wait."""
        self.state: End = "killed"
        self.deadline = float("inf")
        self._over = threading.Event()
        threading.Thread(target=self._wait, args=(os.getppid(),), daemon=True).start()

    def _wait(self, trainer: int) -> None:
        # A process that the trainer has forked may hold the other end of the pipe when the trainer is gone.
        while not select.select([0], [], [], PARENT_SECONDS)[0] and os.getppid() == trainer:
            pass
        line = os.read(0, 64).decode().strip() if select.select([0], [], [], 0)[0] else ""
        if line in ("finished", "stopped", "failed"):
            self.state = cast(End, line)
        self.deadline = time.monotonic() + DRAIN_SECONDS
        self._over.set()

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the run, at most so long; whether it has ended."""
        return self._over.wait(seconds)

    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline


@attrs.define
class Record:
    """What is stored of one tracker between attempts: `tracking/<type>-<digest of its settings>.json`.

    Attributes:
        path: The file.
        position: The last row that the tracker has.
        saved: What the tracker itself stores.
    """

    path: Path
    position: Position = START
    saved: dict[str, str] = attrs.field(factory=dict)

    @classmethod
    def read(cls, directory: Path, node: dict[str, Any]) -> Record:
        """The record of a tracker's settings, as JSON; a new one where there is none, or where it is damaged."""
        digest = hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()[:8]
        path = directory / f"{str(node.get('type')).rpartition(':')[2]}-{digest}.json"
        try:
            stored = read_json(path)
            step, is_training = stored["position"]
            return cls(path, Position(int(step), bool(is_training)), dict(stored["saved"]))
        except (RunError, LookupError, TypeError, ValueError):
            return cls(path)

    def write(self) -> None:
        """Replaces the file.

        Raises:
            RunError: It cannot be written.
        """
        write_json(self.path, {"position": list(self.position), "saved": self.saved})


@attrs.define
class Work:
    """One tracker of a run, in a thread of its own.

    Attributes:
        path: Of its settings in the experiment, for messages.
        node: Its settings, as JSON.
        directory: Of the run.
        experiment: As JSON.
        end: The end of the run.
        messages: Descriptor that the trainer reads.
    """

    path: str
    node: dict[str, Any]
    directory: Path
    experiment: dict[str, Any]
    end: EndOfRun
    messages: int
    _thread: threading.Thread = attrs.field(init=False)
    _inode: int = attrs.field(init=False)

    def start(self) -> None:
        """Starts the thread."""
        self._inode = self.directory.stat().st_ino
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the tracker has not ended."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Waits until the tracker has ended, or its time is up."""
        self._thread.join(max(0.0, self.end.deadline - time.monotonic()))
        if self.is_alive():
            self.warn(f"it has not taken everything within {DRAIN_SECONDS:.0f} s")

    def warn(self, why: str) -> None:
        """Tells the trainer that this tracker has ended."""
        why = " ".join(why.split())[:MAX_REASON].rstrip(".")
        print(f"{self.path}: {why}", file=sys.stderr, flush=True)
        self._tell(why)

    def _tell(self, error: str | None) -> None:
        """Tells the trainer, which may be gone, that the tracker is open, or with which error it has ended."""
        message = {"path": self.path, "type": self.node.get("type"), "error": error}
        with contextlib.suppress(OSError):
            os.write(self.messages, f"{json.dumps(message)}\n".encode())

    def _run(self) -> None:
        """Writes all rows until the run ends. Whatever a tracker raises, SystemExit too, ends this thread alone."""
        try:
            self._track()
        except BaseException as error:
            traceback.print_exc()
            self.warn(f"{type(error).__name__}: {error}")

    def _track(self) -> None:
        files = self.directory / FILES
        record = Record.read(files, self.node)
        run = TrackedRun(self.directory.name, files, self.experiment, record.position.step + 1, record.saved)
        tracker = open_tracker(from_dict(self.node, Tracking), run)
        self._tell(None)
        self._store(record)
        feed = Feed(self.directory / "metrics.jsonl", record.position)
        while True:
            is_over = self.end.wait(0)  # before reading, so that the last rows are read
            rows = feed.read()
            if rows:
                for step, metrics in rows:
                    tracker.log(step, metrics)
                tracker.flush()
                record.position = feed.position
                self._store(record)
            elif rows is None and is_over:
                break
            elif rows is None:
                self.end.wait(POLL_SECONDS)
        tracker.finish(self.end.state)

    def _store(self, record: Record) -> None:
        """Writes the record, unless another run has taken the directory's place (`--restart`)."""
        if self.directory.stat().st_ino != self._inode:
            raise RunError(f"{self.directory} is the directory of another run by now")
        record.write()


def main(path: str, attempt: int) -> None:
    """Writes the metrics of a run to its trackers until it ends.

    Args:
        path: The run directory.
        attempt: The number of the attempt whose trackers they are.
    """
    os.nice(NICENESS)
    end = EndOfRun()
    messages = os.dup(1)  # not inherited by processes of the trackers
    os.dup2(2, 1)
    directory = RunDirectory(Path(path).resolve())
    with file_lock(directory.path / FILES / "lock", lambda: None, end.is_late):  # of an earlier attempt's process
        attempts = directory.attempts()
        if len(attempts) > attempt:
            return  # the process of the next attempt came first, and has written everything
        experiment = attempts[-1]["experiment"]
        works = [
            Work(f"tracking.{index}", node, directory.path, experiment, end, messages)
            for index, node in enumerate(experiment["tracking"])
        ]
        for work in works:
            work.start()
        while any(work.is_alive() for work in works) and not end.wait(POLL_SECONDS):
            pass
        for work in works:
            work.join()
        if any(work.is_alive() for work in works):
            os._exit(0)  # at a usual exit their packages may wait for their own threads


def check() -> None:
    """Reads settings of trackers, as JSON, from standard input; writes why each cannot be opened here, or null."""
    output = os.dup(1)
    os.dup2(2, 1)
    reasons: list[str | None] = []
    for node in json.load(sys.stdin):
        try:
            require_registered(type(from_dict(node, Tracking)))
            reasons.append(None)
        except Exception as error:  # of any module that is imported
            reasons.append(str(error) if isinstance(error, NnxdslError) else f"{type(error).__name__}: {error}")
    os.write(output, json.dumps(reasons).encode())


if __name__ == "__main__":
    if sys.argv[1:] == [CHECK]:
        check()
    else:
        main(sys.argv[1], int(sys.argv[2]))
