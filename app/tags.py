"""Words that people give to runs, to find them again; a file of the app's own, as runs belong to their writers."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines

MOST, LONGEST = 12, 32
_ALLOWED = re.compile(r"[\w.:/+-]+")


def words_of(text: str) -> tuple[str, ...]:
    """The tags of a text, which commas or blanks part.

    Raises:
        RunError: there are too many, or one has signs that no tag has.
    """
    found = tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))
    wrong = [word for word in found if len(word) > LONGEST or not _ALLOWED.fullmatch(word)]
    if wrong:
        raise RunError(f"'{wrong[0][:40]}' is no tag: letters, digits and . : / + - _, at most {LONGEST} of them")
    if len(found) > MOST:
        raise RunError(f"{len(found)} tags; a run has at most {MOST}")
    return found


class Tags:
    """The tags of all runs of a home, in a file that only grows; the last line on a run counts."""

    def __init__(self, path: Path) -> None:
        """Names the file; reads nothing yet."""
        self._file, self._lock = JsonLines(path), threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._tags: dict[str, tuple[str, ...]] = {}

    def of(self, run: str) -> tuple[str, ...]:
        """The tags of a run."""
        return self._all().get(run, ())

    def used(self, runs: Iterable[str]) -> list[str]:
        """All tags that some of the runs have."""
        tags = self._all()
        return sorted({tag for run in runs for tag in tags.get(run, ())})

    def set(self, run: str, tags: Iterable[str], who: str = "") -> None:
        """Gives a run these tags and no others.

        Raises:
            RunError: the disk will not take it.
        """
        with self._lock:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.append({"time": process_info.utc(), "run": run, "tags": list(tags), "by": who}, durable=True)

    def _all(self) -> dict[str, tuple[str, ...]]:
        try:
            stat = self._file.path.stat()
        except OSError:
            return {}
        with self._lock:
            if self._stamp != (stat.st_mtime_ns, stat.st_size):
                try:
                    rows = self._file.read()
                    self._tags = {str(row.get("run")): tuple(map(str, row.get("tags", ()))) for row in rows}
                except (RunError, TypeError):  # damaged: no reason to show no runs
                    self._tags = {}
                self._stamp = (stat.st_mtime_ns, stat.st_size)
            return self._tags
