"""The runs of a home, one row each, reread only when files have changed. Independent of pages."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any, cast

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status, liveness_of
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines, read_json

from ..formatting import parsed
from .experiments import facts_of, settings_of
from .growing import row_of
from .run_paths import directory_path, run_path

FILES = ("run.json", "status.json", "metrics.jsonl", "checkpoints")  # files that a row depends on
ROWS = 64  # rows of metrics among which the last one of training is: evaluations and damaged rows may follow it
LIVE = ("starting", "compiling", "running", "stopping", "silent")
ENDED = ("finished", "stopped", "failed")  # states of runs that have no heartbeat to wait for


@attrs.frozen(kw_only=True)
class Row:
    """One run in the list of runs."""

    id: str
    path: Path
    state: str  # queued, starting, compiling, running, stopping, silent, stopped, finished, failed, lost or damaged
    status: Status = attrs.Factory(lambda: Status())
    facts: dict[str, str] = attrs.Factory(dict)  # objective, model, mesh and adapter as text
    settings: dict[str, str] = attrs.Factory(dict)  # all of its experiment as text, by path
    metrics: dict[str, Any] = attrs.Factory(dict)  # last row of training, of the attempt that is running if one is
    created: str | None = None  # ISO 8601
    problem: str | None = None  # which file is damaged
    inconsistency: str | None = None  # why it has not finished, if its status wrongly says so
    seconds: float | None = None  # from its first start to its end, or until now
    quiet: float = float("inf")  # seconds since its last heartbeat

    @property
    def is_live(self) -> bool:
        """Whether its process is running."""
        return self.state in LIVE

    @property
    def text(self) -> str:
        """Text that is searched."""
        return " ".join([self.id, self.state, *self.facts.values()]).lower()


class Index:
    """A cache of a home's runs; a refresh costs one `stat` per unchanged file."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._rows: dict[str, tuple[tuple[Any, ...], Row]] = {}
        self._seen: dict[str, float] = {}  # when the directory of each run was last there
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """Returns all runs, newest first."""
        with self._lock:
            try:
                names = [
                    entry.name
                    for entry in os.scandir(self.home)
                    if not entry.name.startswith(".")
                    and entry.is_dir(follow_symlinks=False)
                    and os.path.lexists(f"{entry.path}/run.json")
                ]
            except FileNotFoundError:
                names = []
            for name in set(self._rows) - set(names):
                del self._rows[name]
            rows = [self._row(name) for name in names]
        return sorted(rows, key=lambda row: (row.created or "", row.id), reverse=True)

    def row(self, run: str) -> Row | None:
        """Returns one run; None if there is no run with this id."""
        try:
            path = directory_path(self.home, run)
        except RunError:
            return None
        if not os.path.lexists(path / "run.json"):
            return None
        with self._lock:
            return self._row(run)

    def vanished_since(self, run: str, began: float) -> bool:
        """Whether the directory of a run was there at or after a time, in seconds since the epoch, and is gone."""
        return self._seen.get(run, -1.0) >= began and self.row(run) is None

    def _row(self, name: str) -> Row:
        self._seen[name] = time.time()
        signature = tuple(_stamp(f"{self.home}/{name}/{file}") for file in FILES)
        before = self._rows.get(name)
        if before is None or before[0] != signature:
            old = before[1] if before is not None and before[0][0] == signature[0] else None
            before = self._rows[name] = signature, _read(self.home / name, old)
        cached = before[1]
        if cached.problem is not None:
            return cached
        beat, began = cached.status.get("heartbeat") or {}, parsed(cached.created)
        is_timed = began is not None and isinstance(beat.get("wall"), int | float)
        state, attempt = "lost" if cached.inconsistency else state_of(cached.status), cached.metrics.get("attempt")
        is_earlier = state in LIVE and attempt is not None and attempt != cached.status.get("attempt")
        return attrs.evolve(
            cached,
            state=state,
            metrics={} if is_earlier else cached.metrics,
            seconds=beat["wall"] - began.timestamp() if began is not None and is_timed else None,
            quiet=float("inf") if state in ENDED else process_info.seconds_since(beat),
        )


def state_of(status: Status) -> str:
    """State of a run as one word: the one in its status, if its process and heartbeat confirm it."""
    alive = liveness_of(status)
    return status.get("state", "queued") if alive == "running" else alive


def _read(path: Path, before: Row | None) -> Row:
    """Reads a row as it is whatever the time; facts and settings, which do not change, unless they are known."""
    try:
        run = RunDirectory(run_path(path.parent, path.name))
        created, status, inconsistency = run.created, run.status(), run.inconsistency()
    except RunError as error:
        return Row(id=path.name, path=path, state="damaged", problem=str(error))
    facts, settings = ({}, {}) if before is None else (before.facts, before.settings)
    if not facts:
        with contextlib.suppress(RunError):
            tree = read_json(path / "experiment.json")
            facts, settings = facts_of(tree), settings_of(tree)
    metrics: dict[str, Any] = {}
    with contextlib.suppress(RunError):
        rows = (row_of(line) for _, line in itertools.islice(JsonLines(path / "metrics.jsonl").backwards(), ROWS))
        metrics = next((row for row in rows if row and row.get("kind") != "evaluation"), {})
    return Row(
        id=path.name,
        path=path,
        state="",
        status=status,
        facts=facts,
        settings=settings,
        metrics=metrics,
        created=created,
        inconsistency=inconsistency,
    )


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def last_attempt(run: RunDirectory) -> dict[str, Any]:
    """Record of a run's latest attempt; empty before the first, or if the file is damaged."""
    try:
        attempts = run.attempts()
    except RunError:
        return {}
    return cast("dict[str, Any]", attempts[-1]) if attempts else {}
