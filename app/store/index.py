"""The runs of a home, one row each, reread only when files have changed. Independent of pages."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status, liveness_of
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import read_json

from ..words import parsed
from .experiments import facts_of
from .run_paths import directory_path, run_path
from .series import last_row

FILES = ("run.json", "status.json", "metrics.jsonl", "checkpoints")
"""Files that a row depends on."""

LIVE = ("starting", "compiling", "running", "stopping", "silent")


@attrs.frozen(kw_only=True)
class Row:
    """One run in the list of runs.

    Attributes:
        id: Name of its directory.
        path: Its directory.
        state: One word: queued, starting, compiling, running, stopping, silent, stopped, finished, failed, lost or
            damaged.
        status: Last status that its process wrote.
        facts: Objective, model, mesh and adapter as text.
        metrics: Last row of training metrics.
        created: Creation time, ISO 8601.
        problem: Which file is damaged.
        doubt: Why it has not finished, if its status wrongly says so.
        seconds: Time from its first start to its end, or until now.
        quiet: Seconds since its last heartbeat.
    """

    id: str
    path: Path
    state: str
    status: Status = attrs.Factory(lambda: Status())
    facts: dict[str, str] = attrs.Factory(dict)
    metrics: dict[str, Any] = attrs.Factory(dict)
    created: str | None = None
    problem: str | None = None
    doubt: str | None = None
    seconds: float | None = None
    quiet: float = float("inf")

    @property
    def is_live(self) -> bool:
        """Whether its process is running."""
        return self.state in LIVE

    @property
    def text(self) -> str:
        """Text that is searched."""
        return " ".join([self.id, self.state, *self.facts.values()]).lower()


@attrs.define
class _CachedRow:
    signature: tuple[Any, ...]
    status: Status | None
    facts: dict[str, str]
    metrics: dict[str, Any]
    created: str | None
    problem: str | None
    doubt: str | None = None


class Index:
    """A cache of a home's runs; a refresh costs one `stat` per unchanged file."""

    def __init__(self, home: Path) -> None:
        """Creates an empty cache; files are read on first use."""
        self.home = home
        self._rows: dict[str, _CachedRow] = {}
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

    def _row(self, name: str) -> Row:
        path = self.home / name
        signature = tuple(_stamp(path / file) for file in FILES)
        cached = self._rows.get(name)
        if cached is None or cached.signature != signature:
            cached = self._rows[name] = _read(path, signature, cached)
        status = cached.status
        if status is None:
            return Row(
                id=name,
                path=path,
                state="damaged",
                facts=cached.facts,
                created=cached.created,
                problem=cached.problem,
            )
        quiet = process_info.seconds_since(status.get("heartbeat") or {})
        state = "lost" if cached.doubt else state_of(status)
        began = parsed(cached.created)
        beat = (status.get("heartbeat") or {}).get("wall")
        lasted = beat - began.timestamp() if began is not None and isinstance(beat, int | float) else None
        return Row(
            id=name,
            path=path,
            state=state,
            status=status,
            facts=cached.facts,
            metrics=cached.metrics,
            created=cached.created,
            doubt=cached.doubt,
            seconds=lasted,
            quiet=quiet,
        )


def state_of(status: Status) -> str:
    """State of a run as one word: the one in its status, if its process and heartbeat confirm it."""
    alive = liveness_of(status)
    state = status.get("state", "queued")
    return state if alive == "running" else alive


def _read(path: Path, signature: tuple[Any, ...], before: _CachedRow | None) -> _CachedRow:
    try:
        run = RunDirectory(run_path(path.parent, path.name))
        created = run.created
        status, doubt = run.status(), run.doubt()
    except RunError as error:
        return _CachedRow(signature, None, {}, {}, None, str(error))
    facts = before.facts if before is not None and before.signature[0] == signature[0] else {}
    if not facts:
        try:
            facts = facts_of(read_json(path / "experiment.json"))
        except RunError:
            facts = {}
    return _CachedRow(signature, status, facts, last_row(path / "metrics.jsonl"), created, None, doubt)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.lstat()
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
