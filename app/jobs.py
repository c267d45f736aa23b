"""Child processes that compute what a page shows: bounded, cancelled on request, their results kept; knows no page.

The app's own process never imports jax, so whatever needs it (a plan, a layout, answers of a model) is a command whose
standard output is JSON: `python -m nnxdsl plan FILE --json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import attrs

from nnxdsl.storage import process_info

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]

PASSED_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY",
    "https_proxy", "http_proxy", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS",
    "NNXDSL_PLAN_PLUGINS", "NNXDSL_ALLOW",
)  # fmt: skip
"""Variables that children get; whatever else the app's environment holds stays with the app."""

REMEMBERED = 200
"""Jobs whose results are kept."""

SHOWN = 4_000
"""Characters of what a child complained of."""

RESULT_BYTES = 64_000_000


def environment() -> dict[str, str]:
    """What children inherit."""
    return {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}


@attrs.define
class Job:
    """One child process and what became of it.

    Attributes:
        key: What is computed; equal keys are the same work.
        argv: The command.
        state: How it stands.
        result: What it printed, as JSON; None before it is done, or where it printed none.
        error: What it complained of, for people; empty if it did not.
        began: Monotonic time.
        seconds: How long it took, or has taken so far.
    """

    key: str
    argv: tuple[str, ...]
    state: JobState = "waiting"
    result: Any = None
    error: str = ""
    began: float = attrs.Factory(time.monotonic)
    ended: float | None = None
    child: subprocess.Popen[bytes] | None = None

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in ("done", "failed", "cancelled")


class Jobs:
    """At most `width` children at a time, in the order in which they were asked for."""

    def __init__(self, cwd: Path, limit_seconds: float, width: int = 1) -> None:
        """Starts nothing."""
        self._cwd, self._limit = cwd, limit_seconds
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(width)

    def start(self, key: str, words: Sequence[str], *, input_text: str = "") -> Job:
        """The job of this key: the one that there is, unless it failed or was cancelled; else a new one.

        Args:
            key: All that its result depends on.
            words: What comes after `python`, for example `("-m", "nnxdsl", "plan", file, "--json")`.
            input_text: What it reads from its standard input.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state not in ("failed", "cancelled"):
                self._jobs.move_to_end(key)
                return job
            job = self._jobs[key] = Job(key, (sys.executable, *words))
            over = [name for name, one in self._jobs.items() if one.is_over]
            for name in over[: max(0, len(self._jobs) - REMEMBERED)]:
                del self._jobs[name]
        threading.Thread(target=self._run, args=(job, input_text), name="job", daemon=True).start()
        return job

    def get(self, key: str) -> Job | None:
        """The job of this key, if it was asked for."""
        return self._jobs.get(key)

    def cancel(self, key: str) -> None:
        """Ends a job; its whole process group."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_over:
                return
            job.state, job.ended = "cancelled", time.monotonic()
            _end(job.child)

    def close(self) -> None:
        """Ends all jobs: nobody would read their results."""
        for key in list(self._jobs):
            self.cancel(key)

    def _run(self, job: Job, input_text: str) -> None:
        with (
            self._slots,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
            tempfile.TemporaryFile() as given,
        ):
            given.write(input_text.encode())
            given.seek(0)
            with self._lock:
                if job.state != "waiting":
                    return
                try:
                    job.child = subprocess.Popen(
                        job.argv,
                        cwd=self._cwd,
                        env=environment(),
                        stdin=given,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                except OSError as error:
                    job.state, job.error, job.ended = "failed", str(error), time.monotonic()
                    return
                job.state = "running"
            try:
                code = job.child.wait(self._limit)
            except subprocess.TimeoutExpired:
                _end(job.child)
                code, late = -signal.SIGKILL, True
            else:
                late = False
            self._note(job, code, late, out, err)

    def _note(self, job: Job, code: int, late: bool, out: IO[bytes], err: IO[bytes]) -> None:
        printed, complained = _text(out, RESULT_BYTES), process_info.redact(_text(err, 1_000_000))[-SHOWN:].strip()
        with self._lock:
            if job.state == "cancelled":
                return
            job.ended = time.monotonic()
            if late:
                job.error = f"took longer than {self._limit:.0f} s and was ended"
            elif code:
                job.error = complained or f"ended with exit code {code} and said nothing"
            else:
                try:
                    job.result = json.loads(printed)
                except ValueError:
                    job.error = f"did not print JSON: {printed[:200]!r} {complained}"
            job.state = "failed" if job.error else "done"


def _text(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode("utf-8", errors="replace")


def _end(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None and child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)


def files_of(paths: Mapping[str, Path]) -> str:
    """A key that changes when any of the files does."""
    found: list[str] = []
    for name, path in paths.items():
        try:
            stat = path.stat()
            found.append(f"{name}:{path}:{stat.st_mtime_ns}:{stat.st_size}")
        except OSError:
            found.append(f"{name}:{path}:-")
    return "|".join(found)
