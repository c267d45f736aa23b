"""Tags of runs, stored in the app's own files, since only the run writes its directory."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines

from .growing import GrowingFiles, row_of

MOST, LONGEST = 12, 32
_ALLOWED = re.compile(r"[\w.:/+-]+")


def words_of(text: str) -> tuple[str, ...]:
    """Parses tags separated by commas or spaces; raises if there are too many, or one has invalid characters."""
    found = tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))
    wrong = [word for word in found if len(word) > LONGEST or not _ALLOWED.fullmatch(word)]
    if wrong:
        raise RunError(
            f"'{wrong[0][:40]}' is not a valid tag: use letters, digits and . : / + - _, at most {LONGEST} characters"
        )
    if len(found) > MOST:
        raise RunError(f"{len(found)} tags; a run can have at most {MOST}")
    return found


class Tags:
    """Tags of all runs of a home, in an append-only file; the last line on a run counts."""

    def __init__(self, path: Path) -> None:
        """Sets the file, which is read on first use."""
        self._file, self._lock = JsonLines(path), threading.Lock()
        self._tags = GrowingFiles[dict[str, tuple[str, ...]]](dict, _add)

    def of(self, run: str) -> tuple[str, ...]:
        """Returns the tags of a run."""
        return self._all().get(run, ())

    def used(self, runs: Iterable[str]) -> list[str]:
        """Returns all tags that any of the runs has."""
        tags = self._all()
        return sorted({tag for run in runs for tag in tags.get(run, ())})

    def set(self, run: str, tags: Iterable[str], who: str = "") -> None:
        """Replaces the tags of a run; raises `RunError` if the file cannot be written."""
        with self._lock:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            row = {"time": process_info.utc(), "run": run, "tags": list(tags), "by": who}
            self._file.append(row, durable=True)

    def _all(self) -> dict[str, tuple[str, ...]]:
        with contextlib.suppress(RunError):  # unreadable: pages work without tags
            return self._tags.of(self._file.path)
        return {}


def _add(tags: dict[str, tuple[str, ...]], lines: list[bytes], _offset: int) -> None:
    for row in map(row_of, lines):
        if isinstance(words := row.get("tags"), list):
            tags[str(row.get("run"))] = tuple(map(str, words))
