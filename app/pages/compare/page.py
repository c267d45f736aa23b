"""The Compare page: metrics, curves and differing settings of two to six runs, and whether they are comparable."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from nnxdsl.errors import NnxdslError
from nnxdsl.storage.jsonl import read_json

from ...components.charts import COLOURS
from ...components.parts import run_link, state_badge
from ...html import Child, Html, join, link, tag
from ...page import Answer, Ask, Page
from ...state import Site
from ...store.index import Row
from ...store.run_paths import directory_path, run_path
from ..outputs.request import steps_of
from .config import flat, unfair
from .curves import curves
from .figures import summary
from .runs import Compared
from .settings import settings

LEAST, MOST = 2, 6
OFFERED = 200


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the page for the runs in the query."""
    added = ask.query.get("add", "")
    if added:
        ids = list(dict.fromkeys([*_ids(ask), added]))[:MOST]
        query = {**ask.query, "ids": ",".join(ids), "add": ""}
        ask = attrs.evolve(ask, query={name: text for name, text in query.items() if text})
        return attrs.evolve(_answer(site, ask), query=link("", **query).lstrip("?"))
    return _answer(site, ask)


def ticked(site: Site, ask: Ask) -> Answer:
    """Updates the metrics; form fields are not replaced."""
    answer = _answer(site, ask)
    return Answer({name: html for name, html in answer.regions.items() if name in ("summary", "curves")})


def _ids(ask: Ask) -> list[str]:
    return list(dict.fromkeys(one for one in ask.query.get("ids", "").split(",") if one))[:MOST]


def _answer(site: Site, ask: Ask) -> Answer:
    ids = _ids(ask)
    rows = {run: site.index.row(run) for run in ids}
    missing_ids = [run for run, row in rows.items() if row is None]
    there = [row for row in rows.values() if row is not None]
    head = _head(site, ask, there, missing_ids)
    if len(there) < LEAST:
        words = "Choose two to six runs." if not there else "Choose at least one more run."
        hint = "On the page Runs, tick runs and press Compare."
        empty = tag("p", f"{words} {hint}", cls="empty")
        if len(site.index.rows()) < LEAST:
            about = "This page compares two to six runs: shared charts, metrics, and the settings that differ. "
            none = "There are fewer than two runs. "
            empty = tag("p", about, none, tag("a", "Start one", href="/"), cls="empty")
        return Answer({"head": head, "warnings": join(), "summary": empty, "curves": join(), "config": join()})
    runs = [_compared(site, row, place) for place, row in enumerate(there)]
    base = _baseline(ask, runs)
    return Answer(
        {
            "head": head,
            "warnings": _warnings(runs),
            "summary": summary(runs, base),
            "curves": curves(ask, runs),
            "config": settings(ask, runs, base),
        }
    )


def _compared(site: Site, row: Row, place: int) -> Compared:
    try:
        directory = run_path(site.settings.home, row.id)
        config = flat(read_json(directory / "experiment.json"))
        columns = dict(site.series.of(directory / "metrics.jsonl").columns)
    except NnxdslError:
        config, columns = {}, {}
    return Compared(row, place % COLOURS, columns, config)


def _baseline(ask: Ask, runs: Sequence[Compared]) -> Compared:
    named = ask.query.get("base", "")
    return next((run for run in runs if run.row.id == named), runs[0])


# The head


def _head(site: Site, ask: Ask, there: list[Row], missing_ids: list[str]) -> Html:
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
    missing = (
        tag("p", f"Not in {site.settings.home}: {', '.join(missing_ids)}", cls="notice bad") if missing_ids else None
    )
    listed = tag("ul", items, cls="plain panel compared") if items else None
    row = tag("div", form, _to_outputs(site, ids, base), cls="row between")
    return join(tag("h1", "Compare runs"), missing, listed, row if ids else form)


def _to_outputs(site: Site, ids: list[str], base: str) -> Html | None:
    """Link to the outputs of a run against those of the baseline, if both have a checkpoint."""
    steps = {one: steps_of(directory_path(site.settings.home, one)) for one in ids}
    saved = [one for one in ids if one != base and steps[one]]
    if not saved or not steps.get(base):
        return None
    links = [
        tag(
            "a",
            "Compare outputs" if len(saved) == 1 else f"Outputs of {one}",
            href=link("/outputs", run=one, against=f"{base}@{steps[base][0]}"),
            cls="button",
            title=f"what {one} and {base} answer to the same prompts",
        )
        for one in saved
    ]
    return tag("div", links, cls="row")


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


# Comparability


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
        heading = tag("h2", "Compare with care")
        parts.append(tag("section", heading, tag("ul", lines, cls="plain"), cls="notice warn-box", role="note"))
    elif not unread:
        words = "✔ Same data, base model, seed, objective and batch size: metrics are directly comparable."
        parts.append(tag("p", words, cls="notice"))
    return join(parts)


PAGE = Page(
    name="compare",
    path="/compare",
    title="Compare",
    regions=("head", "warnings", "summary", "curves", "config"),
    actions={"open": opened, "tick": ticked},
)
