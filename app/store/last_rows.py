"""What the app notes itself, such as tags and votes: rows in a file that only grows, of which the last one counts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines

from .growing import GrowingFiles, row_of


class LastRows:
    """The last row on each thing, in an append-only file of the app: a later row replaces an earlier one.

    The field `key` says what a row is on; one without `field`, such as a damaged one, does not count.
    """

    def __init__(self, path: Path, key: str, field: str) -> None:
        self._file, self._lock = JsonLines(path), threading.Lock()

        def add(rows: dict[str, dict[str, Any]], lines: list[bytes], _offset: int) -> None:
            rows.update({str(row.get(key)): row for row in map(row_of, lines) if field in row})

        self._rows = GrowingFiles[dict[str, dict[str, Any]]](dict, add)

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row with the time; raises `RunError` if the file cannot be written."""
        with self._lock:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.append({"time": process_info.utc(), **row}, durable=True)

    def all(self) -> dict[str, dict[str, Any]]:
        """Returns the last row by key; none if the file cannot be read, without which pages work, too."""
        with contextlib.suppress(RunError):
            return self._rows.of(self._file.path)
        return {}
