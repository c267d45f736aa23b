"""A tracker of somebody else's package: settings, and one class that appends lines of JSON to a file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from nnxdsl import Tracking
from nnxdsl.tracking import End, TrackedRun, Tracker, open_tracker


@attrs.frozen(kw_only=True)
class Lines(Tracking):
    """Lines of JSON in a file.

    Attributes:
        path: The file.
        fault: What goes wrong, at step 2 where it does not say; None for nothing.
    """

    path: str = attrs.field(kw_only=False)
    fault: Literal["raise", "exit", "hang", "hang at opening"] | None = None


@open_tracker.register(Lines)
class LinesTracker(Tracker):
    def __init__(self, settings: Lines, run: TrackedRun) -> None:
        self._settings = settings
        run.saved.setdefault("id", str(time.time_ns()))
        opened = {"run": run.id, "first": run.first_step, "id": run.saved["id"], "name": run.settings()["name"]}
        self._append({**opened, "pid": os.getpid(), "jax": "jax" in sys.modules})
        if settings.fault == "hang at opening":
            time.sleep(1000)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2 and self._settings.fault == "raise":
            raise ConnectionError("no\nservice")
        if step == 2 and self._settings.fault == "exit":
            sys.exit("over")
        if step == 2 and self._settings.fault == "hang":
            time.sleep(1000)
        self._append({"step": step, **metrics})

    def finish(self, end: End) -> None:
        self._append({"end": end})

    def _append(self, row: Mapping[str, Any]) -> None:
        with open(self._settings.path, "a") as file:
            file.write(json.dumps(row) + "\n")
