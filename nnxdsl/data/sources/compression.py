"""Files as bytes, decompressed by their name: `.gz` and `.zst`."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from nnxdsl.errors import DataError

COMPRESSED = (".gz", ".zst")
_PIECE = 2**14


@contextlib.contextmanager
def open_bytes(path: str, file: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The bytes of a file without its compression, and a function that gives how many bytes of the file are read.

    Args:
        path: Its name in messages.
        file: Where it is.

    Raises:
        DataError: It cannot be read, is damaged or ends too early, or a library is missing.
    """
    zstandard = _zstandard(path) if file.suffix == ".zst" else None
    damage = (zlib.error, *(() if zstandard is None else (zstandard.ZstdError,)))
    try:
        with file.open("rb") as raw:
            if file.suffix == ".gz":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=raw)), raw.tell
            elif zstandard is not None:
                yield cast("BinaryIO", io.BufferedReader(_ZstdReader(raw, zstandard))), raw.tell
            else:
                yield raw, raw.tell
    except EOFError as error:
        raise DataError(f"{path}: the compressed file ends too early; was it copied whole?") from error
    except (gzip.BadGzipFile, *damage) as error:
        raise DataError(f"{path}: is no readable {file.suffix} file: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise DataError(f"{path}: reading .zst needs zstandard: pip install 'nnxdsl[zstd]'") from error


class _ZstdReader(io.RawIOBase):
    """Frames of zstd one after another; zstandard's own reader takes a file that ends too early for a whole one."""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw, self._new = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._compressed = self._bytes = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._bytes:
            self._compressed = self._compressed or self._raw.read(_PIECE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError
                return 0
            frame = self._frame or self._new()
            self._bytes = frame.decompress(self._compressed)
            self._frame, self._compressed = (None, frame.unused_data) if frame.eof else (frame, b"")
        count = min(len(buffer), len(self._bytes))
        buffer[:count], self._bytes = self._bytes[:count], self._bytes[count:]
        return count
