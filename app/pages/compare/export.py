"""Exports metrics and differing settings as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from ..layout.arrays import guarded
from .config import ABSENT, differing
from .runs import Compared, direction, figure_of, names_of


def lines(runs: Sequence[Compared]) -> list[tuple[str, list[Any]]]:
    """Returns rows of metrics, then of differing settings, with one value per run."""
    found: list[tuple[str, list[Any]]] = [("state", [run.row.state for run in runs])]
    for name in names_of(runs):
        figures = [figure_of(run.columns.get(name), name) for run in runs]
        found.append((f"last {name}", [figure.last for figure in figures]))
        if direction(name):
            found.append((f"best {name}", [figure.best for figure in figures]))
            found.append((f"step of best {name}", [figure.step for figure in figures]))
    configs = [run.config for run in runs]
    found += [(path, [config.get(path, ABSENT) for config in configs]) for path in differing(configs)]
    return found


def to_csv(runs: Sequence[Compared]) -> str:
    """Returns CSV with one column per run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["", *(guarded(run.row.id) for run in runs)])
    for name, values in lines(runs):
        writer.writerow([guarded(name), *(_cell(value) for value in values)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Keeps finite numbers; escapes texts that a spreadsheet would run as a formula."""
    if value is None:
        return ""
    return guarded(value) if isinstance(value, str) else value


def to_markdown(runs: Sequence[Compared]) -> str:
    """Returns a Markdown table."""
    rows = [["", *(run.row.id for run in runs)], ["---"] * (len(runs) + 1)]
    rows += [[name, *("" if value is None else words(value) for value in values)] for name, values in lines(runs)]
    return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in rows)


def words(value: Any) -> str:
    """Returns a value as text; floats with six digits."""
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _escaped(text: str) -> str:
    for sign in "\\|<>`*":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("\r", " ")
