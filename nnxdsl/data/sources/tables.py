"""Rows that a library reads: JSON lists, CSV, Parquet and Arrow."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nnxdsl.config.core.strict_json import parse_json
from nnxdsl.data.loaders.files import MAX_LINE, Chunk, RowError, ValueChunk, checked_object
from nnxdsl.data.sources.compression import open_bytes
from nnxdsl.errors import DataError

ROWS = 1024
"""Rows of a chunk."""


def is_list(path: str, file: Path) -> bool:
    """Whether a JSON file holds a list; else each line is one object."""
    with open_bytes(path, file) as (handle, _):
        return handle.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def list_chunks(path: str, file: Path) -> Iterator[Chunk]:
    """The objects of a JSON list, which is read as a whole."""
    with open_bytes(path, file) as (handle, read):
        content, size = handle.read(), read()
    try:
        text = content.decode("utf-8-sig")
        values = parse_json(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: bad UTF-8: byte 0x{error.object[error.start]:02x} at {error.start + 1}") from error
    except json.JSONDecodeError as error:
        hint = "; name it .jsonl if each line is one list" if error.msg == "Extra data" else ""
        raise DataError(f"{path}:{error.lineno}: bad JSON at column {error.colno}: {error.msg}{hint}") from error
    except ValueError as error:
        raise DataError(f"{path}: bad JSON: {error}") from error
    rows = (checked_object(value, "\\ud" in text or "\\uD" in text) for value in values)
    return _chunks(path, rows, size, len(values))


def csv_chunks(path: str, file: Path) -> Iterator[Chunk]:
    """The rows of a table of text with a header; separated by tabs if the name says `.tsv`."""
    csv.field_size_limit(MAX_LINE)
    delimiter, number = "\t" if ".tsv" in file.suffixes[-2:] else ",", 0
    with open_bytes(path, file) as (handle, read):
        lines = csv.reader(io.TextIOWrapper(handle, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
        try:
            header = next(lines, [])
            _check_header(path, header)
            rows = (_cells(header, cells) for cells in lines if cells)
            while values := list(itertools.islice(rows, ROWS)):
                yield ValueChunk(f"{path}:row ", number + 1, values, read())
                number += len(values)
        except csv.Error as error:
            raise DataError(f"{path}:{lines.line_num}: bad CSV: {error}") from error
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise DataError(f"{path}: bad UTF-8 after line {lines.line_num}: byte 0x{byte:02x}") from error


def _check_header(path: str, header: list[str]) -> None:
    if not header:
        raise DataError(f"{path}: is empty; the first line of CSV names the columns")
    for name in header:
        if not name.strip() or header.count(name) > 1:
            why = "twice" if name.strip() else "without a name"
            raise DataError(f"{path}:1: the first line of CSV names the columns, and has {name.strip()!r} {why}")


def _cells(header: list[str], cells: list[str]) -> dict[str, Any] | RowError:
    if len(cells) != len(header):
        return RowError("wrong number of cells", f"the row has {len(cells)} cells, and the header {len(header)}")
    return dict(zip(header, cells, strict=True))


def parquet_chunks(path: str, file: Path) -> Iterator[Chunk]:
    """The rows of a Parquet file."""
    arrow, parquet = pyarrow(path, "Parquet"), pyarrow(path, "Parquet", ".parquet")
    number, size = 0, file.stat().st_size
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=ROWS):
                values = values_of(batch)
                position = size * (number + len(values)) // table.metadata.num_rows
                yield ValueChunk(f"{path}:row ", number + 1, values, position)
                number += len(values)
    except (arrow.ArrowException, OSError) as error:
        after = f" after row {number}" if number else ""
        raise DataError(f"{path}: no readable Parquet file{after}: {str(error).splitlines()[0]}") from error


def arrow_chunks(path: str, file: Path) -> Iterator[Chunk]:
    """The rows of an Arrow file or stream, Feather version 2 among them."""
    arrow, ipc = pyarrow(path, "Arrow"), pyarrow(path, "Arrow", ".ipc")
    number, size = 0, file.stat().st_size
    try:
        with arrow.memory_map(str(file)) as handle:
            for batch in _batches(arrow, ipc, handle):
                for begin in range(0, batch.num_rows, ROWS):
                    values = values_of(batch.slice(begin, ROWS))
                    yield ValueChunk(f"{path}:row ", number + 1, values, min(size, handle.tell()))
                    number += len(values)
    except (arrow.ArrowException, OSError) as error:
        after = f" after row {number}" if number else ""
        raise DataError(f"{path}: no readable Arrow file{after}: {str(error).splitlines()[0]}") from error


def _batches(arrow: Any, ipc: Any, handle: Any) -> Iterator[Any]:
    try:
        reader = ipc.open_file(handle)
    except arrow.ArrowInvalid:
        handle.seek(0)
        yield from ipc.open_stream(handle)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def pyarrow(path: str, what: str, module: str = "") -> Any:
    """A module of pyarrow; raises DataError that says what to install."""
    try:
        return importlib.import_module(f"pyarrow{module}")
    except ImportError as error:
        raise DataError(f"{path}: reading {what} needs pyarrow: pip install 'nnxdsl[parquet]'") from error


def values_of(table: Any) -> list[dict[str, Any]]:
    """The rows of an Arrow table or batch without null fields: its structs have the fields of all rows."""
    return [_without_nulls(row) for row in table.to_pylist()]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _chunks(path: str, rows: Iterable[Mapping[str, Any] | RowError], size: int, total: int) -> Iterator[Chunk]:
    number, rows = 0, iter(rows)
    while values := list(itertools.islice(rows, ROWS)):
        yield ValueChunk(f"{path}:row ", number + 1, values, size * (number + len(values)) // total)
        number += len(values)
