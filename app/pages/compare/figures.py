"""The table of metrics: last and best value of each run, and the difference to the baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...html import Html, tag
from ...words import number
from ..layout.arrays import data_url
from .config import differing
from .export import to_csv, to_markdown
from .runs import Compared, depends_on_objective, direction, figure_of, names_of


def summary(runs: Sequence[Compared], base: Compared) -> Html:
    """Returns the table and its download links."""
    live = any(run.row.is_live for run in runs)
    heads = [
        tag(
            "th",
            tag("i", cls=f"swatch s{run.colour}"),
            run.row.id,
            tag("div", f"step {number(run.row.status.get('step'))}", cls="small"),
            tag("div", "baseline", cls="small") if run is base else None,
            scope="col",
            cls="num id",
        )
        for run in runs
    ]
    changed = differing([run.config for run in runs])
    is_same = not any(path.startswith("objective.") for path in changed)
    body = [_figures(name, runs, base, is_same or not depends_on_objective(name)) for name in names_of(runs)]
    if not body:
        return tag("p", "No step has finished yet.", cls="empty", data_tick="2" if live else None)
    caption = "Last value, best value with its step, and difference of the last value to the baseline"
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", tag("th", "Figure", scope="col"), heads)),
        tag("tbody", body),
        cls="figures-table",
    )
    saves = tag(
        "div",
        tag("a", "CSV", href=data_url(to_csv(runs)), download="compared-runs.csv", cls="button small"),
        tag(
            "a",
            "Markdown",
            href=data_url(to_markdown(runs), "text/markdown"),
            download="compared-runs.md",
            cls="button small",
        ),
        cls="row",
    )
    return tag(
        "div",
        tag("div", tag("h2", "Metrics"), saves, cls="row between"),
        tag("div", table, cls="scroll", tabindex=0, role="region", aria_label="Figures"),
        data_tick="2" if live else None,
    )


def _figures(name: str, runs: Sequence[Compared], base: Compared, comparable: bool) -> Html:
    figures = [figure_of(run.columns.get(name), name) for run in runs]
    way = direction(name)
    lasts = [figure.last for figure in figures if figure.last is not None and math.isfinite(figure.last)]
    differ = comparable and len(lasts) > 1 and min(lasts) < max(lasts)
    top = (min(lasts) if way < 0 else max(lasts)) if way and differ else None
    reference = figure_of(base.columns.get(name), name).last
    cells: list[Html] = []
    for run, figure in zip(runs, figures, strict=True):
        if figure.last is None:
            cells.append(tag("td", "-", cls="num"))
            continue
        is_top = top is not None and figure.last == top
        change = None
        if run is not base and reference is not None and comparable and math.isfinite(figure.last - reference):
            change = tag("div", _signed(figure.last - reference), cls="small muted")
        best = None
        if figure.best is not None and figure.step is not None:
            best = tag("div", f"best {number(figure.best)} at {number(int(figure.step))}", cls="small muted")
        text = number(_whole(figure.last)) if math.isfinite(figure.last) else "not finite"
        value = tag("b" if is_top else "span", text)
        star = tag("span", "★ ", cls="ok", title="best of these runs") if is_top else None
        cells.append(tag("td", star, value, change, best, cls="num"))
    hint = (
        {-1: "lower is better", 1: "higher is better", 0: ""}[way]
        if comparable
        else "not comparable: objectives differ"
    )
    return tag("tr", tag("th", name, tag("div", hint, cls="small muted") if hint else None, scope="row"), cells)


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) and abs(value) >= 1000 else value


def _signed(value: float) -> str:
    sign = "+" if value > 0 else "-" if value < 0 else "±"
    return f"{sign}{number(_whole(abs(value)))}"
