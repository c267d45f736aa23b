"""What became of a file's rows, counted: kept, cut, left out, odd. Knows no file and no tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Length:
    """Token counts of one part of the kept rows, after cutting."""

    total: int
    longest: int


@attrs.frozen(kw_only=True)
class Report:
    """What became of the rows of one file.

    Attributes:
        source: The file, as the experiment names it.
        rows: Rows read, blank lines not counted.
        accepted: Rows that are learnt from.
        cut: Kept rows of which a part was cut, by part ("prompt", "chosen", "rejected", "tokens").
        dropped: Rows left out, by what is wrong with them.
        odd: Kept rows that deserve a look ("duplicate", "merged border", "blank message"), by kind.
        first: Where the first row of each dropped or odd kind stands.
        lengths: Tokens of each part.
        unread: Kept rows with a column that this kind of data does not read, by the column's name.
    """

    source: str
    rows: int
    accepted: int
    cut: Mapping[str, int]
    dropped: Mapping[str, int]
    odd: Mapping[str, int]
    first: Mapping[str, str]
    lengths: Mapping[str, Length]
    unread: Mapping[str, int] = attrs.field(factory=dict)

    def lines(self) -> list[str]:
        """The report for people: one line for the file, one for each part, one for each kind of trouble."""
        out = [f"{self.source}: {self.rows:,} rows, {self.accepted:,} kept"]
        for part, length in self.lengths.items():
            cut = f"; {self.cut[part]:,} cut" if self.cut.get(part) else ""
            mean = length.total / max(1, self.accepted)
            out.append(f"{part}: {length.total:,} tokens, {mean:.1f} a row, longest {length.longest:,}{cut}")
        for word, counts in (("left out", self.dropped), ("odd, kept", self.odd)):
            out += [f"{word}: {count:,} {kind} (first: {self.first[kind]})" for kind, count in counts.items()]
        if self.unread:
            out.append("columns not read: " + ", ".join(f"{name} ({rows:,})" for name, rows in self.unread.items()))
        return out

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return attrs.asdict(self)
