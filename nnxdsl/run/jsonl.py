"""Files that survive a kill: JSON replaced atomically, and JSON lines whose torn tail is cut off."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from nnxdsl.spec.errors import RunError

Row = dict[str, Any]


class JsonLines:
    """One JSON object a line; one writer, any number of readers.

    A row is written by one `write`, so a killed writer leaves at most one torn line, the last:
    readers pass over it and the next writer cuts it off. Rows reach the kernel at once (they survive a kill);
    `durable=True` or `sync` brings them to the disk (they survive a power cut). NaN is written as Python does.
    """

    def __init__(self, path: Path) -> None:
        """Names the file; opens nothing."""
        self.path = path
        self._descriptor: int | None = None

    def append(self, row: Row, *, durable: bool = False) -> None:
        """Adds one row.

        Raises:
            RunError: The row could not be written whole (a full disk); the file is as it was before.
        """
        line = _encode(row)
        descriptor = self._open()
        before = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes fitted")
            if durable:
                os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            message = f"{self.path}: the row could not be written: {error}; free some space and run again"
            raise RunError(message) from error

    def sync(self) -> None:
        """Brings all rows to the disk; nothing to do if nothing was appended."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Lets go of the file; a later `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> list[Row]:
        """All rows but a torn last one; a missing file has none.

        Raises:
            RunError: A line before the last is no JSON object; names file and line.
        """
        return [self._decode(line, number) for number, line in enumerate(self._lines(), start=1)]

    def keep(self, wanted: Callable[[Row], bool]) -> int:
        """Rewrites the file atomically with the rows that `wanted` accepts; returns how many went."""
        lines = self._lines()
        kept = [line for number, line in enumerate(lines, start=1) if wanted(self._decode(line, number))]
        if len(kept) < len(lines):
            self.close()
            replace(self.path, b"".join(line + b"\n" for line in kept))
        return len(lines) - len(kept)

    def _lines(self) -> list[bytes]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return data.split(b"\n")[:-1]  # what follows the last newline is torn, or empty

    def _decode(self, line: bytes, number: int) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RunError(f"{self.path}:{number}: not JSON ({error}); remove the line") from error
        if not isinstance(row, dict):
            got = type(row).__name__
            raise RunError(f"{self.path}:{number}: expected a JSON object, got {got}; remove the line")
        return cast(Row, row)

    def _open(self) -> int:
        if self._descriptor is None:
            is_new = not self.path.exists()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _cut_torn_tail(descriptor)
            self._descriptor = descriptor
            if is_new:
                sync_directory(self.path.parent)
        return self._descriptor


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically: after a kill or a power cut it is the old one or the new one, whole.

    Raises:
        RunError: It could not be written; the old one is untouched.
    """
    replace(path, (json.dumps(value, indent=2, default=_plain) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        RunError: The file is missing, unreadable or no JSON; names it.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RunError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def replace(path: Path, data: bytes) -> None:
    """Writes a temporary file beside `path`, syncs it, renames it over `path` and syncs the directory.

    Raises:
        RunError: It could not be written; the old one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {error}") from error


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(row: Row) -> bytes:
    return (json.dumps(row, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """Numpy and jax scalars as Python's own, without importing either; paths as text."""
    if isinstance(value, Path):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 0) == 1:
        return item()
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def _cut_torn_tail(descriptor: int) -> None:
    """Truncates the file after its last newline, reading backwards so that a long file costs nothing."""
    size = os.fstat(descriptor).st_size
    end = size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
