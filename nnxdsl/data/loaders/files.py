"""Rows of files with their positions: JSONL and Parquet, streamed."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nnxdsl.config.core.strict_json import parse_json
from nnxdsl.errors import DataError

MAX_LINE = 16 * 2**20
"""Maximal bytes of a line of JSONL; longer lines mean a broken file."""

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


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a `.parquet` or JSONL file, one at a time, without null fields.

    A row that cannot be read is a `RowError`, and the rows after it are still read.

    Raises:
        DataError: The file is missing, a directory, or not readable as Parquet.
    """
    file = existing_file(path)
    return _parquet_rows(path, file) if file.suffix == ".parquet" else _jsonl_rows(path, file)


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


def _jsonl_rows(path: str, file: Path) -> Iterator[Row]:
    try:
        with file.open("rb") as handle:
            for number, line in enumerate(_lines(handle), start=1):
                place = f"{path}:{number}"
                if line is None:
                    yield Row(place, RowError("line too long", f"the line is longer than {MAX_LINE // 2**20} MiB"))
                    continue
                line = line.removeprefix(_BOM) if number == 1 else line
                if line.strip():
                    yield Row(place, _parse(line))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


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


def _parquet_rows(path: str, file: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install 'nnxdsl[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    fields = {key: item for key, item in value.items() if item is not None}
                    yield Row(f"{path}:row {number}", fields)
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
