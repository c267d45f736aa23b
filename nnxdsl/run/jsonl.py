"""Files that survive a kill: JSON replaced atomically, and JSON lines whose torn tail is cut off."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from nnxdsl.run.failpoints import reached
from nnxdsl.spec.errors import RunError

Row = dict[str, Any]

_BLOCK = 65536
"""Bytes that are read at a time where a file is read from its end."""


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
        return list(self.rows())

    def rows(self, wanted: bytes = b"") -> Iterator[Row]:
        """The same, one at a time.

        Args:
            wanted: Rows whose line does not hold this are passed over and not looked at: soon done in a long file.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # torn
                    return
                if wanted in line:
                    yield self._decode(line, number)

    def last(self, count: int) -> list[Row]:
        """The last rows, in their order, at most so many; what stands before them is not read."""
        found: list[Row] = []
        for start, line in self._backwards():
            if len(found) == count:
                break
            found.append(self._decode_at(start, line))
        return found[::-1]

    def drop_last(self, unwanted: Callable[[Row], bool], until: Callable[[Row], bool]) -> int:
        """Rewrites the file atomically without those rows at its end that are unwanted; returns how many went.

        Looks at rows from the last one back to the first that `until` accepts; what stands before it is copied unread,
        so that a long file costs little. Lines at the very end that cannot be read go as well.
        """
        kept: list[bytes] = []
        start, gone = 0, 0
        for start, line in self._backwards():
            try:
                row = self._decode_at(start, line)
            except RunError:
                if kept:
                    raise
                gone += 1
                continue
            if unwanted(row):
                gone += 1
                continue
            kept.append(line + b"\n")
            if until(row):
                break
        if gone:
            self.close()
            with self.path.open("rb") as old, _replacing(self.path) as new:
                _copy(old, new, start)
                new.writelines(reversed(kept))
                reached("rows-copied")
            reached("rows-dropped")
        return gone

    def _backwards(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines from the last to the first, each with where it begins; what follows the last newline is torn."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            place = file.seek(0, os.SEEK_END)
            rest, is_torn = b"", True
            while place > 0:
                begin = max(0, place - _BLOCK)
                data = os.pread(file.fileno(), place - begin, begin) + rest
                place, end = begin, begin + len(data)
                rest, *lines = data.split(b"\n")  # the first one may begin further back
                if lines and is_torn:
                    end -= len(lines.pop()) + 1
                    is_torn = False
                for line in reversed(lines):
                    end -= len(line)
                    yield end, line
                    end -= 1
            if not is_torn:
                yield 0, rest

    def _decode_at(self, start: int, line: bytes) -> Row:
        try:
            return self._decode(line, 0)
        except RunError:
            with self.path.open("rb") as file:
                before = file.read(start).count(b"\n")
            return self._decode(line, before + 1)

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
    with _replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """A file to write what `path` becomes when the block ends; see `replace`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        reached("file-written")
        os.replace(temporary, path)
        reached("file-renamed")
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {error}") from error


def _copy(old: io.BufferedReader, new: io.BufferedWriter, size: int) -> None:
    """The first bytes of a file, by the kernel where it can."""
    done = 0
    with contextlib.suppress(OSError, AttributeError):  # another kind of file system, or of system
        while done < size:
            moved = os.copy_file_range(old.fileno(), new.fileno(), size - done, done, done)
            if moved == 0:
                break
            done += moved
    old.seek(done)
    new.seek(done)
    while done < size:
        block = old.read(min(1 << 20, size - done))
        if not block:
            raise OSError("became shorter while it was copied")
        new.write(block)
        done += len(block)


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
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
