"""`log.txt`: the messages of a run with their times, in files of limited size."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TextIO

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import open_plain
from nnxdsl.storage.process_info import redact, utc
from nnxdsl.terminal.display import clean

MAX_BYTES = 16 * 2**20
"""Size of a log; older lines move to `log.1.txt`, of the same size, and those older still are deleted."""


class Log:
    """Appends messages with their time and flushes each; a context manager.

    Failed writes are ignored: a full disk is reported by metrics and checkpoints.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Opens the file for appending.

        Args:
            path: The log file.
            max_bytes: A file that would become larger is renamed, and a new one is started.

        Raises:
            RunError: It cannot be opened, or is no regular file.
        """
        self._path, self._max_bytes = path, max_bytes
        self._file = _open_append(path)
        self._size = os.fstat(self._file.fileno()).st_size

    def write(self, text: str) -> None:
        """Appends a message with secrets replaced by `***`; lines after its first are indented."""
        first, *rest = redact(clean(text)).splitlines() or [""]
        lines = [f"{utc()}  {first}", *(f"    {line}" for line in rest)]
        with contextlib.suppress(OSError, RunError):
            written = "".join(f"{line}\n" for line in lines)
            count = len(written.encode(errors="replace"))
            if self._size and self._size + count > self._max_bytes:
                self._rotate()
            self._file.write(written)
            self._file.flush()
            self._size += count

    def _rotate(self) -> None:
        os.replace(self._path, self._path.with_name(f"{self._path.stem}.1{self._path.suffix}"))
        fresh = _open_append(self._path)
        self._file.close()
        self._file, self._size = fresh, 0

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _open_append(path: Path) -> TextIO:
    return open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
