"""A file's rows read, turned into examples and counted: those that are kept, and what became of the rest."""

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
from nnxdsl.data.ragged import RaggedBuilder
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.messages import texts
from nnxdsl.errors import DataError

SHOWN = 5
"""Bad rows that an error names one by one."""
COLUMNS = 50
"""Unread columns that a report names; a file may have any number of them."""


class Example(NamedTuple):
    """One row as ids.

    Attributes:
        parts: Ids by part; every example of a dataset has the same parts.
        cut: Parts that were cut to their longest length.
        odd: What deserves a look, such as "merged border".
        chat: Whether the row was a chat.
        columns: The row as it stands in the file, where rewards are to read it; else None.
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
    """Reads, tokenises and checks the whole file of `data`.

    Sources of other packages register here: `@nnxdsl.data.load.register(MyData)`.

    Args:
        data: What to read.
        tokenizer: What turns text into ids.
        max_position: Longest sequence that the model can take; None does not check.
        loss_on: Targets of conversations: "assistant" for the assistant's turns, "completion" for all that follows the
            prompt, "all" for every token but the first.
        vocabulary: Ids that the model has rows for; a row with one beyond is bad. A tokenizer may have more than its
            model. None does not check.

    Raises:
        DataError: The file cannot be read, rows are bad and `bad_rows` does not let them pass, no row is left, or a row
            is longer than the model's positions.
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
    """All rows of the file of `data` that `convert` turns into examples; bad ones go by `data.bad_rows`.

    Args:
        data: The file and its policy.
        convert: One row's fields to an example; raises RowError for what cannot be learnt from.
        parts: Names of the parts of every example; all are ids, but for "target".
        tokenizer: Gives the text of an id in messages; None leaves it out.
        vocabulary: Ids that the model has rows for; a row with one beyond is bad. None does not check.
        reads: Columns that `convert` reads; the report counts the others. None says that it reads all.

    Raises:
        DataError: Rows are bad and the policy does not let them pass, or no row is left; or `convert` raises one, to
            which the row's place is added.
    """
    digest = file_digest(data.path)
    builders = {name: RaggedBuilder() for name in parts}
    seen: set[bytes] = set()
    rows, chats, row_ids, bad = 0, 0, [], _Bad(data)
    cut: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    first: dict[str, str] = {}
    columns: list[dict[str, Any]] = []
    unread: Counter[str] = Counter()
    for where, value in read_rows(data.path):
        rows += 1
        try:
            if isinstance(value, RowError):
                raise value
            example = convert(value)
            if vocabulary is not None:
                _require_in_vocabulary(example, tokenizer, vocabulary)
        except RowError as error:
            bad.add(where, error)
            continue
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        same = hashlib.blake2b(repr(example.parts).encode(), digest_size=16).digest()
        for kind in dict.fromkeys(_odd(example, value, is_duplicate=same in seen)):
            odd[kind] += 1
            first.setdefault(kind, where)
        seen.add(same)
        if reads is not None:
            unread.update(name for name in value if name not in reads and (name in unread or len(unread) < COLUMNS))
        cut.update(example.cut)
        chats += example.chat
        row_ids.append(where)
        if example.columns is not None:
            columns.append(example.columns)
        for name, builder in builders.items():
            builder.add(example.parts[name])
    bad.finish(rows, len(row_ids))
    ragged = {name: builder.build() for name, builder in builders.items()}
    report = Report(
        source=data.path,
        rows=rows,
        accepted=len(row_ids),
        cut=dict(cut),
        dropped=dict(bad.kinds),
        odd=dict(odd),
        first={**bad.first, **first},
        lengths={n: Length(total=r.total, longest=r.longest) for n, r in ragged.items() if n != "target"},
        unread=dict(unread),
    )
    return TokenizedRows(ragged, row_ids, report, digest, is_chat=2 * chats > len(row_ids), columns=columns)


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


class _Bad:
    """Bad rows met so far, and the policy for them."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._most = data.bad_rows.at_most if isinstance(data.bad_rows, BadRows.Skip) else None
        self._shown: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, where: str, error: RowError) -> None:
        self.kinds[error.kind] += 1
        self.first.setdefault(error.kind, where)
        if len(self._shown) < SHOWN:
            self._shown.append(f"  {where}: {error.what}")
        if self._most is not None and self.kinds.total() > self._most:
            raise DataError(
                f"{self._data.path}: more than {self._most:,} bad rows, which is all that "
                f"bad_rows=BadRows.Skip(at_most={self._most}) lets pass{self._list()}"
            )

    def finish(self, rows: int, rows_left: int) -> None:
        count = self.kinds.total()
        if count and self._most is None:
            raise DataError(
                f"{self._data.path}: {count:,} of {rows:,} rows {'is' if count == 1 else 'are'} bad; mend them, or "
                f"leave them out with bad_rows=BadRows.Skip(at_most={count}){self._list()}"
            )
        if not rows_left:
            raise DataError(f"{self._data.path}: no row is left to learn from, of {rows:,} read{self._list()}")

    def _list(self) -> str:
        more = self.kinds.total() - len(self._shown)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())
        tail = [f"  and {more:,} more; all: {kinds}"] if more > 0 else []
        return "".join(f"\n{line}" for line in [*self._shown, *tail])


def require_fit(lengths: npt.NDArray[np.integer], rows: TokenizedRows, max_position: int | None, cure: str) -> None:
    """Refuses rows that reach beyond the model's positions.

    Raises:
        DataError: Names the longest row and what to set.
    """
    longest = int(np.argmax(lengths))
    if max_position is not None and lengths[longest] > max_position:
        raise DataError(
            f"{rows.row_ids[longest]}: the row has {lengths[longest]:,} tokens, more than the model's {max_position:,} "
            f"positions; {cure}"
        )
