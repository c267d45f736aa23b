"""Alerts on runs, each once: metrics that became NaN or infinite, a run that is stalled, lost, failed or finished."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.file_mutex import file_lock
from nnxdsl.storage.jsonl import JsonLines

from ..settings import Settings
from ..store.growing import GrowingFiles, row_of
from ..store.index import Index, Row
from .jobs import kill_group, run

CHECK_SECONDS = 10.0
"""Least time between two checks of all runs."""
SEND_SECONDS = 30.0
"""Timeout of the command, and of the webhook."""
STALL_STEPS, STALL_SECONDS = 20, 120.0
"""A run is stalled after so many times its median step time without a step, and at least so many seconds."""
ENDED = ("finished", "failed", "lost")
TIMED = 32
"""Steps whose median is a run's step time."""
FOLLOWED = 256
"""Runs whose metrics are cached."""
TEXT = 600
"""Most characters of a sentence: errors may be long."""


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
class _Progress:
    """What alerts need to know of a `metrics.jsonl`: non-finite metrics by attempt, and the time of the last steps."""

    non_finite: dict[int, str] = attrs.Factory(dict)
    rows: int = 0
    seconds: deque[float] = attrs.Factory(lambda: deque(maxlen=TIMED))
    tokens: float | None = None


class Alerts:
    """The alerts of a home, in a file of the app, so that neither a restart nor a second app repeats one.

    Runs are checked when a page asks for alerts, and by a thread if the settings have a command or a webhook.
    """

    def __init__(self, settings: Settings, index: Index) -> None:
        """Notes which runs have ended already, and starts the thread."""
        self._settings, self._index = settings, index
        self._path = settings.own / "alerts.jsonl"
        self._history = GrowingFiles(_History, _add_alerts)
        self._progress = GrowingFiles(_Progress, _add_rows, FOLLOWED)
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._next, self._problem = 0.0, ""
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        senders = [self._run] if settings.alert_command else []
        senders += [self._post] if settings.alert_webhook else []
        sent = len(self._recorded())
        if settings.home.is_dir():
            self.all()
        if senders:
            self._thread = threading.Thread(target=self._keep, args=(sent, senders), name="alerts", daemon=True)
            self._thread.start()

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

    def close(self) -> None:
        """Stops the thread, and kills a command that is running."""
        self._ended.set()
        if self._thread is not None:
            kill_group(self._child)
            self._thread.join(5)

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
                told = {(alert.run, alert.attempt, alert.kind) for alert in history.alerts}
                for row in (row for row in rows if (row.id, _attempt(row)) not in history.earlier):
                    with contextlib.suppress(RunError):  # metrics that cannot be read
                        for alert in self._found(row, told):
                            file.append(attrs.asdict(alert))
            finally:
                file.close()

    def _found(self, row: Row, told: set[tuple[str, int, str]]) -> Iterator[Alert]:
        attempt = _attempt(row)
        if not row.is_live and (row.state not in ENDED or (row.id, attempt, row.state) in told):
            return
        progress, step = self._progress.of(row.path / "metrics.jsonl"), row.status.get("step")
        found = {
            "non_finite": progress.non_finite.get(attempt),
            "stalled": self._stall(row, attempt, progress),
            row.state: {
                "finished": f"finished at step {step}",
                "failed": f"failed: {row.status.get('error') or 'no error was recorded'}",
                "lost": f"was lost at step {step}: {row.inconsistency or 'its process is gone'}",
            }.get(row.state),
        }
        for kind, text in found.items():
            if text and (row.id, attempt, kind) not in told:
                yield Alert(
                    time=process_info.utc(),
                    kind=kind,
                    run=row.id,
                    attempt=attempt,
                    step=step,
                    directory=str(row.path),
                    text=process_info.redact(f"{row.id} {text}")[:TEXT],
                )

    def _stall(self, row: Row, attempt: int, progress: _Progress) -> str | None:
        """Why a run is stalled, by the time since this app saw the last new row of its metrics."""
        if row.state == "silent":
            return f"is stalled: no heartbeat for {row.quiet:.0f} s"
        rows, now = (attempt, progress.rows), time.monotonic()
        if not row.is_live or self._seen.get(row.id, (None,))[0] != rows:
            self._seen[row.id] = rows, now
        quiet = now - self._seen[row.id][1]
        if row.state != "running" or row.status.get("stage") != "training" or not progress.seconds:
            return None
        usual = statistics.median(progress.seconds)
        if quiet < max(STALL_SECONDS, STALL_STEPS * usual):
            return None
        step = row.status.get("step")
        return f"is stalled: no step for {quiet:.0f} s after step {step}, where {usual:.3g} s is usual"

    # Sending

    def _keep(self, sent: int, senders: list[Callable[[bytes], None]]) -> None:
        """Sends the alerts from number `sent` on."""
        while not self._ended.is_set():
            new = self.all()[sent:]
            sent += len(new)
            for alert, send in itertools.product(new, senders):
                if self._ended.is_set():
                    return
                try:
                    send(json.dumps(attrs.asdict(alert)).encode())
                except (OSError, http.client.HTTPException, RunError) as error:
                    sys.stderr.write(f"alerts: {alert.kind} of {alert.run} was not sent: {error}\n")
            self._ended.wait(CHECK_SECONDS)

    def _run(self, alert: bytes) -> None:
        """Runs the command with an alert as its standard input; raises if it fails or has to be killed."""
        argv = self._settings.alert_command
        variables = {name: value for name, value in os.environ.items() if not name.startswith("NNXDSL_APP_")}

        def begun(child: subprocess.Popen[bytes]) -> None:
            self._child = child

        code, _, errors = run(argv, self._settings.project, variables, SEND_SECONDS, begun, alert)
        if code is None:
            raise RunError(f"{argv[0]} did not end within {SEND_SECONDS:g} s and was killed")
        if code:
            raise RunError(f"{argv[0]} ended with exit code {code}: {errors}")

    def _post(self, alert: bytes) -> None:
        """Posts an alert to the webhook; raises `OSError` if that fails, or if the answer is a redirect."""
        url = self._settings.alert_webhook or ""
        request = urllib.request.Request(url, alert, {"Content-Type": "application/json"})
        urllib.request.build_opener(_NoRedirects).open(request, timeout=SEND_SECONDS).close()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect may lead to another scheme, and would turn a POST into a GET: it is an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows none."""


def _attempt(row: Row) -> int:
    return row.status.get("attempt") or 0


def _add_alerts(history: _History, lines: list[bytes], _offset: int) -> None:
    for row in map(row_of, lines):
        with contextlib.suppress(ValueError, TypeError):  # a damaged line
            if "earlier" in row:
                history.earlier |= {(run, attempt) for run, attempt in row["earlier"]}
            else:
                history.alerts.append(Alert(**row))


def _add_rows(progress: _Progress, lines: list[bytes], _offset: int) -> None:
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
