"""The list of runs: states, progress and actions."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd

from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.errors import RunError
from nnxdsl.terminal.plan_format import pluralize

from ..components.confirm import Confirmation
from ..components.states import signed, sparkline
from ..html import link
from ..page import Page
from ..state import Site
from ..store.index import Row
from ..store.run_filter import filter_text, is_found, kind_of
from ..store.series import sampled
from ..store.tags import words_of
from ..view import Done, Query, Values, View
from ..words import age, duration, local_time
from .compare.runs import LEAST, MOST, filtered
from .demo import Offer

SHOWN = 1_000
STATES = ("running", "queued", "stopped", "finished", "failed", "refused", "lost", "damaged")
FEW = 200
LAUNCHES = 20
REFUSED_SECONDS = 24 * 3600.0
TICK, RUN = 0, 1
"""Columns whose cells do something when they are selected."""
COLUMNS = {
    "": 44, "Run": 210, "State": 130, "Progress": 190, "Loss": 90, "Accuracy": 96, "Margin": 90, "Curve": 170,
    "Objective": 110, "Trained": 130, "Model": 150, "Mesh": 120, "Tags": 150, "Started": 160, "Took": 110,
    "Heartbeat": 110,
}  # fmt: skip
"""Columns of the table and their widths in pixels."""
QUESTION = "The ticked runs will be moved to the directory .trash next to the runs."


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    timer = gr.Timer(4)
    gr.Markdown("# Runs")
    offer = Offer(site, view)
    with gr.Column(visible=False) as body:
        state = view.control("state", gr.Radio([("all", "")], value="", label="State", container=False))
        with gr.Row():
            hint = "Search name, objective, model, mesh, tag; state:failed, tag:baseline"
            search = view.control("q", gr.Textbox(label="Search runs", placeholder=hint, max_lines=1, scale=3))
            tag = view.control("tag", gr.Dropdown([("any tag", "")], value="", label="Tag", min_width=140))
            ticked = view.control(
                "ids", gr.Dropdown([], multiselect=True, label="Ticked runs", scale=3, info="Here, or in the table")
            )
        queue, questions = _actions(site, view)
        table = gr.Dataframe(
            interactive=False,
            column_widths=list(COLUMNS.values()),
            pinned_columns=2,
            max_height=640,
            elem_id="runs-table",
            show_search="none",
        )
        view.does(table.select, _selected, has_event=True)

    def shown(query: Query) -> Values:
        rows = [*_without_directory(site), *site.index.rows()]
        wanted = _filter(query)
        found = [row for row in rows if is_found(row, site.tags.of(row.id), wanted)]
        counts = Counter(kind_of(row) for row in rows)
        states = [one for one in STATES if counts[one] or query.get("state") == one]
        tags = sorted({*site.tags.used(row.id for row in rows), *filter(None, [query.get("tag")])})
        is_live = any(row.is_live or row.state == "queued" for row in rows)
        more = f", the newest {SHOWN:,} are listed: search for others" if len(found) > SHOWN else ""
        what = f"{pluralize(len(found), 'run')} in {site.settings.home}{more}"
        return {
            **offer.shown(not rows),
            body: gr.update(visible=bool(rows)),
            state: gr.update(
                choices=[(f"all {len(rows):,}", ""), *((f"{signed(one)} {counts[one]:,}", one) for one in states)],
                value=query.get("state", ""),
            ),
            search: query.get("q", ""),
            tag: gr.update(choices=[("any tag", ""), *((one, one) for one in tags)], value=query.get("tag", "")),
            ticked: gr.update(choices=[*dict.fromkeys([*(row.id for row in rows), *_ids(query)])], value=_ids(query)),
            table: gr.update(value=_table(site, found[:SHOWN], query), label=what),
            timer: gr.update(value=2 if is_live else 4 if len(rows) <= FEW else 12),
            **{button: gr.update(visible=bool(counts["queued"])) for button in queue},
            **{name: value for question in questions for name, value in question.shown(query).items()},
        }

    outputs = [body, state, search, tag, ticked, table, timer, *offer.outputs, *queue]
    view.shows(shown, [*outputs, *(one for question in questions for one in question.outputs)], every=timer)


def _actions(site: Site, view: View) -> tuple[list[gr.Button], list[Confirmation]]:
    """Adds the buttons; returns those for queued runs, and the question before a deletion."""

    def button(text: str, act: Callable[[Query, str], Done] | None = None, **more: Any) -> gr.Button:
        added = gr.Button(text, scale=0, min_width=100, **more)
        if act is not None:
            view.does(added.click, act)
        return added

    with gr.Row(elem_classes=["buttons"]):
        button("Compare", _compare)
        button("Compare what is shown", partial(_compare_shown, site))
        if site.settings.read_only:
            return [], []
        button("Clone", lambda query, client: Done(goto=link("/new", **{"from": _one(query, "clone it")})))
        button("Stop and save", partial(_stop, site))
        queue = [
            button("↑ Earlier", partial(move, site, places=-1), visible=False),
            button("↓ Later", partial(move, site, places=1), visible=False),
            button("Do not run", partial(unqueue, site), visible=False),
        ]
        remove = button("Delete", variant="stop")
        button("New run", variant="primary", link="/new")
    question = Confirmation(view, remove, "delete", QUESTION, partial(delete, site), _deleted)
    with gr.Accordion("Tag the ticked runs", open=False), gr.Row(elem_classes=["buttons"]):
        words = gr.Textbox(show_label=False, label="Tags", placeholder="baseline, -old", max_lines=1, scale=0)
        view.does(partial(gr.on, [button("Tag").click, words.submit]), partial(retag, site), [words])
    return queue, [question]


# Actions


def _selected(query: Query, _client: str, event: gr.SelectData) -> Done:
    """Ticks a run, or opens it."""
    _, column = event.index
    run, ids = str(event.row_value[RUN]), _ids(query)
    if column == RUN:
        return Done(goto=link("/run", id=run))
    if column == TICK:
        ids = [one for one in ids if one != run] if run in ids else [*ids, run]
    return Done(query={"ids": ",".join(ids)})


def _compare(query: Query, _client: str) -> Done:
    ids = _ids(query)
    if not LEAST <= len(ids) <= MOST:
        raise RunError(f"Tick {LEAST} to {MOST} runs to compare them.")
    return Done(goto=link("/compare", ids=",".join(ids)))


def _compare_shown(site: Site, query: Query, _client: str) -> Done:
    wanted = _filter(query)
    if len(filtered(site, {"filter": wanted})) < LEAST:
        raise RunError("Fewer than two runs with a directory are shown.")
    return Done(goto=link("/compare", filter=wanted))


def _stop(site: Site, query: Query, client: str) -> Done:
    ids = _some(query, "stop")
    for run in ids:
        site.launcher.stop(run, client)
    return Done(f"Stop requested: {', '.join(ids)}. They save a checkpoint after the current step.")


def retag(site: Site, query: Query, client: str, text: str) -> Done:
    """Adds tags to all ticked runs; `-tag` removes one."""
    ids, words = _ids(query), (text or "").replace(",", " ").split()
    if not ids or not words:
        raise RunError("Tick runs, and enter a tag (or -tag to remove it).")
    gone = {word[1:] for word in words if word.startswith("-")}
    more = words_of(" ".join(word for word in words if not word.startswith("-")))
    changed = {run: words_of(" ".join(word for word in (*site.tags.of(run), *more) if word not in gone)) for run in ids}
    for run, tags in changed.items():
        if site.index.row(run) is not None:
            site.tags.set(run, tags, client)
    return Done(f"Tagged {pluralize(len(ids), 'run')}.")


def delete(site: Site, query: Query, client: str) -> Done:
    """Moves all ticked runs to the home's trash."""
    ids = _some(query, "delete")
    for count, run in enumerate(ids):
        try:
            site.launcher.put_away(run, client)
        except RunError as error:
            left = {"ids": ",".join(ids[count:])}
            return Done(f"{error}. {count} were deleted before it.", is_problem=True, query=left)
    return Done(f"Moved to {site.settings.home / '.trash'}: {', '.join(ids)}.", query={"ids": ""})


def _deleted(query: Query) -> str:
    """What has to be typed to delete the ticked runs."""
    ids = _ids(query)
    return f"{len(ids)} runs" if len(ids) > 1 else "".join(ids)


def move(site: Site, query: Query, client: str, places: int) -> Done:
    """Moves the ticked run up or down in the queue."""
    return Done(site.launcher.move(_one(query, "move it in the queue"), places, client))


def unqueue(site: Site, query: Query, client: str) -> Done:
    """Removes the ticked runs from the queue."""
    return Done(" ".join(site.launcher.unqueue(run, client) for run in _some(query, "take out of the queue")))


def _ids(query: Query) -> list[str]:
    return [one for one in query.get("ids", "").split(",") if one][:50]


def _some(query: Query, what: str) -> list[str]:
    if not (ids := _ids(query)):
        raise RunError(f"Tick the runs to {what}.")
    return ids


def _one(query: Query, what: str) -> str:
    ids = _ids(query)
    if len(ids) != 1:
        raise RunError(f"Tick one run to {what}.")
    return ids[0]


# The table


def _without_directory(site: Site) -> list[Row]:
    """Runs that are starting, queued, or were refused within a day: there is no directory of them."""
    home, queued = site.settings.home, [one.run for one in site.launcher.waiting()]
    states: dict[str, str] = {}
    for launch in itertools.islice(site.launcher.launches(), LAUNCHES):  # the newest start of a run comes first
        is_refused = launch.exit_code == REFUSED and time.time() - launch.began < REFUSED_SECONDS
        states.setdefault(launch.run, "starting" if launch.is_alive else "refused" if is_refused else "")
    found = [
        Row(id=run, path=home / run, state=state)
        for run, state in states.items()
        if state and run not in queued and site.index.row(run) is None
    ]
    places = [(run, f"{place} of {len(queued)}") for place, run in enumerate(queued, start=1)]
    return found + [Row(id=run, path=home / run, state="queued", inconsistency=place) for run, place in places]


def _filter(query: Query) -> str:
    return filter_text(query.get("q", ""), query.get("state", ""), query.get("tag", ""))


def _table(site: Site, rows: Sequence[Row], query: Query) -> pd.DataFrame:
    ids, zone = set(_ids(query)), query.get("_zone", "")
    lines = [["☑" if row.id in ids else "☐", *_cells(site, row, zone)] for row in rows]
    return pd.DataFrame(lines, columns=list(COLUMNS), dtype=object)


def _cells(site: Site, row: Row, zone: str) -> list[object]:
    status, metrics, facts = row.status, row.metrics, row.facts
    total, seconds = status.get("total"), status.get("eta_seconds")
    left = f", {duration(seconds)} left" if row.is_live and seconds is not None else ""
    values = sampled(row.path / "metrics.jsonl", "loss") if row.status else np.zeros(0)
    return [
        row.id,
        ", ".join(
            [signed(row.state), *filter(None, [row.problem, row.inconsistency if row.state == "queued" else None])]
        ),
        f"{status.get('step') or 0:,} of {total:,}{left}" if total else "",
        _rounded(metrics, "loss"),
        _rounded(metrics, "rewards/accuracies", "mean_token_accuracy"),
        _rounded(metrics, "rewards/margins"),
        sparkline(values[np.isfinite(values)].tolist()),
        *(facts.get(name, "") for name in ("objective", "adapter", "model", "mesh")),
        " ".join(site.tags.of(row.id)),
        local_time(row.created, zone),
        duration(row.seconds),
        age(row.quiet) if row.is_live and math.isfinite(row.quiet) else "",
    ]


def _rounded(metrics: Mapping[str, Any], *names: str) -> object:
    """The first of some metrics, with four significant digits; a text if it is not finite."""
    value = next((metrics[name] for name in names if name in metrics), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


PAGE = Page(name="runs", path="/", title="Runs", build=build)
