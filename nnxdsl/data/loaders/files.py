"""Rows with their positions, in chunks of which one process converts one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from nnxdsl.config.core.strict_json import parse_json

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

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        return RowError, (self.kind, self.what)


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        place: `file:line`, or `file:row N` where rows are no lines; both from 1.
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
        values: The fields of its rows, or why one cannot be read.
        position: Bytes of the file that are read, about.
    """

    place: str
    first: int
    values: Sequence[Mapping[str, Any] | RowError]
    position: int

    def rows(self) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
        """The number of each row and its fields, without null fields, or why it cannot be read."""
        for number, value in enumerate(self.values, start=self.first):
            if isinstance(value, RowError):
                yield number, value
            else:
                yield number, {key: item for key, item in value.items() if item is not None}


Chunk = LineChunk | ValueChunk


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
    return checked_object(value, "\\ud" in text or "\\uD" in text)


def checked_object(value: object, may_have_surrogates: bool) -> dict[str, Any] | RowError:
    """A JSON value as a row without null fields, or why it is none."""
    if not isinstance(value, dict):
        return RowError("not an object", f"expected an object with fields, got {kind_of(value)}")
    if may_have_surrogates:
        # JSON can escape half a surrogate pair, which no tokenizer can encode.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            return RowError(
                "bad UTF-8", "bad text: half of a surrogate pair (\\ud800 to \\udfff) without its other half"
            )
    return {key: item for key, item in value.items() if item is not None}


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
