"""Alerts on runs, each once: metrics that became NaN or infinite, a run that is stalled, lost, failed or finished."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Container, Iterator

import attrs

from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.file_mutex import file_lock
from nnxdsl.storage.jsonl import JsonLines

from ..settings import Settings
from ..store.growing import GrowingFiles, row_of
from ..store.index import Index, Row

CHECK_SECONDS = 10.0  # least time between two checks of all runs
STALL_STEPS, STALL_SECONDS = 20, 120.0
"""A run is stalled after so many times its median step time without a step, and at least so many seconds."""
ENDED = ("finished", "failed", "lost")
TIMED = 32  # steps whose median is a run's step time
FOLLOWED = 256  # runs whose metrics are cached
TEXT = 600  # most characters of a sentence: errors may be long


@attrs.frozen(kw_only=True)
class Alert:
    """What happened to a run, as it is stored and sent."""

    time: str  # when it was noticed, ISO 8601
    kind: str  # non_finite, stalled, lost, failed or finished
    run: str
    attempt: int  # number of the run's start, from 1; 0 before the first
    step: int | None  # steps done
    directory: str
    text: str  # a sentence


@attrs.define
class _History:
    """Alerts in the order of their file, and the attempts that ended before the file was begun."""

    alerts: list[Alert] = attrs.Factory(list)
    earlier: set[tuple[str, int]] = attrs.Factory(set)


@attrs.define
class Progress:
    """What alerts need to know of a `metrics.jsonl`: non-finite metrics by attempt, and the time of the last steps."""

    non_finite: dict[int, str] = attrs.Factory(dict)
    rows: int = 0
    seconds: deque[float] = attrs.Factory(lambda: deque(maxlen=TIMED))
    tokens: float | None = None


class Alerts:
    """The alerts of a home, in a file of the app, so that neither a restart nor a second app repeats one.

    Runs are checked when somebody asks for alerts.
    """

    def __init__(self, settings: Settings, index: Index) -> None:
        self._index, self._path = index, settings.app_directory / "alerts.jsonl"
        self._history = GrowingFiles(_History, _add_alerts)
        self._progress = GrowingFiles(Progress, _add_rows, FOLLOWED)
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        self._lock, self._next, self._problem = threading.Lock(), 0.0, ""
        self.recorded = len(self._recorded())
        if settings.home.is_dir():
            self.all()

    def all(self) -> list[Alert]:
        """Returns all alerts, the oldest first, after a check of all runs if the last one was a while ago."""
        with self._lock:
            if time.monotonic() >= self._next:
                problem = ""
                try:
                    self._check()
                except (NnxdslError, OSError) as error:
                    problem = f"alerts: {error}\n"
                if problem != self._problem:
                    sys.stderr.write(problem)
                self._problem, self._next = problem, time.monotonic() + CHECK_SECONDS
            return self._recorded()

    def _recorded(self) -> list[Alert]:
        with contextlib.suppress(RunError):  # a file that cannot be read, which the check reports
            return list(self._history.of(self._path).alerts)
        return []

    def _check(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(self._path.with_suffix(".lock"), lambda: None, lambda: True) as is_ours:
            if not is_ours:  # another app of this home is checking
                return
            rows, file = self._index.rows(), JsonLines(self._path)
            try:
                if not self._path.exists():
                    ended = [row for row in rows if row.state in (*ENDED, "stopped")]
                    file.append({"earlier": [[row.id, _attempt(row)] for row in ended]})
                history = self._history.of(self._path)
                sent = {(alert.run, alert.attempt, alert.kind) for alert in history.alerts}
                for row in (row for row in rows if (row.id, _attempt(row)) not in history.earlier):
                    if not row.is_live and (row.state not in ENDED or (row.id, _attempt(row), row.state) in sent):
                        continue  # its metrics are not read
                    with contextlib.suppress(RunError):  # metrics that cannot be read
                        progress = self._progress.of(row.path / "metrics.jsonl")
                        for alert in alerts_on(row, progress, self._quiet(row, progress), sent):
                            file.append(attrs.asdict(alert))
            finally:
                file.close()

    def _quiet(self, row: Row, progress: Progress) -> float:
        """The seconds since this app saw the last new row of a live run's metrics."""
        rows, now = (_attempt(row), progress.rows), time.monotonic()
        if not row.is_live or self._seen.get(row.id, (None,))[0] != rows:
            self._seen[row.id] = rows, now
        return now - self._seen[row.id][1]


def alerts_on(row: Row, progress: Progress, quiet: float, sent: Container[tuple[str, int, str]]) -> Iterator[Alert]:
    """Yields what there is to alert to of a run, `quiet` seconds after the last new row of its metrics.

    Alerts that were `sent` are left out, by run, attempt and kind.
    """
    attempt, step = _attempt(row), row.status.get("step")
    alerts = {
        "non_finite": progress.non_finite.get(attempt),
        "stalled": _stall(row, progress, quiet),
        row.state: {
            "finished": f"finished at step {step}",
            "failed": f"failed: {row.status.get('error') or 'no error was recorded'}",
            "lost": f"was lost at step {step}: {row.inconsistency or 'its process is gone'}",
        }.get(row.state),
    }
    for kind, text in alerts.items():
        if text and (row.id, attempt, kind) not in sent:
            yield Alert(
                time=process_info.utc(),
                kind=kind,
                run=row.id,
                attempt=attempt,
                step=step,
                directory=str(row.path),
                text=process_info.redact(f"{row.id} {text}")[:TEXT],
            )


def _stall(row: Row, progress: Progress, quiet: float) -> str | None:
    if row.state == "silent":
        return f"is stalled: no heartbeat for {row.quiet:.0f} s"
    if row.state != "running" or row.status.get("stage") != "training" or not progress.seconds:
        return None
    usual = statistics.median(progress.seconds)
    if quiet < max(STALL_SECONDS, STALL_STEPS * usual):
        return None
    return f"is stalled: no step for {quiet:.0f} s after step {row.status.get('step')}, where {usual:.3g} s is usual"


def _attempt(row: Row) -> int:
    return row.status.get("attempt") or 0


def _add_alerts(history: _History, lines: list[bytes], _offset: int) -> None:
    for row in map(row_of, lines):
        with contextlib.suppress(ValueError, TypeError):  # a damaged line
            if "earlier" in row:
                history.earlier |= {(run, attempt) for run, attempt in row["earlier"]}
            else:
                history.alerts.append(Alert(**row))


def _add_rows(progress: Progress, lines: list[bytes], _offset: int) -> None:
    """Parses the latest rows, and of those before them only the ones with numbers that are not finite."""
    progress.rows += len(lines)
    for row in map(row_of, (line for line in lines if b"NaN" in line or b"Infinity" in line)):  # as Python writes them
        names = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        if names:
            text = f"has metrics that are NaN or infinite since step {row.get('step')}: {', '.join(names)}"
            progress.non_finite.setdefault(row.get("attempt") or 0, text)
    for row in map(row_of, lines[-TIMED - 1 :]):
        tokens, pace = row.get("num_tokens"), row.get("tokens/s")
        if isinstance(tokens, int | float) and isinstance(pace, int | float):  # not an evaluation
            if progress.tokens is not None and pace > 0 and tokens > progress.tokens:
                progress.seconds.append((tokens - progress.tokens) / pace)
            progress.tokens = tokens
