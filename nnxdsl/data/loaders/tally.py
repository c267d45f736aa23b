"""Counts the rows of a source for its report, and checks the number of bad rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import BadRows, FileData
from nnxdsl.data.loaders.convert import BYTE_PARTS, Converted
from nnxdsl.data.loaders.report import Length, Report
from nnxdsl.data.loaders.sources import Source
from nnxdsl.data.ragged import Ragged, blocks_of
from nnxdsl.data.row_order import PIECE, sorted_pieces
from nnxdsl.errors import DataError

SHOWN = 5
"""Bad rows that an error lists."""
UNREAD = 50
"""Unread columns that a report lists."""

First = tuple[int, int]
"""A row: its file and its number."""


@attrs.define
class Tally:
    """Counts over all rows, in plain JSON values: the report without the names of files.

    Attributes:
        rows: Rows read.
        chats: Accepted rows that are chats.
        ends: For each file, the accepted row after its last one.
        cut: Accepted rows with a truncated part, by part.
        dropped: Bad rows, by kind.
        odd: Accepted rows with a warning, by kind.
        first: The first row of each dropped or odd kind.
        unread: Accepted rows with a column that is not read, by column.
        bad: File, number and reason of the first bad rows.
    """

    ends: list[int]
    rows: int = 0
    chats: int = 0
    cut: Counter[str] = attrs.field(factory=Counter, converter=Counter)
    dropped: Counter[str] = attrs.field(factory=Counter, converter=Counter)
    odd: Counter[str] = attrs.field(factory=Counter, converter=Counter)
    first: dict[str, First] = attrs.field(factory=dict)
    unread: Counter[str] = attrs.field(factory=Counter, converter=Counter)
    bad: list[tuple[int, int, str]] = attrs.field(factory=list)

    @property
    def accepted(self) -> int:
        """Rows of the dataset."""
        return self.ends[-1]

    def add(self, chunk: Converted, file: int) -> None:
        """Counts the rows of a chunk of a file."""
        self.rows += chunk.rows
        self.chats += chunk.chats
        self.ends[file:] = [self.accepted + len(chunk.numbers)] * (len(self.ends) - file)
        self.cut.update(chunk.cut)
        for number, kind, reason in chunk.bad:
            self.dropped[kind] += 1
            self.first.setdefault(kind, (file, number))
            if len(self.bad) < SHOWN:
                self.bad.append((file, number, reason))
        for kind, (count, number) in chunk.warnings.items():
            self.odd[kind] += count
            self.first.setdefault(kind, (file, number))
        for name, count in chunk.unread.items():
            if name in self.unread or len(self.unread) < UNREAD:
                self.unread[name] += count

    def find_duplicates(self, hashes: npt.NDArray[np.uint64], numbers: npt.NDArray[np.int64]) -> None:
        """Counts rows whose ids are those of an earlier one."""
        duplicates, first = 0, len(hashes)
        for rows, values in sorted_pieces(lambda: blocks_of(hashes, PIECE), len(hashes)):
            later = rows[1:][values[1:] == values[:-1]]
            duplicates, first = duplicates + len(later), int(later.min(initial=first))
        if duplicates:
            self.odd["duplicate"] = duplicates
            self.first["duplicate"] = int(np.searchsorted(self.ends, first, side="right")), int(numbers[first])

    def report(self, source: Source, parts: Mapping[str, Ragged]) -> Report:
        """The report of a source with such ids."""
        return Report(
            source=source.name,
            rows=self.rows,
            accepted=self.accepted,
            cut=dict(self.cut),
            dropped=dict(self.dropped),
            odd=dict(self.odd),
            first={kind: f"{source.places[file]}{number}" for kind, (file, number) in self.first.items()},
            lengths={n: Length(total=r.total, longest=r.longest) for n, r in parts.items() if n not in BYTE_PARTS},
            unread=dict(self.unread),
        )

    def require_allowed(self, data: FileData, source: Source, is_whole: bool = True) -> None:
        """Raises DataError if there are more bad rows than `data` allows; once all rows are read, also if none is left.

        Args:
            data: The spec.
            source: Its source.
            is_whole: Whether all rows are read.
        """
        count, limit = self.dropped.total(), data.bad_rows.at_most if isinstance(data.bad_rows, BadRows.Skip) else None
        if limit is not None and count > limit:
            raise DataError(
                f"{data.name}: more than {limit:,} bad rows, the limit of "
                f"bad_rows=BadRows.Skip(at_most={limit}){self._listed(source)}"
            )
        if is_whole and count and limit is None:
            raise DataError(
                f"{data.name}: {count:,} of {self.rows:,} rows {'is' if count == 1 else 'are'} bad; fix them, or "
                f"leave them out with bad_rows=BadRows.Skip(at_most={count}){self._listed(source)}"
            )
        if is_whole and not self.accepted:
            raise DataError(f"{data.name}: no row is left to learn from, of {self.rows:,} read{self._listed(source)}")

    def _listed(self, source: Source) -> str:
        lines = [f"  {source.places[file]}{number}: {reason}" for file, number, reason in self.bad]
        more = self.dropped.total() - len(lines)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.dropped.most_common())
        return "".join(f"\n{line}" for line in [*lines, *([f"  and {more:,} more; all: {kinds}"] if more else [])])
