"""Files of model directories, opened with care: regular ones alone, and JSON whose values any reader can hold."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from nnxdsl.errors import WeightsError

MAX_DEPTH = 32
"""Objects and lists within each other in a file of settings; published ones have about five."""
MAX_NUMBER = 1e30
"""Above every number that a file of settings has a use for; its square is still finite in float64."""


def file_size(file: Path) -> int:
    """The bytes of a regular file, which alone may be opened: reading a pipe or a device may never end.

    Raises:
        WeightsError: there is no such file, or it is no regular one.
    """
    try:
        found = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise WeightsError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = next((what for is_it, what in _KINDS.items() if is_it(found.st_mode)), "no regular file")
        raise WeightsError(f"{file}: expected a regular file, it is {kind}")
    return found.st_size


_KINDS = {
    stat.S_ISDIR: "a directory",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def read_json(file: Path) -> dict[str, Any]:
    """The object that a file of settings holds.

    Raises:
        WeightsError: the file is missing or not JSON; it holds no object, NaN, infinity or a number beyond
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
        raise WeightsError(f"{file}: damaged: nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: expected a JSON object, got {type(value).__name__}")
    _check_values(file, value)
    return value


def _check_values(file: Path, tree: dict[str, Any]) -> None:
    """Refuses what no later reader should have to expect; without recursion, which deep trees would break."""
    level: list[tuple[str, Any]] = [("", tree)]
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, dict):
                below += ((f"{path}.{name}" if path else name, item) for name, item in value.items())
            elif isinstance(value, list):
                below += ((f"{path}.{number}", item) for number, item in enumerate(value))
            elif isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
                what = (
                    value if isinstance(value, float) and not math.isfinite(value) else f"a number above {MAX_NUMBER:g}"
                )
                raise WeightsError(f"{file}: {path}: expected a finite number, got {what}")
        if not below:
            return
        level = below
    raise WeightsError(f"{file}: damaged: nested deeper than {MAX_DEPTH} levels")
