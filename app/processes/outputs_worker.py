"""Manages the child process that loads two models and serves one request at a time; caches its results on disk.

An app has one child: for another checkpoint the old one is ended first, so that only one pair of models is in memory.
It reads requests from its standard input, so it ends when the app does, even if the app is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.core.serialization import from_dict
from nnxdsl.config.data import HUB, Data, FileData
from nnxdsl.data.sources.paths import files_of
from nnxdsl.errors import DataError, RunError, SpecError
from nnxdsl.runs.code_digest import code_digest
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import read_json, replace

from ..formatting import whole
from ..settings import Settings
from ..store.run_paths import run_path
from .jobs import SHOWN, Task, environment, kill_group
from .launch import tail

COMMAND = ("-m", "nnxdsl.generate.worker")

MAX_ANSWERS = 400  # maximum number of cached results on disk; the oldest are deleted first
REMEMBERED = 100  # maximum number of requests whose state is kept in memory


@attrs.frozen
class Model:
    """A run's policy at a step (0: the initial one), and the other model: "reference", another step, or `RUN@STEP`."""

    run: str
    step: int
    against: str = "reference"


@attrs.define
class Request(Task):
    """A request, by a key of everything that the result depends on."""

    model: Model
    request: dict[str, Any]  # what is sent to the child
    stage: str = ""  # current activity of the child
    partial: dict[str, Any] = attrs.Factory(dict)  # by side: "texts", "tokens" and "done" of each answer so far

    @property
    def so_far(self) -> dict[str, Any]:
        """What is sampled so far of a request that is running."""
        return {} if self.is_over or self.result else self.partial


class Answers:
    """Runs requests to models one at a time, in order."""

    def __init__(self, settings: Settings, argv: Sequence[str] = COMMAND) -> None:
        """Creates an empty queue; run directory, step and the other side are appended to the arguments of `python`."""
        self._settings, self._argv, self.place = settings, tuple(argv), settings.app_directory / "outputs"
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._child: subprocess.Popen[bytes] | None = None
        self._loaded: Model | None = None
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def key(self, model: Model, request: dict[str, Any]) -> str:
        """Returns the key of a request: checkpoint, held-out file, request, versions and code; raises without a run."""
        other, _, number = model.against.rpartition("@")
        steps = {(model.run, model.step), (other or model.run, whole(number) or 0)}
        runs = {name: run_path(self._settings.home, name) for name, _ in steps}
        files = {path / name for path in runs.values() for name in ("run.json", "experiment.json")}
        files |= {runs[name] / f"checkpoints/{step:08d}/manifest.json" for name, step in steps if step}
        depends = {
            "model": attrs.asdict(model),
            "files": [_digest(file) for file in sorted(files)],
            "held out": None if (held_out := self.held_out(model.run)) is None else _stamps(held_out[0]),
            "request": request,
            "versions": _versions(),
            "code": code_digest(),
        }
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]

    def held_out(self, run: str) -> tuple[FileData, str] | None:
        """A run's held-out data, and what names of its rows lack; None if it has none that this process can read.

        Relative paths, which the run has from the directory in which it was started, are made absolute.
        """
        place = run_path(self._settings.home, run)
        tree = read_json(place / "experiment.json")
        data = (tree.get("evaluation") or {}).get("data") if isinstance(tree, dict) else None
        try:
            spec = from_dict(data, Data) if isinstance(data, dict) else None
        except SpecError:
            return None
        if not isinstance(spec, FileData):
            return None
        started = None
        with contextlib.suppress(RunError):  # a damaged file
            started = RunDirectory(place).working_directory()
        prefix = f"{(started or self._settings.project).absolute()}/"
        is_whole = [path.startswith((HUB, "~")) or Path(path).is_absolute() for path in spec.paths]
        paths = tuple(f"{'' if whole else prefix}{path}" for path, whole in zip(spec.paths, is_whole, strict=True))
        data = attrs.evolve(spec, path=paths[0] if isinstance(spec.path, str) else paths)
        return data, "" if all(is_whole) else prefix

    def find(self, key: str) -> Request | None:
        """Returns a request in progress or a cached result; None if there is neither."""
        with self._lock:
            if key in self._requests:
                return self._requests[key]
        if not key.isalnum():
            return None
        try:
            stored = read_json(self.place / f"{key}.json")
            request = Request(key, Model(**stored["model"]), stored["request"], state="done", result=stored["result"])
        except (RunError, KeyError, TypeError):
            return None
        request.ended = request.began + float(stored.get("seconds", 0.0))
        with self._lock:
            return self._remember(request)

    def ask(self, model: Model, request: dict[str, Any]) -> Request:
        """Returns the existing request; submits it if there is none, or if it failed or was cancelled."""
        key = self.key(model, request)
        stored = self.find(key)
        if stored is not None and stored.state not in ("failed", "cancelled"):
            return stored
        with self._lock:
            queued = self._requests[key] = Request(key, model, request)
            self._remember(queued)
        threading.Thread(target=self._run, args=(queued,), name="outputs", daemon=True).start()
        return queued

    def cancel(self, key: str) -> None:
        """Cancels a request; if it is running, its child process is ended."""
        with self._lock:
            request = self._requests.get(key)
            if request is None or request.is_over:
                return
            child = self._child if request.state == "running" else None
            request.state, request.ended = "cancelled", time.monotonic()
        kill_group(child)

    def close(self) -> None:
        """Ends the child and cancels all requests."""
        for key in list(self._requests):
            self.cancel(key)
        with self._turn:  # wait until the thread that reads its responses has finished
            self._end()

    def _remember(self, request: Request) -> Request:
        self._requests[request.key] = request
        self._requests.move_to_end(request.key)
        over = [key for key, one in self._requests.items() if one.is_over]
        for key in over[: max(0, len(self._requests) - REMEMBERED)]:
            del self._requests[key]
        return request

    def _run(self, request: Request) -> None:
        with self._turn:
            with self._lock:
                if request.state != "waiting":
                    return
                request.state, request.stage, request.began = "running", "starting", time.monotonic()
            try:
                reply = self._reply(request)
            except Exception as error:  # a thread has no caller that would handle it
                reply = {"error": f"{type(error).__name__}: {error}"}
            result = reply.get("result")
            if isinstance(result, dict):
                self._keep(request, result)
            with self._lock:
                if request.state != "cancelled":
                    request.ended = time.monotonic()
                    request.result = result if isinstance(result, dict) else None
                    request.error = "" if request.result else str(reply.get("error", "no answer"))
                    request.state = "failed" if request.error else "done"

    def _reply(self, request: Request) -> dict[str, Any]:
        """The last message of the child on a request; the next request starts a new child if this one ended."""
        with self._lock:
            if request.state == "cancelled":
                return {}
            child = self._child_for(request.model)
        limit = self._settings.limits.job_seconds
        late = threading.Timer(limit, kill_group, [child])
        late.start()
        try:
            reply = _converse(child, request)
        finally:
            late.cancel()
        if reply is not None:
            return reply
        took = time.monotonic() - request.began
        kill_group(child)
        error = tail(Path(self._complaints.name), 1_000_000)[-SHOWN:].strip()
        error = error or f"ended with exit code {child.returncode} without any error output"
        self._end()
        return {"error": f"timed out after {limit:.0f} s" if took >= limit else error}

    def _child_for(self, model: Model) -> subprocess.Popen[bytes]:
        """Returns the child that has loaded these models; the caller holds the lock."""
        child = self._child
        if child is not None and self._loaded == model and child.poll() is None:
            return child
        self._end()
        argv = [*self._argv, str(run_path(self._settings.home, model.run).absolute()), "--step", str(model.step)]
        # A run may be using the same device: do not preallocate memory.
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment()}
        self._complaints = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it lives as long as the child
        self._loaded = model
        self._child = subprocess.Popen(
            [sys.executable, *argv, "--against", model.against],
            cwd=self._settings.project,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            start_new_session=True,
        )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            kill_group(child)
            with contextlib.suppress(OSError), self._complaints, child:  # a request that it never read
                pass

    def _keep(self, request: Request, result: dict[str, Any]) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        record = {
            "model": attrs.asdict(request.model),
            "request": request.request,
            "result": result,
            "seconds": request.seconds,
            "time": process_info.utc(),
        }
        with contextlib.suppress(RunError):  # a full disk loses the cache entry, not the result
            replace(self.place / f"{request.key}.json", json.dumps(record).encode())
        files = sorted(self.place.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - MAX_ANSWERS)]:
            path.unlink(missing_ok=True)


def _converse(child: subprocess.Popen[bytes], request: Request) -> dict[str, Any] | None:
    """Sends a request and reads until its response; None if the child ended before."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps({**request.request, "id": request.key}).encode() + b"\n")
        child.stdin.flush()
    except OSError:
        return None
    for line in child.stdout:
        try:
            reply = json.loads(line)
        except ValueError:
            continue
        if isinstance(reply, dict) and reply.get("id") == request.key:
            if "stage" not in reply:
                return reply
            request.stage, request.partial = str(reply["stage"])[:200], reply.get("partial") or request.partial
    return None


def _stamps(data: FileData) -> list[list[int]] | None:
    """Time and size of each file; None for a dataset of the Hub, or if a file is missing."""
    try:
        stats = [file.path.stat() for file in files_of(data.paths, data.split)]
    except (OSError, DataError):
        return None
    return [[stat.st_mtime_ns, stat.st_size] for stat in stats]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"{path.name}: the run has no such file; choose another checkpoint") from error


@cache
def _versions() -> dict[str, str]:
    return process_info.installed_versions(("jax", "jaxlib", "flax", "qwix", "numpy"))
