"""Reads JSON strictly: refuses what parsers would read differently from each other. Knows no spec and no file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

MAX_DEPTH = 64
"""Levels of nesting that are read; no data needs more, and recursive functions stay within Python's stack."""


def parse_json(text: str) -> Any:
    """Parses one JSON value.

    Raises:
        ValueError: The text is no JSON (`json.JSONDecodeError`), an object has a key twice, a number is NaN, infinite
            or out of range, or the value is nested deeper than `MAX_DEPTH` levels.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant, parse_float=_finite_float)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH and is_nested_beyond(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds the object of its keys and values, as `object_pairs_hook` of the json module.

    Raises:
        ValueError: A key is repeated.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{twice[:80]}' is repeated in one object")
    return result


_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; write null, or a finite number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is out of the range of a double")
    return value


def is_nested_beyond(value: object, levels: int) -> bool:
    """Whether objects and lists are nested deeper than so many levels; needs no recursion."""
    containers = _containers([value])
    for _ in range(levels):
        containers = [child for item in containers for child in _containers(_children(item))]
        if not containers:
            return False
    return True


def _containers(values: Iterable[object]) -> list[object]:
    return [value for value in values if isinstance(value, Mapping | list)]


def _children(value: object) -> Iterable[object]:
    return cast("Mapping[str, object]", value).values() if isinstance(value, Mapping) else cast("list[object]", value)
