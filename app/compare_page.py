"""Two to six runs next to each other: whether that is fair, their figures, their curves, the settings that differ."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from nnxdsl.run.jsonl import read_json
from nnxdsl.spec.errors import NnxdslError

from .charts import COLOURS, Line, chart
from .compare_config import ABSENT, NAMES, differing, flat, paths, unfair
from .html import Child, Html, join, link, tag
from .index import Row
from .layout_arrays import data_url, guarded
from .page import Answer, Ask, Page
from .parts import run_link, state_badge
from .run_charts import LOGARITHMIC, SMOOTHING, TOGETHER
from .series import Columns, smoothed, thinned
from .state import Site
from .words import number

LEAST, MOST = 2, 6
OFFERED = 200
LOWER = ("loss", "eval/loss")
"""Figures of which the lowest is the best."""

HIGHER = ("accurac", "margins", "tokens/s")
"""Of figures whose names hold one of these, the highest is the best."""


@attrs.frozen
class Compared:
    """One of the runs.

    Attributes:
        row: What the list says of it.
        colour: Of its curves: its place among the runs that the URL names.
        columns: Its figures by name.
        config: Its experiment, flat; empty where it cannot be read.
    """

    row: Row
    colour: int
    columns: Mapping[str, Columns]
    config: Mapping[str, str]


@attrs.frozen
class Figure:
    """A figure of one run: the last, and the best with its step; None where there is none."""

    last: float | None = None
    best: float | None = None
    step: float | None = None


def opened(site: Site, ask: Ask) -> Answer:
    """The runs that the query names."""
    added = ask.query.get("add", "")
    if added:
        ids = list(dict.fromkeys([*_ids(ask), added]))[:MOST]
        query = {**ask.query, "ids": ",".join(ids), "add": ""}
        ask = attrs.evolve(ask, query={name: text for name, text in query.items() if text})
        return attrs.evolve(_answer(site, ask), query=link("", **query).lstrip("?"))
    return _answer(site, ask)


def ticked(site: Site, ask: Ask) -> Answer:
    """The figures again; the fields are left alone."""
    answer = _answer(site, ask)
    return Answer({name: html for name, html in answer.regions.items() if name in ("summary", "curves")})


def _ids(ask: Ask) -> list[str]:
    return list(dict.fromkeys(one for one in ask.query.get("ids", "").split(",") if one))[:MOST]


def _answer(site: Site, ask: Ask) -> Answer:
    ids = _ids(ask)
    rows = {run: site.index.row(run) for run in ids}
    gone = [run for run, row in rows.items() if row is None]
    there = [row for row in rows.values() if row is not None]
    head = _head(site, ask, there, gone)
    if len(there) < LEAST:
        words = "Choose two runs at least, and up to six." if not there else "Choose one more run, at least."
        hint = "The list of runs has a button for those that are ticked."
        empty = tag("p", f"{words} {hint}", cls="empty")
        if len(site.index.rows()) < LEAST:
            empty = tag("p", "There are no two runs yet. ", tag("a", "All runs", href="/"), cls="empty")
        return Answer({"head": head, "warnings": join(), "summary": empty, "curves": join(), "config": join()})
    runs = [_compared(site, row, place) for place, row in enumerate(there)]
    base = _baseline(ask, runs)
    return Answer(
        {
            "head": head,
            "warnings": _warnings(runs),
            "summary": _summary(runs, base),
            "curves": _curves(ask, runs),
            "config": _config(ask, runs, base),
        }
    )


def _compared(site: Site, row: Row, place: int) -> Compared:
    directory = site.settings.home / row.id
    try:
        config = flat(read_json(directory / "experiment.json"))
    except NnxdslError:
        config = {}
    columns = dict(site.series.of(directory / "metrics.jsonl").columns)
    return Compared(row, place % COLOURS, columns, config)


def _baseline(ask: Ask, runs: Sequence[Compared]) -> Compared:
    named = ask.query.get("base", "")
    return next((run for run in runs if run.row.id == named), runs[0])


# The head


def _head(site: Site, ask: Ask, there: list[Row], gone: list[str]) -> Html:
    ids = [row.id for row in there]
    base = ask.query.get("base", "") if ask.query.get("base", "") in ids else (ids[0] if ids else "")
    items: list[Html] = []
    for place, row in enumerate(there):
        one = row.id
        moves = [
            _move(ask, ids, place, place - 1, "←", f"{one} one place forward"),
            _move(ask, ids, place, place + 1, "→", f"{one} one place back"),
        ]
        if one == base:
            role: Html = tag("span", "baseline", cls="badge")
        else:
            role = tag("a", "Make baseline", href=_with(ask, base=one), cls="button small")
        drop = tag(
            "a",
            "Remove",
            href=_with(ask, ids=",".join(other for other in ids if other != one), base="" if one == base else base),
            cls="button small",
            aria_label=f"Remove {one}",
        )
        items.append(
            tag(
                "li",
                tag("i", cls=f"swatch s{place % COLOURS}"),
                tag("span", run_link(row), " ", state_badge(row.state), cls="grow"),
                tag("span", role, moves, drop, cls="row"),
            )
        )
    others = [row.id for row in site.index.rows() if row.id not in ids][:OFFERED]
    form = None
    if others and len(ids) < MOST:
        options = [tag("option", "choose a run", value="")]
        options += [tag("option", one, value=one) for one in others]
        choice = tag("select", options, name="add", id="compare-add")
        form = tag("form", tag("label", "Add ", choice, cls="row"), cls="row controls", data_query=True)
    missing = tag("p", f"Not in {site.settings.home}: {', '.join(gone)}", cls="notice bad") if gone else None
    listed = tag("ul", items, cls="plain panel compared") if items else None
    return join(tag("h1", "Compare runs"), missing, listed, form)


def _move(ask: Ask, ids: list[str], place: int, to: int, sign: str, words: str) -> Html | None:
    if not 0 <= to < len(ids):
        return None
    order = list(ids)
    order.insert(to, order.pop(place))
    query = {"ids": ",".join(order), "base": ask.query.get("base", "") or ids[0]}
    return tag(
        "a", sign, href=_with(ask, **query), cls="button small", aria_label=f"Move {words}", title=f"Move {words}"
    )


def _with(ask: Ask, **changes: str) -> str:
    return link("/compare", **{**ask.query, **changes})


# Whether it is fair


def _warnings(runs: Sequence[Compared]) -> Html:
    unread = [run.row.id for run in runs if not run.config]
    parts: list[Child] = []
    if unread:
        parts.append(tag("p", f"! The settings of {', '.join(unread)} cannot be read.", cls="notice warn-box"))
    found = unfair([run.config for run in runs if run.config])
    if found:
        lines = [
            tag("li", tag("b", f"! {one.what}: "), one.why, " ", [tag("code", path) for path in one.paths[:6]])
            for one in found
        ]
        heading = tag("h2", "To be compared with care")
        parts.append(tag("section", heading, tag("ul", lines, cls="plain"), cls="notice warn-box", role="note"))
    elif not unread:
        words = (
            "✔ Same data, base model, seed, objective and size of a step: their figures can be compared as they are."
        )
        parts.append(tag("p", words, cls="notice"))
    return join(parts)


# Figures


def names_of(runs: Sequence[Compared]) -> list[str]:
    """The figures that are worth a row: those of the charts first, held-out ones after their like."""
    known = {name for run in runs for name in run.columns}
    first = [name for _, names in TOGETHER for name in names if name in known]
    rest = sorted(known - set(first) - {"num_tokens", "pairs/s", "rows/s"})
    return [*first, *rest, *(["num_tokens"] if "num_tokens" in known else [])]


def figure_of(columns: Columns | None, name: str) -> Figure:
    """The last and the best of a column."""
    if columns is None:
        return Figure()
    steps, values = columns.arrays()
    kept = np.isfinite(values)
    steps, values = steps[kept], values[kept]
    if not len(values):
        return Figure()
    last = float(values[-1])
    way = direction(name)
    if way == 0:
        return Figure(last)
    at = int(np.argmin(values) if way < 0 else np.argmax(values))
    return Figure(last, float(values[at]), float(steps[at]))


def direction(name: str) -> int:
    """-1 where lower is better, 1 where higher is, 0 where neither is."""
    if name in LOWER:
        return -1
    return 1 if any(part in name for part in HIGHER) else 0


def _summary(runs: Sequence[Compared], base: Compared) -> Html:
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
    body = [_figures(name, runs, base, is_same or "loss" not in name) for name in names_of(runs)]
    if not body:
        return tag("p", "No step has been computed yet.", cls="empty", data_tick="2" if live else None)
    caption = "The last value, the best one with its step, and the difference of the last to the baseline's"
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
        tag("div", tag("h2", "Figures"), saves, cls="row between"),
        tag("div", table, cls="scroll", tabindex=0, role="region", aria_label="Figures"),
        data_tick="2" if live else None,
    )


def _figures(name: str, runs: Sequence[Compared], base: Compared, comparable: bool) -> Html:
    figures = [figure_of(run.columns.get(name), name) for run in runs]
    way = direction(name)
    lasts = [figure.last for figure in figures if figure.last is not None]
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
        if run is not base and reference is not None:
            change = tag("div", _signed(figure.last - reference), cls="small muted")
        best = None
        if figure.best is not None and figure.step is not None:
            best = tag("div", f"best {number(figure.best)} at {number(int(figure.step))}", cls="small muted")
        value = tag("b" if is_top else "span", number(_whole(figure.last)))
        star = tag("span", "★ ", cls="ok", title="the best of these") if is_top else None
        cells.append(tag("td", star, value, change, best, cls="num"))
    hint = {-1: "lower is better", 1: "higher is better", 0: ""}[way] if comparable else "of different objectives"
    return tag("tr", tag("th", name, tag("div", hint, cls="small muted") if hint else None, scope="row"), cells)


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) and abs(value) >= 1000 else value


def _signed(value: float) -> str:
    sign = "+" if value > 0 else "-" if value < 0 else "±"
    return f"{sign}{number(_whole(abs(value)))}"


# Curves


def _curves(ask: Ask, runs: Sequence[Compared]) -> Html:
    weight = float(ask.query["smooth"]) if ask.query.get("smooth") in SMOOTHING else 0.0
    over, log, every = ask.query.get("x", "step"), ask.query.get("log") == "1", ask.query.get("all") == "1"
    known = {name for run in runs for name in run.columns}
    if not known:
        return join()
    drawn: list[Html] = []
    used: set[str] = {"num_tokens", "pairs/s", "rows/s"}
    for title, names in TOGETHER:
        trained = [name for name in names if not name.startswith("eval/")]
        for name in trained:
            both = [one for one in (name, f"eval/{name}") if one in known]
            used |= {name, f"eval/{name}"}
            if both:
                heading = title if len(trained) == 1 else _heading(name)
                drawn.append(_chart(heading, both, runs, over, weight, log and title in LOGARITHMIC))
    rest = sorted({name.removeprefix("eval/") for name in known - used})
    for name in rest if every else []:
        both = [one for one in (name, f"eval/{name}") if one in known]
        drawn.append(_chart(name, both, runs, over, weight, log=False))
    has_tokens = all("num_tokens" in run.columns for run in runs)
    more = tag(
        "a",
        "Show fewer" if every else f"Show {len(rest)} more",
        href=_with(ask, all="" if every else "1"),
        cls="button",
    )
    dashed = "Dashed: on held-out rows." if any(name.startswith("eval/") for name in known) else None
    return join(
        tag("h2", "Curves"),
        _controls(ask, has_tokens, weight, log),
        tag("p", dashed, cls="muted small") if dashed else None,
        tag("div", drawn, cls="grid charts"),
        more if rest else None,
    )


def _heading(name: str) -> str:
    words = name.replace("/", " ").replace("_", " ")
    return words[:1].upper() + words[1:]


def _chart(title: str, names: list[str], runs: Sequence[Compared], over: str, weight: float, log: bool) -> Html:
    lines: list[Line] = []
    for run in runs:
        for name in names:
            if name not in run.columns:
                continue
            steps, values = run.columns[name].arrays()
            is_held_out = name.startswith("eval/")
            tokens = run.columns.get("num_tokens")
            if over == "tokens" and tokens is not None and len(tokens.steps):
                steps = np.interp(steps, *tokens.arrays())
            if weight and not is_held_out:
                values = smoothed(values, weight)
            x, y = thinned(steps, values)
            lines.append(
                Line(
                    f"{run.row.id}{', held out' if is_held_out else ''}",
                    x,
                    y,
                    colour=run.colour,
                    dashed=is_held_out,
                    dots=is_held_out,
                )
            )
    return chart(title, lines, log=log, x_name="tokens" if over == "tokens" else "step")


def _controls(ask: Ask, has_tokens: bool, weight: float, log: bool) -> Html:
    def options(values: Iterable[str], chosen: str, none: str) -> list[Html]:
        return [tag("option", value or none, value=value, selected=value == chosen) for value in values]

    smooth = options(["", *SMOOTHING[1:]], ask.query.get("smooth", "") if weight else "", "none")
    over = options(["", "tokens"] if has_tokens else [""], ask.query.get("x", ""), "step")
    return tag(
        "form",
        tag("label", "Smoothing ", tag("select", smooth, name="smooth", id="compare-smooth")),
        tag("label", "Over ", tag("select", over, name="x", id="compare-x")),
        tag(
            "label",
            tag("input", type="checkbox", name="log", id="compare-log", checked=log),
            " Logarithmic",
            cls="row",
        ),
        cls="row controls",
        data_query=True,
    )


# Settings


def _config(ask: Ask, runs: Sequence[Compared], base: Compared) -> Html:
    whole = ask.query.get("config") == "all"
    configs = [run.config for run in runs]
    changed = [path for path in differing(configs) if path not in NAMES]
    shown = paths(configs) if whole else changed
    heads = [tag("th", tag("i", cls=f"swatch s{run.colour}"), run.row.id, scope="col", cls="id") for run in runs]
    different = set(changed)
    body = [
        tag(
            "tr",
            tag("th", "≠ " if whole and path in different else None, tag("span", path, cls="mono"), scope="row"),
            [_setting(run, base, path) for run in runs],
            cls="differs" if whole and path in different else None,
        )
        for path in shown
    ]
    caption = f"{len(changed)} of {len(paths(configs))} settings differ, names and notes apart"
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", tag("th", "Field", scope="col"), heads)),
        tag("tbody", body),
        cls="settings-table",
    )
    switch = tag(
        "nav",
        tag("a", "Only what differs", href=_with(ask, config=""), aria_current=None if whole else "true"),
        tag("a", "All settings", href=_with(ask, config="all"), aria_current="true" if whole else None),
        cls="tabs",
        aria_label="Which settings",
    )
    none = tag("p", "They have the same settings, but for their names.", cls="empty")
    region = tag("div", table, cls="scroll", tabindex=0, role="region", aria_label="Settings")
    return join(tag("h2", "Settings"), switch, region if body else none)


def _setting(run: Compared, base: Compared, path: str) -> Html:
    value = run.config.get(path, ABSENT)
    same = run is not base and value == base.config.get(path, ABSENT)
    return tag("td", value[:2_000], cls="mono muted" if same else "mono")


# Exports


def _lines(runs: Sequence[Compared]) -> list[tuple[str, list[Any]]]:
    """Figures, then settings that differ, each with a value of every run."""
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
    """A column for each run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["", *(guarded(run.row.id) for run in runs)])
    for name, values in _lines(runs):
        writer.writerow([guarded(name), *(_cell(value) for value in values)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Numbers as they are, but for what is none; texts that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    return guarded(value) if isinstance(value, str) else value


def to_markdown(runs: Sequence[Compared]) -> str:
    """A table for a page of notes."""
    lines = [["", *(run.row.id for run in runs)], ["---"] * (len(runs) + 1)]
    lines += [[name, *("" if value is None else _words(value) for value in values)] for name, values in _lines(runs)]
    return "".join(f"| {' | '.join(map(_escaped, line))} |\n" for line in lines)


def _words(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _escaped(text: str) -> str:
    for sign in "\\|<>`*":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("\r", " ")


PAGE = Page(
    name="compare",
    path="/compare",
    title="Compare",
    regions=("head", "warnings", "summary", "curves", "config"),
    actions={"open": opened, "tick": ticked},
)
