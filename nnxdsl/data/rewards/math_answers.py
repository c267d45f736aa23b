"""Comparison of answers in mathematics by math-verify, in a process that a hanging answer ends; see `math_worker`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from nnxdsl.errors import RunError

WORKER = Path(__file__).with_name("math_worker.py")


class Compared(NamedTuple):
    """A completion's answer beside the right one.

    Attributes:
        is_equal: Whether they are equal; None if the right one is no mathematics.
        gold: The right answer as it was read.
        answer: The completion's as it was read; empty if it has none, or took too long.
    """

    is_equal: bool | None
    gold: str
    answer: str


def is_installed() -> bool:
    """Whether math-verify is there."""
    return importlib.util.find_spec("math_verify") is not None


@functools.lru_cache(1024)  # by several rewards
def compared(completion: str, answer: str, seconds: float) -> Compared:
    """Compares the answer in a completion with the right one.

    Args:
        completion: Text with an answer in LaTeX.
        answer: The right one.
        seconds: After so long, they are not equal.

    Raises:
        RunError: The process that compares cannot be run.
    """
    return _worker().compared(completion, answer, seconds)


class _Worker:
    """The process, started for the first answer and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compared(self, completion: str, answer: str, seconds: float) -> Compared:
        with self._lock:
            if self._process is None:
                self._process = _started()
            reply = _reply(self._process, completion, answer, seconds)
            if reply:
                return Compared(*json.loads(reply))
            code, self._process = _ended(self._process), None
        if code not in (-signal.SIGALRM, -signal.SIGKILL):  # the latter where memory ran out
            raise RunError(f"the process that compares answers has ended with {code}")
        return Compared(False, "", "")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            _ended(self._process)


def _started() -> subprocess.Popen[str]:
    """A process that has compared its first answer, so that loading sympy is in nobody's time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", str(WORKER)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, encoding="utf-8"
    )
    if not _reply(process, r"\boxed{1}", "1", 600.0):
        raise RunError(
            f"the process that compares answers cannot be run: {' '.join(command)} ended with {_ended(process)}"
        )
    return process


def _reply(process: subprocess.Popen[str], completion: str, answer: str, seconds: float) -> str:
    """The reply of the process; empty if it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([completion, answer, seconds]) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def _ended(process: subprocess.Popen[str]) -> int:
    """The exit code of a process that ends."""
    with contextlib.suppress(BrokenPipeError), process:  # what it has not read is lost
        pass
    return process.wait()


@functools.cache
def _worker() -> _Worker:
    worker = _Worker()
    atexit.register(worker.close)
    return worker
