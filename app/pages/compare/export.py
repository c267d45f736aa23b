"""Exports metrics and differing settings as CSV and Markdown, with one column per run or group of runs."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..layout.arrays import guarded
from .config import ABSENT, differing
from .groups import Group, Spread
from .runs import direction, names_of


def lines(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """Returns rows of metrics, then of differing settings, with one value per group; a `Spread` for several runs."""
    found: list[tuple[str, list[Any]]] = [("state", [_states(group) for group in groups])]
    if not all(group.is_one for group in groups):
        found.insert(0, ("runs", [", ".join(run.row.id for run in group.runs) for group in groups]))
    for name in names_of([run for group in groups for run in group.runs]):
        found.append((f"last {name}", [_last(group, name) for group in groups]))
        if direction(name):
            found.append((f"best {name}", [_best(group, name) for group in groups]))
            if any(group.is_one for group in groups):
                found.append((f"step of best {name}", [_step_of_best(group, name) for group in groups]))
    configs = [group.config for group in groups]
    return found + [(path, [config.get(path, ABSENT) for config in configs]) for path in differing(configs)]


def _states(group: Group) -> str:
    counts = Counter(run.row.state for run in group.runs)
    return ", ".join(state if group.is_one else f"{count} {state}" for state, count in counts.items())


def _last(group: Group, name: str) -> Any:
    return group.last(name) if not group.is_one else next((one.last for one in group.figures(name)), None)


def _best(group: Group, name: str) -> Any:
    return group.best(name) if not group.is_one else next((one.best for one in group.figures(name)), None)


def _step_of_best(group: Group, name: str) -> float | None:
    return next((one.step for one in group.figures(name)), None) if group.is_one else None


def to_csv(groups: Sequence[Group]) -> str:
    """Returns CSV; means of several runs are followed by rows of their standard deviations and numbers of runs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["", *(guarded(group.name) for group in groups)])
    for name, values in lines(groups):
        spreads = [value if isinstance(value, Spread) else None for value in values]
        if not any(spreads):
            writer.writerow([guarded(name), *map(_cell, values)])
            continue
        means = [value.mean if isinstance(value, Spread) else value for value in values]
        writer.writerow([f"mean of {name}", *map(_cell, means)])
        writer.writerow([f"standard deviation of {name}", *(_cell(one.deviation if one else None) for one in spreads)])
        counts = [one.count if one else int(value is not None) for one, value in zip(spreads, values, strict=True)]
        writer.writerow([f"runs with {name}", *counts])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Keeps finite numbers; escapes texts that a spreadsheet would run as a formula."""
    if value is None:
        return ""
    return guarded(value) if isinstance(value, str) else value


def to_markdown(groups: Sequence[Group]) -> str:
    """Returns a Markdown table; means of several runs are `mean ± standard deviation (runs)`."""
    rows = [["", *(group.name for group in groups)], ["---"] * (len(groups) + 1)]
    rows += [[name, *("" if value is None else words(value) for value in values)] for name, values in lines(groups)]
    return "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in rows)


def words(value: Any) -> str:
    """Returns a value as text; floats with six digits."""
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _escaped(text: str) -> str:
    for sign in "\\|<>`*":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("\r", " ")
