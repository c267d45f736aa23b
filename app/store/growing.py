"""Files of lines that grow while they are looked at: each line is read once. Independent of pages."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import orjson

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines, open_plain

REMEMBERED = 24  # files whose content is cached, if nothing else is given
AT_ONCE = 2**26  # bytes that are read at a time, about
T = TypeVar("T")


@attrs.define
class _File(Generic[T]):
    content: T
    identity: tuple[int, int] = (0, 0)
    offset: int = 0
    last: bytes = b""  # the line that ends at the offset
    lock: threading.Lock = attrs.Factory(threading.Lock)


class GrowingFiles(Generic[T]):
    """A cache of what was read of recently viewed files, so many of which are `remembered`.

    `empty` creates the content of a file without lines; `add` adds lines, each with its newline, to a content, and is
    passed the offset of the first in its file, in bytes, as well.
    """

    def __init__(
        self, empty: Callable[[], T], add: Callable[[T, list[bytes], int], None], remembered: int = REMEMBERED
    ) -> None:
        self._empty, self._add = empty, add
        self._file = functools.lru_cache(remembered)(lambda _path: _File(empty()))

    def of(self, path: Path) -> T:
        """Returns the content of all complete lines of a file; what was cached, if there is no such file any more.

        A file that was rewritten (a resume drops rows after its checkpoint) is read from the beginning; one that is no
        regular file, or cannot be read, raises a `RunError`.
        """
        file = self._file(path)
        with file.lock:
            self._read(path, file)
            return file.content

    def _read(self, path: Path, file: _File[T]) -> None:
        try:
            with open(open_plain(path), "rb") as opened:
                stat = os.fstat(opened.fileno())
                opened.seek(file.offset - len(file.last))  # a new file may have the number of one that was deleted
                is_same = (stat.st_dev, stat.st_ino) == file.identity and opened.read(len(file.last)) == file.last
                if not is_same:
                    file.identity, file.content = (stat.st_dev, stat.st_ino), self._empty()
                    file.offset, file.last = 0, b""
                opened.seek(file.offset)
                while lines := opened.readlines(AT_ONCE):
                    if not lines[-1].endswith(b"\n"):  # it is being written
                        lines.pop()
                    if not lines:
                        break
                    self._add(file.content, lines, file.offset)
                    file.offset += sum(map(len, lines))
                    file.last = lines[-1]
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(f"{path}: cannot be read: {error.strerror}") from error


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


def row_of(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; an empty one if it is damaged."""
    for loads in (orjson.loads, json.loads):  # orjson rejects NaN and Infinity, which Python writes
        try:
            row = loads(line)
        except (ValueError, RecursionError):
            continue
        return row if isinstance(row, dict) else {}
    return {}
