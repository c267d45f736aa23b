"""`log.txt`: what a run told people, with the time of each line; knows no terminal and nothing of what is told."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import TextIO

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import open_plain
from nnxdsl.storage.process_info import redact, utc
from nnxdsl.terminal.display import clean

MOST_BYTES = 16 * 2**20
"""Of a log; what is older is in `log.1.txt` beside it, which is as long, and what is older than that is gone."""


class Log:
    """Lines with their time, on their way to the disk when `write` returns; a context manager.

    What cannot be written is lost without a word: a full disk shows where it matters, in metrics and checkpoints.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Opens the file, at its end.

        Args:
            path: Of the file.
            most_bytes: A file that would become longer is put aside, and begun anew.

        Raises:
            RunError: It cannot be opened, or is no regular file.
        """
        self._path, self._most_bytes = path, most_bytes
        self._file = _appended(path)
        self._size = os.fstat(self._file.fileno()).st_size

    def write(self, text: str) -> None:
        """Adds a text, secrets blotted out; its further lines are indented."""
        first, *rest = redact(clean(text)).splitlines() or [""]
        lines = [f"{utc()}  {first}", *(f"    {line}" for line in rest)]
        with contextlib.suppress(OSError, RunError):
            written = "".join(f"{line}\n" for line in lines)
            count = len(written.encode(errors="replace"))
            if self._size and self._size + count > self._most_bytes:
                self._put_aside()
            self._file.write(written)
            self._file.flush()
            self._size += count

    def _put_aside(self) -> None:
        os.replace(self._path, self._path.with_name(f"{self._path.stem}.1{self._path.suffix}"))
        fresh = _appended(self._path)
        self._file.close()
        self._file, self._size = fresh, 0

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _appended(path: Path) -> TextIO:
    return open(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8")
