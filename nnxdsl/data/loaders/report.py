"""Counts of a file's rows: accepted, truncated, dropped, unusual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from nnxdsl.terminal.row_counts import Use, row_counts


@attrs.frozen(kw_only=True)
class Length:
    """Token counts of one part of the accepted rows, after truncation."""

    total: int
    longest: int


@attrs.frozen(kw_only=True)
class Report:
    """Counts of the rows of one file.

    Attributes:
        source: The file, as in the experiment.
        rows: Rows read, without blank lines.
        accepted: Rows in the dataset.
        cut: Accepted rows with a truncated part, by part ("prompt", "chosen", "rejected", "tokens").
        dropped: Bad rows, by kind.
        odd: Accepted rows with a warning ("duplicate", "merged border", "blank message"), by kind.
        first: Position of the first row of each dropped or odd kind.
        lengths: Tokens of each part.
        unread: Accepted rows with a column that this kind of data does not read, by column.
        layout: The columns of a widely used dataset that its rows have, or columns that are renamed; "" for neither.
        sources: The reports of the sources of a mixture, which has the sums of their counts.
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
    sources: tuple[Report, ...] = ()
    layout: str = ""

    def lines(self, use: Use = "trained on") -> list[str]:
        """The report as text: the table of rows, then a line for each part and for each kind of unusual rows."""
        if self.sources:
            return [line for source in self.sources for line in source.lines(use)]
        counts = row_counts(self.to_dict(), use)
        label, rows = (
            max(map(len, column)) for column in zip(*((c.label, f"{c.rows:,}") for c in counts), strict=True)
        )
        out = [f"{self.source}, rows:"]
        out += [f"  {count.label:<{label}}  {count.rows:>{rows},}  {count.note}".rstrip() for count in counts]
        out += [f"columns: {self.layout}"] if self.layout else []
        for part, length in self.lengths.items():
            cut = f"; {self.cut[part]:,} cut" if self.cut.get(part) else ""
            mean = length.total / max(1, self.accepted)
            out.append(f"{part}: {length.total:,} tokens, {mean:.1f} a row, longest {length.longest:,}{cut}")
        out += [f"odd, kept: {count:,} {kind} (first: {self.first[kind]})" for kind, count in self.odd.items()]
        if self.unread:
            out.append("columns not read: " + ", ".join(f"{name} ({rows:,})" for name, rows in self.unread.items()))
        return out

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return attrs.asdict(self)


def joined_report(reports: Sequence[Report]) -> Report:
    """The report of several sources together."""

    def summed(name: str) -> dict[str, int]:
        return dict(sum((Counter(getattr(report, name)) for report in reports), Counter[str]()))

    lengths = {
        part: [report.lengths[part] for report in reports if part in report.lengths] for part in reports[0].lengths
    }
    return Report(
        source=" + ".join(report.source for report in reports),
        rows=sum(report.rows for report in reports),
        accepted=sum(report.accepted for report in reports),
        **{name: summed(name) for name in ("cut", "dropped", "odd", "unread")},
        first={kind: row for report in reversed(reports) for kind, row in report.first.items()},
        lengths={
            part: Length(total=sum(one.total for one in tokens), longest=max(one.longest for one in tokens))
            for part, tokens in lengths.items()
        },
        sources=tuple(reports),
        layout="",
    )
