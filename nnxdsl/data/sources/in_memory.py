"""Rows in memory, saved once in a file that is named after its content."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nnxdsl.data.sources.tables import ROWS, values_of
from nnxdsl.errors import DataError


def save_rows(rows: Any, directory: str | Path = "data") -> str:
    """Saves rows as JSONL and returns the path, for `Data.Preferences(path)` and the like.

    The name of the file is a digest of its content: equal rows are the same file, so that an experiment with that path
    stays plain JSON, keeps its id, and can be resumed.

    Args:
        rows: Dicts, a `datasets.Dataset`, a pyarrow table, or a pandas or polars frame. Null values are left out.
        directory: Where the file is saved; created if it is missing.

    Raises:
        DataError: There are no rows, one is not a dict of JSON values, or the file cannot be written.
    """
    place, digest = Path(directory), hashlib.sha256()
    temporary = place / f".rows-{os.getpid()}.jsonl"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for number, row in enumerate(_rows(rows), start=1):
                line = _line(number, row)
                digest.update(line)
                file.write(line)
            if not file.tell():
                raise DataError("save_rows: there are no rows")
        target = place / f"rows-{digest.hexdigest()[:16]}.jsonl"
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"{place}: rows cannot be saved: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return str(target)


def _rows(rows: Any) -> Iterator[Any]:
    """The rows of whatever holds them; libraries are not imported: whoever has a frame has its library."""
    if isinstance(rows, Mapping):
        raise DataError(f"save_rows: expected rows, got {type(rows).__name__}; give one split, such as rows['train']")
    if hasattr(rows, "with_format"):  # datasets.Dataset
        for table in rows.with_format("arrow").iter(ROWS):
            yield from values_of(table)
    elif hasattr(rows, "to_batches"):  # pyarrow.Table
        for batch in rows.to_batches(ROWS):
            yield from values_of(batch)
    elif hasattr(rows, "iter_rows"):  # polars.DataFrame
        yield from rows.iter_rows(named=True)
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas.DataFrame
        yield from rows.to_dict("records")
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        yield from rows
    else:
        raise DataError(f"save_rows: expected dicts or a frame, got {type(rows).__name__}")


def _line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"save_rows: row {number}: expected a dict, got {type(row).__name__}")
    values = {str(name): value for name, value in row.items() if not _is_null(value)}
    try:
        return json.dumps(values, default=_plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"save_rows: row {number}: is not of JSON values: {error}") from error


def _is_null(value: Any) -> bool:
    """None, or the NaN and NA with which pandas writes a missing value."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def _plain(value: Any) -> Any:
    """Numpy's values and arrays, and times."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"{type(value).__name__} is no JSON value")
