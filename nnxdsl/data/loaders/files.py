"""Rows of files with their positions: JSONL and Parquet, streamed."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import attrs

from nnxdsl.config.core.strict_json import parse_json
from nnxdsl.errors import DataError

MAX_LINE = 16 * 2**20
"""Maximal bytes of a line of JSONL; longer lines mean a broken file."""

CHUNK_BYTES = 2**20
"""About the size of a chunk of rows, which one process converts at a time."""

_BOM = b"\xef\xbb\xbf"


class RowError(Exception):
    """A bad row: `kind` is its name in the report, `what` the reason."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        place: `file:line`, or `file:row N` for Parquet; both from 1.
        value: Its fields, or the reason why it cannot be read.
    """

    place: str
    value: dict[str, Any] | RowError


@attrs.frozen
class LineChunk:
    """Lines of a JSONL file, which are parsed where they are used: in a worker process.

    Attributes:
        place: Beginning of the places of its rows, `file:`.
        first: Number of its first line, from 1.
        lines: Its lines; None for one that is too long.
        position: Bytes of the file that are read.
    """

    place: str
    first: int
    lines: Sequence[bytes | None]
    position: int

    def rows(self) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """The number and the fields of each row, without null fields, or why it cannot be read; skips blank lines."""
        for number, line in enumerate(self.lines, start=self.first):
            if line is None:
                yield number, RowError("line too long", f"the line is longer than {MAX_LINE // 2**20} MiB")
                continue
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, _parse(line)


@attrs.frozen
class ValueChunk:
    """Rows that a library has read.

    Attributes:
        place: Beginning of the places of its rows, `file:row `.
        first: Number of its first row, from 1.
        values: The fields of its rows.
        position: Bytes of the file that are read, about.
    """

    place: str
    first: int
    values: Sequence[Mapping[str, Any]]
    position: int

    def rows(self) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """The number of each row and its fields, without null fields."""
        for number, value in enumerate(self.values, start=self.first):
            yield number, {key: item for key, item in value.items() if item is not None}


Chunk = LineChunk | ValueChunk


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a `.parquet` or JSONL file, one at a time, without null fields.

    A row that cannot be read is a `RowError`, and the rows after it are still read.

    Raises:
        DataError: The file is missing, a directory, or not readable as Parquet.
    """
    chunks = read_chunks(path)
    return (Row(f"{chunk.place}{number}", value) for chunk in chunks for number, value in chunk.rows())


def place_of(path: str) -> str:
    """The beginning of the places of a file's rows."""
    return f"{path}:row " if path.endswith(".parquet") else f"{path}:"


def read_chunks(path: str) -> Iterator[Chunk]:
    """The rows of a file in chunks of about `CHUNK_BYTES`; see `read_rows`."""
    file = existing_file(path)
    return _parquet_chunks(path, file) if file.suffix == ".parquet" else _line_chunks(path, file)


def existing_file(path: str) -> Path:
    """The existing file at `path`; raises DataError if there is none."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise DataError(f"{path}: is a directory; give one JSONL or Parquet file")
    base = "" if file.is_absolute() else f" (looked in the current directory, {os.getcwd()})"
    raise DataError(f"{path}: no such file{base}")


def file_digest(path: str) -> str:
    """sha256 hex of a file; raises DataError if it is missing or cannot be read."""
    file = existing_file(path)
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _line_chunks(path: str, file: Path) -> Iterator[Chunk]:
    first, lines, size, position = 1, [], 0, 0
    try:
        with file.open("rb") as handle:
            for line in _lines(handle):
                lines.append(line)
                size += len(line or b"")
                position = handle.tell()
                if size >= CHUNK_BYTES:
                    yield LineChunk(place_of(path), first, lines, position)
                    first, lines, size = first + len(lines), [], 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if lines:
        yield LineChunk(place_of(path), first, lines, position)


def _lines(handle: BinaryIO) -> Iterator[bytes | None]:
    """Lines as bytes; None for one over the limit, which is skipped without being read into memory."""
    while line := handle.readline(MAX_LINE + 1):
        if len(line) <= MAX_LINE:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = handle.readline(MAX_LINE)
        yield None


def _parse(line: bytes) -> dict[str, Any] | RowError:
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        return RowError("bad UTF-8", f"bad UTF-8: byte 0x{byte:02x} at position {error.start + 1}: {error.reason}")
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        hint = "; JSONL wants one whole object on each line" if text.strip() in "[{" else ""
        return RowError("bad JSON", f"bad JSON at column {error.colno}: {error.msg}{hint}")
    except ValueError as error:  # accepted by some parsers, but ambiguous
        return RowError("bad JSON", f"bad JSON: {error}")
    if not isinstance(value, dict):
        return RowError("not an object", f"expected an object with fields, got {kind_of(value)}")
    if "\\ud" in text or "\\uD" in text:
        # JSON can escape half a surrogate pair, which no tokenizer can encode.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return RowError(
                "bad UTF-8", "bad text: half of a surrogate pair (\\ud800 to \\udfff) without its other half"
            )
    return {key: item for key, item in value.items() if item is not None}


def _parquet_chunks(path: str, file: Path) -> Iterator[Chunk]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install 'nnxdsl[parquet]'") from error
    number, size = 0, file.stat().st_size
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                values = batch.to_pylist()
                yield ValueChunk(
                    place_of(path), number + 1, values, size * (number + len(values)) // table.metadata.num_rows
                )
                number += len(values)
    except (arrow.ArrowException, OSError) as error:
        after = f" after row {number}" if number else ""
        raise DataError(f"{path}: no readable Parquet file{after}: {str(error).splitlines()[0]}") from error


def kind_of(value: object) -> str:
    """A description of a JSON value for messages."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return "text"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return type(value).__name__
