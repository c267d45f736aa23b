"""Reads files of model directories safely: regular files only, and JSON within limits of depth and magnitude."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnxdsl.config.core.strict_json import is_nested_beyond
from nnxdsl.errors import WeightsError
from nnxdsl.storage.jsonl import file_kind

MAX_DEPTH = 32
"""Nesting of objects and lists in a JSON file; published ones have about five levels."""
MAX_NUMBER = 1e30
"""Largest number in a JSON file; its square is finite in float64."""

_TOO_DEEP = f"damaged: nested deeper than {MAX_DEPTH} levels"
PICKLE_REFUSED = "would be read with pickle, which runs any code that a file holds, so it is not read"


def file_size(file: Path) -> int:
    """The size in bytes of a regular file; refuses all others, since reading a pipe or a device may never end.

    Raises:
        WeightsError: The file is missing or not regular.
    """
    try:
        stats = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise WeightsError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(stats.st_mode):
        raise WeightsError(f"{file}: expected a regular file, it is {file_kind(stats.st_mode)}")
    return stats.st_size


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object, such as a `config.json`.

    Raises:
        WeightsError: The file is missing or not JSON; it holds no object, NaN, infinity or a number beyond
            `MAX_NUMBER`, or is nested deeper than `MAX_DEPTH`.
    """
    file_size(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise WeightsError(f"{file}: damaged: not JSON: {error}") from None
    except RecursionError:
        raise WeightsError(f"{file}: {_TOO_DEEP}") from None
    if is_nested_beyond(value, MAX_DEPTH):
        raise WeightsError(f"{file}: {_TOO_DEEP}")
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: expected a JSON object, got {type(value).__name__}")
    for path, number in _numbers(value):
        if not abs(number) <= MAX_NUMBER:
            got = (
                number if isinstance(number, float) and not math.isfinite(number) else f"a number above {MAX_NUMBER:g}"
            )
            raise WeightsError(f"{file}: {path}: expected a finite number, got {got}")
    return value


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    """All numbers of a JSON value with their dotted paths."""
    if isinstance(value, int | float):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _numbers(item, f"{path}.{name}" if path else str(name))
