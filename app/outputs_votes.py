"""Blind votes on pairs of answers, in a file that only grows; knows no page."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines

from .outputs_worker import Model, Request

SIDES = ("policy", "other")


def are_equal(result: Mapping[str, Any]) -> bool:
    """Whether both models gave the same answers, token for token."""
    drawn = [[result[side], *result[side].get("more", ())] for side in SIDES]
    return all(one["ids"] == other["ids"] for one, other in zip(*drawn, strict=True))


class Votes:
    """All votes of an app's home; the last one on an answer counts."""

    def __init__(self, path: Path) -> None:
        """Names the file; reads nothing yet."""
        self._file, self._lock = JsonLines(path), threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._last: dict[str, dict[str, Any]] = {}

    def order(self, key: str) -> tuple[str, str]:
        """Which side stands first while it is blind: as if by a coin, and the same at every look."""
        is_turned = hashlib.sha256(f"order {key}".encode()).digest()[0] & 1
        return (SIDES[1], SIDES[0]) if is_turned else SIDES

    def add(self, request: Request, choice: str) -> str:
        """Records a vote, and returns whose answer it was for: "policy", "other" or "tie".

        Whatever the choice, equal answers are a tie.

        Raises:
            RunError: there is no such choice, or the disk will not take it.
        """
        if choice not in ("a", "b", "tie"):
            raise RunError("vote for a, b or tie")
        is_tie = choice == "tie" or (request.result is not None and are_equal(request.result))
        whose = "tie" if is_tie else self.order(request.key)["ab".index(choice)]
        model = request.model
        row = {"time": process_info.utc(), "key": request.key, "run": model.run, "step": model.step}
        row["against"] = model.against
        with self._lock:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.append({**row, "for": whose}, durable=True)
        return whose

    def has(self, key: str) -> bool:
        """Whether an answer was voted on."""
        return key in self._rows()

    def tally(self, model: Model) -> dict[str, int]:
        """How many votes each side has."""
        about = (model.run, model.step, model.against)
        rows = self._rows().values()
        counts = Counter(
            row.get("for") for row in rows if (row.get("run"), row.get("step"), row.get("against")) == about
        )
        return {name: counts[name] for name in (*SIDES, "tie")}

    def _rows(self) -> dict[str, dict[str, Any]]:
        try:
            stat = self._file.path.stat()
        except OSError:
            return {}
        with self._lock:
            if self._stamp != (stat.st_mtime_ns, stat.st_size):
                try:
                    self._last = {str(row.get("key")): row for row in self._file.read()}
                except RunError:  # damaged: votes are no reason to show nothing
                    self._last = {}
                self._stamp = (stat.st_mtime_ns, stat.st_size)
            return self._last
