"""The rows of a source as counts that add up: read, left out by reason, held out, trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Use = Literal["trained on", "held out", "accepted"]
"""What the rows of a dataset are for; "accepted" where no experiment says it."""


class RowCount(NamedTuple):
    """A line of the table.

    Attributes:
        label: "read", "left out", "held out", "trained on" or "accepted".
        rows: How many.
        reason: Why they are left out.
        first: Position of the first of those that are left out.
    """

    label: str
    rows: int
    reason: str = ""
    first: str = ""

    @property
    def note(self) -> str:
        """The reason with the first row that it holds of."""
        return f"{self.reason} (first: {self.first})" if self.reason else ""


def row_counts(report: Mapping[str, Any], use: Use) -> list[RowCount]:
    """All rows of a report, as plain JSON values; rows that `test_size` puts on the other side are counted there."""
    counts = [RowCount("read", report["rows"])]
    counts += [RowCount("left out", count, kind, report["first"][kind]) for kind, count in report["dropped"].items()]
    accepted = report["accepted"]
    other = report["rows"] - sum(report["dropped"].values()) - accepted
    sides = {"held out": other, "trained on": accepted}
    if use == "held out":
        sides = {"held out": accepted, "trained on": other}
    elif use == "accepted":
        sides = {"held out": 0, "accepted": accepted}
    return counts + [RowCount(label, rows) for label, rows in sides.items() if rows or label == use]
