"""sha256 digests of files; those of large files are cached until the file changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs

from nnxdsl.errors import DataError

DIGEST_CACHE = "digests.json"
LARGE = 16 * 2**20
"""Minimum size in bytes of files whose digests are cached; smaller files are read again."""
_MAX_ENTRIES = 1000
_STABLE_SECONDS = 2.0
"""Seconds since a file's last change after which a further change shows in its time, whatever the file system."""


def combined_digest(digests: Iterable[str]) -> str:
    """sha256 hex of several sources together."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@attrs.frozen
class Digests:
    """Digests of files.

    Attributes:
        memory: A JSON file that caches the digests of large files; it may be deleted. None reads every file.
        large: Minimum size in bytes of files whose digests are cached.
    """

    memory: Path | None = None
    large: int = LARGE

    def of_file(self, name: str, path: Path) -> str:
        """sha256 hex of a file; raises DataError if it cannot be read."""
        try:
            if path.stat().st_size < self.large:
                return _digest(path)
            return self.cached([path], "sha256", lambda: _digest(path))
        except OSError as error:
            raise DataError(f"{name}: cannot be read: {error.strerror}") from error

    def cached(self, files: Iterable[Path], what: str, compute: Callable[[], str]) -> str:
        """What `compute` gives for some files, cached until one of them changes.

        Raises:
            OSError: A file cannot be read.
        """
        stamps = [_stamp(file) for file in files]
        key, stored = json.dumps([what, stamps]), self._read()
        if key in stored:
            return stored[key]
        digest, now = compute(), time.time_ns()
        unchanged = [_stamp(Path(str(stamp[0]))) for stamp in stamps] == stamps
        if (
            self.memory is not None
            and unchanged
            and all(now - int(stamp[2]) > _STABLE_SECONDS * 1e9 for stamp in stamps)
        ):
            self._write({**self._read(), key: digest})
        return digest

    def _read(self) -> dict[str, str]:
        try:
            stored = json.loads(self.memory.read_text()) if self.memory is not None else {}
        except (OSError, ValueError):
            return {}
        is_whole = isinstance(stored, dict) and all(isinstance(digest, str) for digest in stored.values())
        return stored if is_whole else {}

    def _write(self, stored: dict[str, str]) -> None:
        assert self.memory is not None
        last = dict(list(stored.items())[-_MAX_ENTRIES:])
        temporary = self.memory.with_name(f".{self.memory.name}-{os.getpid()}")
        # A full disk or a directory that cannot be written costs the next start a reading, and nothing else.
        with contextlib.suppress(OSError):
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(last, indent=1))
            os.replace(temporary, self.memory)


def _stamp(file: Path) -> list[str | int]:
    stat = file.stat()
    return [os.path.realpath(file), stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
