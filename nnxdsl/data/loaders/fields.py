"""Fields of rows, read with a check of their type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from nnxdsl.data.loaders.files import RowError, kind_of

Fields = Mapping[str, Any]


def require(row: Fields, names: Iterable[str], reads: str) -> None:
    """Raises RowError for the first of `names` that a row lacks; `reads` is the advice in its message."""
    for name in names:
        if name not in row:
            has = ", ".join(row) or "nothing"
            raise RowError("missing field", f"field '{name}' is missing; this row has: {has}; {reads}")


def other_forms(row: Fields, read: str, others: Iterable[str]) -> tuple[str, ...]:
    """A warning if a row read as the form `read` also has fields of other forms, which are not read."""
    also = ", ".join(name for name in others if name in row)
    return (f"two forms ({read} is read, {also} is not)",) if also else ()


def read_text(row: Fields, name: str) -> str:
    """A field of text; raises RowError for another type."""
    value = row[name]
    if not isinstance(value, str):
        raise RowError("wrong type", f"field '{name}': expected text, got {kind_of(value)}")
    return value


def read_number(row: Fields, name: str) -> float:
    """A field with a finite number; raises RowError where it is missing, or of another type."""
    require(row, (name,), "data.margin names the column of margins")
    value = row[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RowError("wrong type", f"field '{name}': expected a finite number, got {kind_of(value)}")
    return float(value)


def read_ids(row: Fields, name: str, vocab_size: int) -> list[int]:
    """A field of token ids below `vocab_size`; raises RowError for another type or an id out of range."""
    value = row[name]
    if not isinstance(value, list):
        raise RowError("wrong type", f"field '{name}': expected a list of token ids, got {kind_of(value)}")
    for place, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise RowError("wrong type", f"field '{name}'[{place}]: expected a token id, got {kind_of(token)}")
        if not 0 <= token < vocab_size:
            raise RowError(
                "wrong type", f"field '{name}'[{place}]: {token} is no token id; ids are 0 to {vocab_size - 1}"
            )
    return value


def read_text_or_chat(row: Fields, name: str) -> str | list[Any]:
    """A field of text or a list (of messages, which `read_messages` checks); raises RowError for another type."""
    value = row[name]
    if not isinstance(value, str | list):
        raise RowError("wrong type", f"field '{name}': expected text or a list of messages, got {kind_of(value)}")
    return value
