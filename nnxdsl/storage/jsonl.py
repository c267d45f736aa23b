"""Crash-safe JSON: files that are replaced atomically, and JSON lines whose incomplete last line is cut off."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from nnxdsl.errors import RunError
from nnxdsl.storage.failpoints import hit_failpoint

Row = dict[str, Any]

_BLOCK = 65536
"""Bytes per read where a file is read from its end."""


class JsonLines:
    """A file with one JSON object per line; one writer, any number of readers.

    A row is written by one `write`, so a killed writer leaves at most one incomplete line, the last: readers skip it
    and the next writer truncates it. Rows reach the kernel at once (they survive a kill of the process);
    `durable=True` or `sync` syncs them to disk (they survive a power cut). NaN is written as `NaN`.
    """

    def __init__(self, path: Path, problem: Callable[[Row], str | None] = lambda row: None) -> None:
        """Names the file; opens nothing.

        Args:
            path: The file.
            problem: Returns a message for an invalid row, else None; readers raise it.
        """
        self.path = path
        self._problem = problem
        self._descriptor: int | None = None

    def append(self, row: Row, *, durable: bool = False) -> None:
        """Appends one row.

        Raises:
            RunError: The row could not be written completely (a full disk); the file is unchanged.
        """
        line = (json.dumps(row, default=_to_json_value) + "\n").encode()
        try:
            descriptor = self._open()
            before = os.fstat(descriptor).st_size
        except OSError as error:
            raise RunError(f"{self.path}: cannot be opened: {error.strerror}") from error
        try:
            written = os.write(descriptor, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            if durable:
                os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            message = f"{self.path}: the row could not be written: {error}; free some space and run again"
            raise RunError(message) from error

    def sync(self) -> None:
        """Syncs all rows to disk; does nothing if nothing was appended."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; a later `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> list[Row]:
        """All rows except an incomplete last one; a missing file has none.

        Raises:
            RunError: The file cannot be read, or a line before the last is invalid; names file and line.
        """
        return list(self.rows())

    def rows(self, containing: bytes = b"") -> Iterator[Row]:
        """Like `read`, one row at a time.

        Args:
            containing: Lines without these bytes are skipped without parsing them, which is fast in a long file.
        """
        for number, _, line in self.lines():
            if containing in line:
                yield self.decode(line, number)

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Complete lines: the number from 1, the offset, and the bytes with the newline."""
        with self._reader() as file:
            offset = 0
            for number, line in enumerate(file or (), start=1):
                if not line.endswith(b"\n"):  # incomplete
                    return
                yield number, offset, line
                offset += len(line)

    def require_plain(self) -> None:
        """Checks that the file can be read, if it exists.

        Raises:
            RunError: It cannot be read, or is no regular file.
        """
        with self._reader():
            pass

    def last(self, count: int) -> list[Row]:
        """The last `count` rows, in order; the file is read from its end."""
        last = [self._decode_at(start, line) for start, line in itertools.islice(self.backwards(), count)]
        return last[::-1]

    def rewrite(self, parts: Iterable[tuple[int, int]]) -> None:
        """Replaces the file atomically by parts of it, given as pairs of offset and length."""
        self.close()
        with self._reader() as old, _replacing(self.path) as new:
            for start, length in parts:
                assert old is not None  # a missing file has no parts
                old.seek(start)
                new.write(old.read(length))
            hit_failpoint("rows-copied")
        hit_failpoint("rows-dropped")

    def backwards(self) -> Iterator[tuple[int, bytes]]:
        """Complete lines from the last to the first, each with its offset; bytes after the last newline are skipped."""
        with self._reader() as file:
            if file is None:
                return
            place = file.seek(0, os.SEEK_END)
            rest, is_incomplete = b"", True
            while place > 0:
                begin = max(0, place - _BLOCK)
                data = os.pread(file.fileno(), place - begin, begin) + rest
                place, end = begin, begin + len(data)
                rest, *lines = data.split(b"\n")  # the first one may start in an earlier block
                if lines and is_incomplete:
                    end -= len(lines.pop()) + 1
                    is_incomplete = False
                for line in reversed(lines):
                    end -= len(line)
                    yield end, line
                    end -= 1
            if not is_incomplete:
                yield 0, rest

    @contextlib.contextmanager
    def _reader(self) -> Iterator[io.BufferedReader | None]:
        """The file, open for reading; None if it is missing."""
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
        """Parses and checks a line.

        Raises:
            RunError: It is invalid; names the file, the line and the problem.
        """
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.path}:{number}: not JSON ({error}); remove the line") from error
        if not isinstance(row, dict):
            got = type(row).__name__
            raise RunError(f"{self.path}:{number}: expected a JSON object, got {got}; remove the line")
        if (problem := self._problem(cast(Row, row))) is not None:
            raise RunError(f"{self.path}:{number}: {problem}; correct or remove the line")
        return cast(Row, row)

    def _open(self) -> int:
        if self._descriptor is None:
            is_new = not self.path.exists()
            descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            _truncate_incomplete_line(descriptor)
            self._descriptor = descriptor
            if is_new:
                sync_directory(self.path.parent)
        return self._descriptor


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file, and nothing else: a pipe would block, and a link may lead to other users' files.

    Raises:
        FileNotFoundError: It is missing, and `flags` do not create it.
        RunError: It is no regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path}: {_irregular(path) or f'cannot be read: {error.strerror}'}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{path}: {_irregular(path) or 'is no regular file'}")
    return descriptor


def _irregular(path: Path) -> str:
    """A message if the path is no regular file; empty for one, and if the path cannot be read."""
    try:
        kind = file_kind(path.lstat().st_mode)
    except OSError:
        return ""
    return f"is {kind}, not a regular file; replace it by the file, or remove it" if kind else ""


def file_kind(mode: int) -> str:
    """The kind of a file from `st_mode`, for messages: "a directory", "a pipe"; empty for a regular file."""
    kinds = {
        stat.S_IFREG: "", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "a device")


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file atomically: after a kill or a power cut it is either the old version or the new one.

    Raises:
        RunError: It could not be written; the old version is unchanged.
    """
    replace(path, (json.dumps(value, indent=2, default=_to_json_value) + "\n").encode())


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        RunError: The file is missing, unreadable or no JSON.
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
        RunError: It could not be written; the old version is unchanged.
    """
    with _replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """A temporary file that replaces `path` when the block ends; see `replace`."""
    # Threads of one process may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        hit_failpoint("file-written")
        os.replace(temporary, path)
        hit_failpoint("file-renamed")
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written: {error}") from error


def sync_directory(path: Path) -> None:
    """Syncs the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_json_value(value: Any) -> Any:
    """Converts numpy and jax scalars to Python's, without importing either, and paths to strings."""
    if isinstance(value, Path):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 0) == 1:
        return item()
    raise TypeError(f"cannot be written as JSON: {type(value).__name__}")


def _truncate_incomplete_line(descriptor: int) -> None:
    """Truncates the file after its last newline; reads from the end, which is fast in a long file."""
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
