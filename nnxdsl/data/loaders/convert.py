"""Converts chunks of rows to token ids, in this process or a worker."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.data.loaders.files import Chunk, RowError, kind_of
from nnxdsl.data.loaders.layouts import UNCHANGED, Reading
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.messages import texts
from nnxdsl.errors import DataError

BYTE_PARTS = frozenset({"target", "completion_mask", "chosen_mask", "rejected_mask", "margin"})
"""Parts whose values are bytes: masks, of 0 and 1, and the float32 number of a margin."""


class Example(NamedTuple):
    """One row as ids.

    Attributes:
        parts: Ids by part; every example of a dataset has the same parts.
        cut: Parts that were truncated.
        odd: Warnings for the report, such as "merged border".
        chat: Whether the row was a chat.
        columns: The row's fields if rewards read them, else None.
    """

    parts: Mapping[str, Sequence[int]]
    cut: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    chat: bool = False
    columns: dict[str, Any] | None = None


@attrs.define
class Converted:
    """A chunk of rows as ids, with all that the report of the data counts.

    Attributes:
        place: Beginning of the places of its rows.
        position: Bytes of its file that are read.
        numbers: Number of each accepted row.
        hashes: 64 bits of each accepted row's ids, by which duplicates are found.
        values: Ids by part, row after row.
        lengths: Ids of each row, by part.
        columns: JSON of each row's fields, where rewards read them.
        rows: Rows read, bad ones included.
        chats: Accepted rows that are chats.
        cut: Accepted rows with a truncated part, by part.
        unread: Accepted rows with a column that is not read, by column.
        warnings: Accepted rows with a warning by kind: how many, and the number of the first.
        bad: Bad rows: number, kind and reason.
    """

    place: str
    position: int
    numbers: array[int] = attrs.field(factory=lambda: array("q"))
    hashes: array[int] = attrs.field(factory=lambda: array("Q"))
    values: dict[str, array[int]] = attrs.field(factory=dict)
    lengths: dict[str, array[int]] = attrs.field(factory=dict)
    columns: list[bytes] = attrs.field(factory=list)
    rows: int = 0
    chats: int = 0
    cut: Counter[str] = attrs.field(factory=Counter)
    unread: Counter[str] = attrs.field(factory=Counter)
    warnings: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    bad: list[tuple[int, str, str]] = attrs.field(factory=list)

    def warn(self, kind: str, number: int) -> None:
        """Counts a warning for a row."""
        count, first = self.warnings.get(kind, (0, number))
        self.warnings[kind] = count + 1, first


@attrs.frozen
class Conversion:
    """Converts chunks of rows.

    Attributes:
        convert: From a row's fields to an example; raises RowError for a bad row.
        parts: Names of the parts of every example.
        tokenizer: Decodes ids in messages; None leaves them out.
        vocabulary: Rows with larger ids are bad; None does not check.
        reads: Columns that `convert` reads; the others are counted. None for all columns.
        reading: Brings a row into the columns of `convert`.
    """

    convert: Callable[[Mapping[str, Any]], Example]
    parts: Sequence[str]
    tokenizer: TokenizerBase | None = None
    vocabulary: int | None = None
    reads: Collection[str] | None = None
    reading: Reading = UNCHANGED

    def __call__(self, chunk: Chunk) -> Converted:
        """The rows of a chunk as ids.

        Raises:
            DataError: `convert` raised it; the row's place is added.
        """
        out = Converted(chunk.place, chunk.position)
        for name in self.parts:
            out.values[name], out.lengths[name] = array("B" if name in BYTE_PARTS else "i"), array("i")
        for number, value in chunk.rows():
            out.rows += 1
            try:
                if isinstance(value, RowError):
                    raise value
                value = self.reading(value)
                example = self.convert(value)
                self._require_in_vocabulary(example)
                columns = None if example.columns is None else _to_json(example.columns)
            except RowError as error:
                out.bad.append((number, error.kind, error.what))
                continue
            except DataError as error:
                raise DataError(f"{chunk.place}{number}: {error}") from error
            self._accept(out, number, value, example)
            if columns is not None:
                out.columns.append(columns)
        return out

    def _accept(self, out: Converted, number: int, row: Mapping[str, Any], example: Example) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for name in self.parts:
            ids = array(out.values[name].typecode, example.parts[name])
            out.values[name].extend(ids)
            out.lengths[name].append(len(ids))
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        out.hashes.append(int.from_bytes(digest.digest(), "little"))
        out.numbers.append(number)
        out.cut.update(example.cut)
        out.chats += example.chat
        for kind in dict.fromkeys(_warnings(example, row)):
            out.warn(kind, number)
        if self.reads is not None:
            out.unread.update(name for name in row if name not in self.reads)

    def _require_in_vocabulary(self, example: Example) -> None:
        if self.vocabulary is None:
            return
        token = max((max(ids, default=0) for name, ids in example.parts.items() if name not in BYTE_PARTS), default=0)
        if token >= self.vocabulary:
            text = "" if self.tokenizer is None else self.tokenizer.decode([token], skip_special=False)
            named = f" ({text!r})" if text else ""
            raise RowError(
                "unknown id", f"token {token}{named} is beyond the model's vocabulary of {self.vocabulary:,}"
            )


def _warnings(example: Example, row: Mapping[str, Any]) -> Iterator[str]:
    yield from example.odd
    if any("\0" in text for text in texts(row)):
        yield "nul character"


def _to_json(columns: Mapping[str, Any]) -> bytes:
    def plain(value: object) -> str:
        if hasattr(value, "isoformat"):
            return cast("Any", value).isoformat()
        raise RowError("wrong type", f"a column has {kind_of(value)}, which no reward can be given; leave it out")

    return json.dumps(columns, default=plain, ensure_ascii=False).encode("utf-8", "surrogatepass")


def as_array(values: array[int]) -> npt.NDArray[Any]:
    """The values as a numpy array that shares their memory."""
    return np.frombuffer(values, values.typecode) if len(values) else np.zeros(0, values.typecode)
