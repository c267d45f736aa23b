"""Fields of a row, taken out with a check of their type. Knows what to say if it is wrong, not what the fields mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nnxdsl.data.loaders.files import RowError, kind_of

Fields = Mapping[str, Any]


def require(row: Fields, names: Iterable[str], reads: str) -> None:
    """Refuses a row that lacks one of `names`; `reads` says what would be right.

    Raises:
        RowError: Names the first field that is missing and those that are there.
    """
    for name in names:
        if name not in row:
            has = ", ".join(row) or "nothing"
            raise RowError("missing field", f"field '{name}' is missing; this row has: {has}; {reads}")


def other_forms(row: Fields, read: str, others: Iterable[str]) -> tuple[str, ...]:
    """What is odd about a row that also has fields of another form, which are not read.

    Args:
        row: The fields.
        read: Names of the form that is read, for people.
        others: Names of the fields of other forms.
    """
    also = ", ".join(name for name in others if name in row)
    return (f"two forms ({read} is read, {also} is not)",) if also else ()


def read_text(row: Fields, name: str) -> str:
    """A field that must be text.

    Raises:
        RowError: It is something else.
    """
    value = row[name]
    if not isinstance(value, str):
        raise RowError("wrong type", f"field '{name}': expected text, got {kind_of(value)}")
    return value


def read_ids(row: Fields, name: str, vocab_size: int) -> list[int]:
    """A field that must be a list of token ids below `vocab_size`.

    Raises:
        RowError: It is something else, or an id is out of range.
    """
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
    """A field that must be text or a list (of messages, which are checked where they are read).

    Raises:
        RowError: It is something else.
    """
    value = row[name]
    if not isinstance(value, str | list):
        raise RowError("wrong type", f"field '{name}': expected text or a list of messages, got {kind_of(value)}")
    return value
