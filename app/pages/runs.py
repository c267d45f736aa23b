"""The list of runs: states, progress and actions."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd

from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.errors import RunError

from ..components.confirm import Confirmation
from ..components.states import signed, sparkline
from ..html import link
from ..page import Page
from ..processes.launch import Launch
from ..state import Site
from ..store.index import Row
from ..store.run_filter import filter_text, is_found, kind_of
from ..store.series import sampled
from ..store.tags import words_of
from ..view import Done, Query, Values, View
from ..words import age, duration, local_time
from .compare.runs import filtered
from .demo import Offer

SHOWN = 1_000
STATES = ("running", "queued", "stopped", "finished", "failed", "refused", "lost", "damaged")
COMPARED = 6
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
        with gr.Row(elem_classes=["buttons"]):
            view.does(_button("Compare").click, compare)
            view.does(_button("Compare what is shown").click, lambda query, client: compare_shown(site, query))
            remove, queue = (None, []) if site.settings.read_only else _writing(site, view)
        confirmations = [] if remove is None else _asking(site, view, remove)
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
        what = f"{len(found):,} {'run' if len(found) == 1 else 'runs'} in {site.settings.home}"
        if len(found) > SHOWN:
            what += f", the newest {SHOWN:,} are listed: search for others"
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
            **{name: value for question in confirmations for name, value in question.shown(query).items()},
        }

    outputs = [body, state, search, tag, ticked, table, timer, *offer.outputs, *queue]
    view.shows(shown, [*outputs, *(one for question in confirmations for one in question.outputs)], every=timer)


def _button(text: str, **more: Any) -> gr.Button:
    return gr.Button(text, scale=0, min_width=100, **more)


def _writing(site: Site, view: View) -> tuple[gr.Button, list[gr.Button]]:
    """Adds the buttons of actions that write; returns that of the deletion, and those of queued runs."""
    view.does(_button("Clone").click, clone)
    view.does(_button("Stop and save").click, lambda query, client: stop(site, query, client))
    earlier, later, drop = queue = [_button(text, visible=False) for text in ("↑ Earlier", "↓ Later", "Do not run")]
    view.does(earlier.click, lambda query, client: move(site, query, client, -1))
    view.does(later.click, lambda query, client: move(site, query, client, 1))
    view.does(drop.click, lambda query, client: unqueue(site, query, client))
    remove = _button("Delete", variant="stop")
    _button("New run", variant="primary", link="/new")
    return remove, queue


def _asking(site: Site, view: View, remove: gr.Button) -> list[Confirmation]:
    """Adds what asks before runs are deleted, and the field for tags."""
    question = "The ticked runs will be moved to the directory .trash next to the runs."
    confirmations = Confirmation(view, remove, "delete", question, lambda *given: delete(site, *given), _deleted)
    with gr.Accordion("Tag the ticked runs", open=False), gr.Row(elem_classes=["buttons"]):
        words = gr.Textbox(show_label=False, label="Tags", placeholder="baseline, -old", max_lines=1, scale=0)
        add = _button("Tag")
    for trigger in (add.click, words.submit):
        view.does(trigger, lambda query, client, text: retag(site, query, client, text), [words])
    return [confirmations]


# Actions


def _selected(query: Query, client: str, event: gr.SelectData) -> Done:
    """Ticks a run, or opens it."""
    _, column = event.index
    run = str(event.row_value[RUN])
    if column == RUN:
        return Done(goto=link("/run", id=run))
    ids = _ids(query)
    if column == TICK:
        ids = [one for one in ids if one != run] if run in ids else [*ids, run]
    return Done(query={"ids": ",".join(ids)})


def compare(query: Query, client: str) -> Done:
    """Opens the Compare page for the ticked runs."""
    ids = _ids(query)
    if not 2 <= len(ids) <= COMPARED:
        raise RunError(f"Tick 2 to {COMPARED} runs to compare them.")
    return Done(goto=link("/compare", ids=",".join(ids)))


def compare_shown(site: Site, query: Query) -> Done:
    """Opens the Compare page for the runs that the filter finds."""
    wanted = _filter(query)
    if len(filtered(site, {"filter": wanted})) < 2:
        raise RunError("Fewer than two runs with a directory are shown.")
    return Done(goto=link("/compare", filter=wanted))


def clone(query: Query, client: str) -> Done:
    """Opens a new draft that is copied from the ticked run."""
    return Done(goto=link("/new", **{"from": _one(query, "clone it")}))


def stop(site: Site, query: Query, client: str) -> Done:
    """Requests that all ticked runs save a checkpoint and stop."""
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
    return Done(f"Tagged {len(ids)} {'run' if len(ids) == 1 else 'runs'}.")


def delete(site: Site, query: Query, client: str) -> Done:
    """Moves all ticked runs to the home's trash."""
    left = _some(query, "delete")
    gone: list[str] = []
    try:
        while left:
            site.launcher.put_away(left[0], client)
            gone.append(left.pop(0))
    except RunError as error:
        return Done(f"{error}. {len(gone)} were deleted before it.", is_problem=True, query={"ids": ",".join(left)})
    return Done(f"Moved to {site.settings.home / '.trash'}: {', '.join(gone)}.", query={"ids": ""})


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
    ids = _ids(query)
    if not ids:
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
    newest = {one.run: one for one in reversed(site.launcher.launches(0, LAUNCHES))}
    queued = [one.run for one in site.launcher.waiting()]
    states = {run: state for run, one in reversed(newest.items()) if (state := _state_of(one)) and run not in queued}
    states |= dict.fromkeys(queued, "queued")
    return [
        Row(id=run, path=site.settings.home / run, state=state, doubt=_place(queued, run))
        for run, state in states.items()
        if run in queued or site.index.row(run) is None
    ]


def _place(queued: Sequence[str], run: str) -> str | None:
    return f"{queued.index(run) + 1} of {len(queued)}" if run in queued else None


def _state_of(launch: Launch) -> str | None:
    if launch.is_alive:
        return "starting"
    is_recent = time.time() - launch.began < REFUSED_SECONDS
    return "refused" if launch.exit_code == REFUSED and is_recent else None


def _filter(query: Query) -> str:
    return filter_text(query.get("q", ""), query.get("state", ""), query.get("tag", ""))


def _table(site: Site, rows: Sequence[Row], query: Query) -> pd.DataFrame:
    ids, zone = set(_ids(query)), query.get("_zone", "")
    lines = [["☑" if row.id in ids else "☐", *_cells(site, row, zone)] for row in rows]
    return pd.DataFrame(lines, columns=list(COLUMNS), dtype=object)


def _cells(site: Site, row: Row, zone: str) -> list[object]:
    metrics, facts = row.metrics, row.facts
    values = sampled(row.path / "metrics.jsonl", "loss") if row.status else np.zeros(0)
    return [
        row.id,
        ", ".join([signed(row.state), *filter(None, [row.problem, row.doubt if row.state == "queued" else None])]),
        _progress(row),
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


def _progress(row: Row) -> str:
    status = row.status
    step, total, seconds = status.get("step") or 0, status.get("total"), status.get("eta_seconds")
    if not total:
        return ""
    left = f", {duration(seconds)} left" if row.is_live and seconds is not None else ""
    return f"{step:,} of {total:,}{left}"


def _rounded(metrics: Mapping[str, Any], *names: str) -> object:
    """The first of some metrics, with four significant digits; a text if it is not finite."""
    value = next((metrics[name] for name in names if name in metrics), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


PAGE = Page(name="runs", path="/", title="Runs", build=build)
