"""Sampled completions of runs: which steps a `rollouts.jsonl` has, and the groups of one step. Independent of pages."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import open_plain
from nnxdsl.storage.records import ROLLOUT, problem_in

NAME = "rollouts.jsonl"
REMEMBERED = 24
_STEP = re.compile(rb'\{"step": (\d{1,18}), ')
"""Of the beginning of a row, which is enough to list it: texts are parsed when they are shown."""


@attrs.define
class _File:
    identity: tuple[int, int] = (0, 0)
    end: int = 0
    places: dict[int, list[tuple[int, int]]] = attrs.Factory(dict)
    """Offset and length of the rows of each step."""


class Rollouts:
    """A cache of where the rows of recently viewed runs are; a file is read once, and then what was appended."""

    def __init__(self) -> None:
        """Creates an empty cache."""
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self, path: Path) -> list[int]:
        """Steps with rows in a `rollouts.jsonl`, ascending; empty if there is no such file.

        Raises:
            RunError: It is no regular file, or cannot be read.
        """
        with self._lock:
            return sorted(self._updated(path).places)

    def groups(self, path: Path, step: int) -> list[dict[str, Any]]:
        """Rows of a step, as `nnxdsl.storage.records.ROLLOUT` describes them; invalid ones are left out.

        Raises:
            RunError: It is no regular file, or cannot be read.
        """
        with self._lock:
            places = list(self._updated(path).places.get(step, ()))
        found: list[dict[str, Any]] = []
        try:
            with open(open_plain(path), "rb") as file:
                for offset, length in places:
                    file.seek(offset)
                    if (row := _row(file.read(length))) is not None:
                        found.append(row)
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda row: row["group"])

    def _updated(self, path: Path) -> _File:
        """The rows of a file; one that was rewritten (a resume drops rows after its checkpoint) is read anew."""
        cached = self._files.setdefault(path, _File())
        self._files.move_to_end(path)
        while len(self._files) > REMEMBERED:
            self._files.popitem(last=False)
        try:
            with open(open_plain(path), "rb") as file:
                stat = os.fstat(file.fileno())
                if (stat.st_dev, stat.st_ino) != cached.identity or stat.st_size < cached.end:
                    cached.identity, cached.end, cached.places = (stat.st_dev, stat.st_ino), 0, {}
                file.seek(cached.end)
                for line in file:
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    if (begin := _STEP.match(line)) is not None:
                        cached.places.setdefault(int(begin[1]), []).append((cached.end, len(line)))
                    cached.end += len(line)
        except FileNotFoundError:
            return _File()
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from error
        return cached


def _row(line: bytes) -> dict[str, Any] | None:
    """A row with texts that can be shown: a lone surrogate in them becomes a question mark."""
    try:
        row = json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    is_good = isinstance(row, dict) and problem_in(row, ROLLOUT, required=tuple(ROLLOUT)) is None
    return row if is_good and row["completions"] else None
