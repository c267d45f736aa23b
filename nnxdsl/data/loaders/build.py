"""From a file to a dataset: rows are read, converted to ids and counted; bad ones follow a policy."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import BadRows, Data
from nnxdsl.data.dataset import Dataset, TokenizedRows
from nnxdsl.data.loaders.files import RowError, file_digest, read_rows
from nnxdsl.data.loaders.report import Length, Report
from nnxdsl.data.ragged import Ragged, RaggedBuilder
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.messages import texts
from nnxdsl.errors import DataError

SHOWN = 5
"""Bad rows that an error lists."""
COLUMNS = 50
"""Unread columns that a report lists."""


class Example(NamedTuple):
    """One row as ids.

    Attributes:
        parts: Ids by part; every example of a dataset has the same parts.
        cut: Parts that were truncated.
        odd: Warnings for the report, such as "merged border".
        chat: Whether the row was a chat.
        columns: The row's fields if rewards read them, else None.
    """

    parts: dict[str, list[int]]
    cut: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    chat: bool = False
    columns: dict[str, Any] | None = None


@functools.singledispatch
def load(
    data: Data,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
) -> Dataset:
    """Reads, tokenizes and checks the file of `data`.

    Other packages register their data with `@nnxdsl.data.load.register(MyData)`.

    Args:
        data: Its config.
        tokenizer: The tokenizer.
        max_position: The model's maximal sequence length; None does not check.
        loss_on: Targets of conversations: "assistant" for the assistant's turns, "completion" for everything after the
            prompt, "all" for every token but the first.
        vocabulary: The model's vocabulary size, which may be smaller than the tokenizer's; rows with larger ids are
            bad. None does not check.

    Raises:
        DataError: The file cannot be read, there are more bad rows than `bad_rows` allows, no row is left, or a row is
            longer than `max_position`.
    """
    name = type(data).__name__
    raise DataError(f"{name}: nothing is registered to load it; add @nnxdsl.data.load.register({name})")


def build_dataset(
    data: Data,
    convert: Callable[[Mapping[str, Any]], Example],
    parts: Sequence[str],
    *,
    tokenizer: TokenizerBase | None = None,
    vocabulary: int | None = None,
    reads: Collection[str] | None = None,
) -> TokenizedRows:
    """The rows of the file of `data`, converted by `convert`; bad rows follow `data.bad_rows`.

    Args:
        data: The file and the policy.
        convert: From a row's fields to an example; raises RowError for a bad row.
        parts: Names of the parts of every example; all are ids, except "target".
        tokenizer: Decodes ids in messages; None leaves them out.
        vocabulary: As of `load`.
        reads: Columns that `convert` reads; the report counts the others. None for all columns.

    Raises:
        DataError: There are more bad rows than the policy allows, or no row is left; or `convert` raised it, with the
            row's position added.
    """
    digest = file_digest(data.path)
    builders = {name: RaggedBuilder() for name in parts}
    counts = _Counts(data, reads)
    for place, value in read_rows(data.path):
        counts.rows += 1
        try:
            if isinstance(value, RowError):
                raise value
            example = convert(value)
            if vocabulary is not None:
                _require_in_vocabulary(example, tokenizer, vocabulary)
        except RowError as error:
            counts.reject(place, error)
            continue
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
        counts.accept(place, value, example)
        for name, builder in builders.items():
            builder.add(example.parts[name])
    counts.require_rows()
    ragged = {name: builder.build() for name, builder in builders.items()}
    is_chat = 2 * counts.chats > len(counts.row_ids)
    return TokenizedRows(ragged, counts.row_ids, counts.report(ragged), digest, is_chat, counts.columns)


def _odd(example: Example, row: Mapping[str, Any], *, is_duplicate: bool) -> Iterator[str]:
    yield from example.odd
    if any("\0" in text for text in texts(row)):
        yield "nul character"
    if is_duplicate:
        yield "duplicate"


def _require_in_vocabulary(example: Example, tokenizer: TokenizerBase | None, vocabulary: int) -> None:
    token = max((max(ids, default=0) for name, ids in example.parts.items() if name != "target"), default=0)
    if token >= vocabulary:
        text = "" if tokenizer is None else tokenizer.decode([token], skip_special=False)
        named = f" ({text!r})" if text else ""
        raise RowError("unknown id", f"token {token}{named} is beyond the model's vocabulary of {vocabulary:,}")


class _Counts:
    """The rows of a file so far, counted for its report, and the policy for bad ones."""

    def __init__(self, data: Data, reads: Collection[str] | None) -> None:
        self._path, self._reads = data.path, reads
        self._limit = data.bad_rows.at_most if isinstance(data.bad_rows, BadRows.Skip) else None
        self._messages: list[str] = []
        self._seen: set[bytes] = set()
        self._first: dict[str, str] = {}
        self._cut, self._dropped, self._odd, self._unread = (
            Counter[str](),
            Counter[str](),
            Counter[str](),
            Counter[str](),
        )
        self.rows = self.chats = 0
        self.row_ids: list[str] = []
        self.columns: list[dict[str, Any]] = []

    def accept(self, place: str, row: Mapping[str, Any], example: Example) -> None:
        key = hashlib.blake2b(repr(example.parts).encode(), digest_size=16).digest()
        for kind in dict.fromkeys(_odd(example, row, is_duplicate=key in self._seen)):
            self._odd[kind] += 1
            self._first.setdefault(kind, place)
        self._seen.add(key)
        if self._reads is not None:
            unread = (name for name in row if name not in self._reads)
            self._unread.update(name for name in unread if name in self._unread or len(self._unread) < COLUMNS)
        self._cut.update(example.cut)
        self.chats += example.chat
        self.row_ids.append(place)
        if example.columns is not None:
            self.columns.append(example.columns)

    def reject(self, place: str, error: RowError) -> None:
        self._dropped[error.kind] += 1
        self._first.setdefault(error.kind, place)
        if len(self._messages) < SHOWN:
            self._messages.append(f"  {place}: {error.what}")
        if self._limit is not None and self._dropped.total() > self._limit:
            raise DataError(
                f"{self._path}: more than {self._limit:,} bad rows, the limit of "
                f"bad_rows=BadRows.Skip(at_most={self._limit}){self._listed()}"
            )

    def require_rows(self) -> None:
        count = self._dropped.total()
        if count and self._limit is None:
            raise DataError(
                f"{self._path}: {count:,} of {self.rows:,} rows {'is' if count == 1 else 'are'} bad; mend them, or "
                f"leave them out with bad_rows=BadRows.Skip(at_most={count}){self._listed()}"
            )
        if not self.row_ids:
            raise DataError(f"{self._path}: no row is left to learn from, of {self.rows:,} read{self._listed()}")

    def report(self, parts: Mapping[str, Ragged]) -> Report:
        return Report(
            source=self._path,
            rows=self.rows,
            accepted=len(self.row_ids),
            cut=dict(self._cut),
            dropped=dict(self._dropped),
            odd=dict(self._odd),
            first=self._first,
            lengths={n: Length(total=r.total, longest=r.longest) for n, r in parts.items() if n != "target"},
            unread=dict(self._unread),
        )

    def _listed(self) -> str:
        more = self._dropped.total() - len(self._messages)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self._dropped.most_common())
        tail = [f"  and {more:,} more; all: {kinds}"] if more > 0 else []
        return "".join(f"\n{line}" for line in [*self._messages, *tail])


def require_fit(lengths: npt.NDArray[np.integer], rows: TokenizedRows, max_position: int | None, remedy: str) -> None:
    """Raises DataError if a row is longer than the model's positions; names the longest row and the remedy."""
    longest = int(np.argmax(lengths))
    if max_position is not None and lengths[longest] > max_position:
        raise DataError(
            f"{rows.row_ids[longest]}: the row has {lengths[longest]:,} tokens, more than the model's {max_position:,} "
            f"positions; {remedy}"
        )
