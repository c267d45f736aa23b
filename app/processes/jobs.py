"""Child processes that compute for pages: limited in number and time, cancellable, with cached results.

The app's own process never imports jax, so whatever needs it (a plan, a layout) is a command that prints JSON, such as
`python -m nnxdsl plan FILE --json`.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.errors import RunError
from nnxdsl.storage import process_info

from ..client import CLIENT

JobState = Literal["waiting", "running", "done", "failed", "cancelled"]

PASSED_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY",
    "https_proxy", "http_proxy", "no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS",
    "NNXDSL_PLAN_PLUGINS", "NNXDSL_ALLOW",
)  # fmt: skip
"""Environment variables that child processes inherit; all others are removed."""

REMEMBERED = 200  # maximum number of cached jobs
SHOWN = 4_000  # maximum length of a child's error output, in characters
RESULT_BYTES = 64_000_000

MOST_OF_A_CLIENT = 8  # jobs of one client that may wait or run at the same time


def environment() -> dict[str, str]:
    """Environment of child processes, which find the modules that the app finds."""
    variables = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return {**variables, "PYTHONPATH": process_info.import_path()}


@attrs.define
class Task:
    """What a child process computes."""

    key: str  # equal keys mean the same work
    state: JobState = attrs.field(default="waiting", kw_only=True)
    result: Any = attrs.field(default=None, kw_only=True)  # parsed JSON; None until it is done, or if there is none
    error: str = attrs.field(default="", kw_only=True)  # for users
    began: float = attrs.field(factory=time.monotonic, kw_only=True)  # monotonic
    ended: float | None = attrs.field(default=None, kw_only=True)  # monotonic

    @property
    def seconds(self) -> float:
        """Elapsed time in seconds."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")


@attrs.define
class Job(Task):
    """A child process and its result."""

    argv: tuple[str, ...]
    client: str = ""
    child: subprocess.Popen[bytes] | None = None


class Jobs:
    """Runs at most `width` child processes at a time, in order of request, and takes `most` of each client."""

    def __init__(self, cwd: Path, limit_seconds: float, width: int = 1, most: int | None = MOST_OF_A_CLIENT) -> None:
        self._cwd, self._limit, self._most = cwd, limit_seconds, most
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(width)

    def start(self, key: str, argv: Sequence[str]) -> Job:
        """Returns the job of a key, which covers all that its result depends on; raises if the client has too many.

        It is started as `python ARGV` if there is none, or if it failed or was cancelled.
        """
        client = CLIENT.get()
        with self._lock:
            job = self._jobs.get(key)
            if job is not None and job.state not in ("failed", "cancelled"):
                self._jobs.move_to_end(key)
                return job
            pending = sum(one.client == client and not one.is_over for one in self._jobs.values())
            if self._most is not None and pending >= self._most:
                raise RunError(f"{pending} computations of yours wait or run, the most at a time; wait for one to end")
            job = self._jobs[key] = Job(key, (sys.executable, *argv), client)
            over = [name for name, one in self._jobs.items() if one.is_over]
            for name in over[: max(0, len(self._jobs) - REMEMBERED)]:
                del self._jobs[name]
        threading.Thread(target=self._run, args=(job,), name="job", daemon=True).start()
        return job

    def get(self, key: str) -> Job | None:
        """Returns the job of this key, or None."""
        return self._jobs.get(key)

    def cancel(self, key: str) -> None:
        """Cancels a job and kills its process group."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_over:
                return
            job.state, job.ended = "cancelled", time.monotonic()
            kill_group(job.child)

    def close(self) -> None:
        """Cancels all jobs."""
        for key in list(self._jobs):
            self.cancel(key)

    def _run(self, job: Job) -> None:
        def begun(child: subprocess.Popen[bytes]) -> None:
            with self._lock:
                job.child = child
                if job.state == "cancelled":
                    kill_group(child)
                else:
                    job.state = "running"

        with self._slots:
            if job.state != "waiting":
                return
            try:
                code, printed, errors = run(job.argv, self._cwd, environment(), self._limit, begun)
            except OSError as error:
                job.state, job.error, job.ended = "failed", str(error), time.monotonic()
                return
        with self._lock:
            if job.state == "cancelled":
                return
            job.ended = time.monotonic()
            if code is None:
                job.error = f"timed out after {self._limit:.0f} s"
            elif code and not (code == REFUSED and printed):  # what is refused may be told in JSON
                job.error = errors or f"ended with exit code {code} without any error output"
            else:
                try:
                    job.result = json.loads(printed)
                except ValueError:
                    job.error = f"did not print JSON: {printed[:200]!r} {errors}"
            job.state = "failed" if job.error else "done"


def run(
    argv: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    seconds: float,
    begun: Callable[[subprocess.Popen[bytes]], object],
    stdin: bytes = b"",
) -> tuple[int | None, str, str]:
    """Runs a command in a process group of its own, and kills that after a time; raises `OSError` if it cannot start.

    Returns:
        Its exit code, or None if it was killed for its time; its output; its last errors, with secrets redacted.
    """
    with tempfile.TemporaryFile() as inputs, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        inputs.write(stdin)
        inputs.seek(0)
        child = subprocess.Popen(
            argv, cwd=cwd, env=variables, stdin=inputs, stdout=out, stderr=err, start_new_session=True
        )
        begun(child)
        code: int | None = None
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_group(child)
        texts = []
        for file, limit in ((out, RESULT_BYTES), (err, 1_000_000)):
            file.seek(0)
            texts.append(file.read(limit).decode("utf-8", errors="replace"))
        return code, texts[0], process_info.redact(texts[1])[-SHOWN:].strip()


def kill_group(child: subprocess.Popen[bytes] | None) -> None:
    """Kills a child's process group, if the child is running."""
    if child is not None and child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
