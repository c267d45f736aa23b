"""Files that survive a kill: JSON replaced atomically, and JSON lines whose torn tail is cut off."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from nnxdsl.errors import RunError
from nnxdsl.storage.failpoints import reached

Row = dict[str, Any]

_BLOCK = 65536
"""Bytes that are read at a time where a file is read from its end."""


class JsonLines:
    """One JSON object a line; one writer, any number of readers.

    A row is written by one `write`, so a killed writer leaves at most one torn line, the last:
    readers pass over it and the next writer cuts it off. Rows reach the kernel at once (they survive a kill);
    `durable=True` or `sync` brings them to the disk (they survive a power cut). NaN is written as Python does.
    """

    def __init__(self, path: Path, problem: Callable[[Row], str | None] = lambda row: None) -> None:
        """Names the file; opens nothing.

        Args:
            path: Of the file.
            problem: Says what is wrong with a row, None where nothing is; readers refuse what it names.
        """
        self.path = path
        self._problem = problem
        self._descriptor: int | None = None

    def append(self, row: Row, *, durable: bool = False) -> None:
        """Adds one row.

        Raises:
            RunError: The row could not be written whole (a full disk); the file is as it was before.
        """
        line = _encode(row)
        try:
            descriptor = self._open()
            before = os.fstat(descriptor).st_size
        except OSError as error:
            raise RunError(f"{self.path}: cannot be opened: {error.strerror}") from error
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
            RunError: The file cannot be read, or a line before the last is no such row; names file and line.
        """
        return list(self.rows())

    def rows(self, wanted: bytes = b"") -> Iterator[Row]:
        """The same, one at a time.

        Args:
            wanted: Rows whose line does not hold this are passed over and not looked at: soon done in a long file.
        """
        for number, _, line in self.lines():
            if wanted in line:
                yield self.decode(line, number)

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Whole lines as they stand there: number from 1, where it begins, and its bytes with the newline."""
        with self._reader() as file:
            offset = 0
            for number, line in enumerate(file or (), start=1):
                if not line.endswith(b"\n"):  # torn
                    return
                yield number, offset, line
                offset += len(line)

    def require_plain(self) -> None:
        """Looks whether the file can be read.

        Raises:
            RunError: It is there and cannot be, or is no regular file.
        """
        with self._reader():
            pass

    def last(self, count: int) -> list[Row]:
        """The last rows, in their order, at most so many; what stands before them is not read."""
        found: list[Row] = []
        for start, line in self._backwards():
            if len(found) == count:
                break
            found.append(self._decode_at(start, line))
        return found[::-1]

    def rewrite(self, parts: Iterable[tuple[int, int]]) -> None:
        """Replaces the file atomically by parts of it: pairs of where one begins, and its length."""
        self.close()
        with self._reader() as old, _replacing(self.path) as new:
            for start, length in parts:
                assert old is not None  # or it had no parts
                old.seek(start)
                new.write(old.read(length))
            reached("rows-copied")
        reached("rows-dropped")

    def _backwards(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines from the last to the first, each with where it begins; what follows the last newline is torn."""
        with self._reader() as file:
            if file is None:
                return
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

    @contextlib.contextmanager
    def _reader(self) -> Iterator[io.BufferedReader | None]:
        """The file, open for reading; None where there is none."""
        try:
            descriptor = open_plain(self.path)
        except FileNotFoundError:
            yield None
            return
        with open(descriptor, "rb") as file:
            yield file

    def _decode_at(self, start: int, line: bytes) -> Row:
        try:
            return self.decode(line, 0)
        except RunError:
            with self._reader() as file:
                before = 0 if file is None else file.read(start).count(b"\n")
            return self.decode(line, before + 1)

    def decode(self, line: bytes, number: int) -> Row:
        """The row of a line.

        Raises:
            RunError: It is none; names the file, the line and what is wrong.
        """
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.path}:{number}: not JSON ({error}); remove the line") from error
        if not isinstance(row, dict):
            got = type(row).__name__
            raise RunError(f"{self.path}:{number}: expected a JSON object, got {got}; remove the line")
        if (problem := self._problem(cast(Row, row))) is not None:
            raise RunError(f"{self.path}:{number}: {problem}; put the line right, or remove it")
        return cast(Row, row)

    def _open(self) -> int:
        if self._descriptor is None:
            is_new = not self.path.exists()
            descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            _cut_torn_tail(descriptor)
            self._descriptor = descriptor
            if is_new:
                sync_directory(self.path.parent)
        return self._descriptor


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, and nothing else: a pipe would be waited for, and a link may lead to other people's files.

    Raises:
        FileNotFoundError: There is none, and `flags` make none.
        RunError: It is something else, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = _what_stands_at(path)
        raise RunError(f"{path}: {what or f'cannot be read: {error.strerror}'}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{path}: {_what_stands_at(path) or 'is no regular file'}")
    return descriptor


def _what_stands_at(path: Path) -> str:
    """What is there instead of a regular file, and what to do; empty for a file."""
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
    except OSError:
        return ""
    if kind == stat.S_IFREG:
        return ""
    return f"is {kinds.get(kind, 'a device')} and no regular file; put the file itself there, or remove it"


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
        with open(open_plain(path), "rb") as file:
            return json.loads(file.read())
    except FileNotFoundError as error:
        raise RunError(f"{path}: there is no such file") from error
    except (OSError, ValueError, RecursionError) as error:
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
