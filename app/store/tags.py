"""Tags of runs, stored in the app's own files, since only the run writes its directory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nnxdsl.errors import RunError

from ..client import CLIENT
from .growing import LastRows

MOST, LONGEST = 12, 32
_ALLOWED = re.compile(r"[\w.:/+-]+")


def parse_tags(text: str) -> tuple[str, ...]:
    """Parses tags separated by commas or spaces; raises if there are too many, or one has invalid characters."""
    tags = tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))
    wrong = [word for word in tags if len(word) > LONGEST or not _ALLOWED.fullmatch(word)]
    if wrong:
        raise RunError(
            f"'{wrong[0][:40]}' is not a valid tag: use letters, digits and . : / + - _, at most {LONGEST} characters"
        )
    if len(tags) > MOST:
        raise RunError(f"{len(tags)} tags; a run can have at most {MOST}")
    return tags


class Tags:
    """Tags of all runs of a home."""

    def __init__(self, path: Path) -> None:
        self._rows = LastRows(path, "run", "tags")

    def of(self, run: str) -> tuple[str, ...]:
        """Returns the tags of a run."""
        return self.by_run().get(run, ())

    def by_run(self) -> dict[str, tuple[str, ...]]:
        """Returns the tags of all runs that have some: the file is looked at once."""
        stored = {run: row.get("tags") for run, row in self._rows.all().items()}
        return {run: tuple(map(str, tags)) for run, tags in stored.items() if isinstance(tags, list) and tags}

    def set(self, run: str, tags: Iterable[str]) -> None:
        """Replaces the tags of a run; raises `RunError` if the file cannot be written."""
        self._rows.append({"run": run, "tags": list(tags), "by": CLIENT.get()})
