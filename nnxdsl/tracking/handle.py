"""The trainer's side of the tracking process: starts it, reads its messages, ends it; never raises."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nnxdsl.config.core.imports import VARIABLE, names_in
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.recording.tracking import Tracking
from nnxdsl.errors import Problem, RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import open_plain
from nnxdsl.tracking.base import End

FILES = "tracking"
"""Directory of the process and of the trackers, in the run directory."""
OUTPUT = "output.txt"
CHECK = "--check"
OPEN_SECONDS = 60.0
"""Longest time that a new run waits for its trackers to open; they go on to open without it."""
WAIT_SECONDS = 30.0
"""Longest time that a run waits at its end for trackers to take the last rows; they go on without it."""
_POLL_SECONDS = 0.02
_LOST = "the metrics are in metrics.jsonl, and a resume writes them to the trackers"


class TrackingProcess:
    """The process that writes the metrics of a run to its trackers; it ends with this one, however that ends."""

    def __init__(self, directory: Path, tracking: Sequence[Tracking], attempt: int) -> None:
        """Starts the process, which takes some milliseconds.

        Args:
            directory: The run directory.
            tracking: The trackers of the attempt.
            attempt: Its number, under which `attempts.jsonl` has it already.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""
        self._unreported: list[str] = []
        self._unopened = {f"tracking.{index}" for index in range(len(tracking))}
        self._not_opened: list[Problem] = []
        files = directory / FILES
        try:
            files.mkdir(exist_ok=True)
            with open(open_plain(files / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC), "wb") as output:
                self._process = subprocess.Popen(
                    # -P: modules in the working directory are not imported, unless this process may import them.
                    [sys.executable, "-P", "-m", "nnxdsl.tracking.process", str(directory), str(attempt)],
                    env=_environment(tracking),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the run, which then tells the process
                )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
        except (OSError, RunError) as error:
            self._unreported.append(f"tracking: the process that writes metrics cannot be started: {error}; {_LOST}")

    def open_problems(self, seconds: float = OPEN_SECONDS) -> list[Problem]:
        """Waits until each tracker is open or has failed to open, at most so long.

        Returns:
            Why trackers cannot be opened; paths from the experiment.
        """
        limit = time.monotonic() + seconds
        while self._unopened and self._is_heard() and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
            self._read()
        if self._unopened and not self._is_heard():
            return [Problem("", why) for why in self._unreported]
        return self._not_opened

    def warnings(self) -> Iterator[str]:
        """Warnings since the last call: of trackers that stopped, or that the process itself has ended."""
        self._read()
        yield from self._unreported
        self._unreported.clear()

    def _is_heard(self) -> bool:
        """Whether more messages of the process may come."""
        return self._process is not None and self._process.stdout is not None and not self._process.stdout.closed

    def _read(self) -> None:
        """Reads the messages that are there, and whether the process has ended."""
        process = self._process
        if process is None or process.stdout is None or process.stdout.closed:
            return
        code = process.poll()  # before reading, so that the last lines are read
        with contextlib.suppress(OSError):  # nothing there
            while block := os.read(process.stdout.fileno(), 65536):
                self._text += block
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            self._hear(**json.loads(line))
        if code is not None:
            self.close()
            if code:
                ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                self._unreported.append(f"tracking: the process that writes metrics {ending}; {_LOST}")

    def _hear(self, path: str, type: str, error: str | None) -> None:
        """Takes a message: the tracker is open, or it has ended with an error."""
        if error is not None:
            self._unreported.append(f"{path}: {type} has stopped: {error}; the run goes on, and a resume tries again")
            if path in self._unopened:
                self._not_opened.append(Problem(path, f"{type} cannot be opened: {error}"))
        self._unopened.discard(path)

    def end(self, state: End) -> None:
        """Tells the process that the run has ended, and does not wait; only the first call does anything."""
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):  # it has ended already
                os.write(self._process.stdin.fileno(), f"{state}\n".encode())
            self._process.stdin.close()

    def wait(self, seconds: float = WAIT_SECONDS) -> Iterator[str]:
        """Waits after `end` until the process has ended, at most so long; returns the last warnings."""
        limit = time.monotonic() + seconds
        while self._process is not None and self._process.poll() is None and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        yield from self.warnings()
        if self._process is not None and self._process.poll() is None:
            yield f"tracking: trackers still write the last metrics after {seconds:g} s; they go on without the run"
        self.close()

    def close(self) -> None:
        """Hears no more warnings."""
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


def import_problems(tracking: Sequence[Tracking]) -> Iterator[Problem]:
    """Third parties' trackers that the process could not open, as it cannot import them; paths from the experiment.

    They are imported in such a process, as a run's own cannot refuse a run: it starts when the run has begun.
    """
    paths = [f"tracking.{index}" for index, settings in enumerate(tracking) if any(names_in(settings))]
    if not paths:
        return
    nodes = [to_dict(settings) for settings in tracking if any(names_in(settings))]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "nnxdsl.tracking.process", CHECK],
        input=json.dumps(nodes).encode(),
        env=_environment(tracking),
        capture_output=True,
        check=False,
    )
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    reasons = json.loads(done.stdout) if done.returncode == 0 else [f"the tracking process fails: {last}"] * len(paths)
    for path, reason in zip(paths, reasons, strict=True):
        if reason is not None:
            yield Problem(path, f"cannot be imported by the process that writes to trackers: {reason}")


def _environment(tracking: Sequence[Tracking]) -> dict[str, str]:
    """That of this process; the other one finds the same modules, and may import those of third parties' trackers."""
    names = [name for _, name in names_in(tuple(tracking))]
    allowed = ",".join(filter(None, [os.environ.get(VARIABLE), *names]))
    return {**os.environ, "PYTHONPATH": process_info.import_path(), VARIABLE: allowed, "JAX_PLATFORMS": "cpu"}
