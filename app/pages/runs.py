"""The list of runs: states, progress and actions."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd

from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.errors import RunError
from nnxdsl.terminal.plan_format import pluralize
from nnxdsl.terminal.sparkline import sparkline

from ..components.confirm import Confirmation
from ..components.states import signed
from ..formatting import age, duration, local_time, rounded, whole
from ..markup import link
from ..page import Page
from ..processes.launch import TRASH, Launch
from ..state import Site
from ..store.index import Row
from ..store.run_filter import filter_text, is_found, kind_of, number_of
from ..store.series import sampled
from ..store.sweeps import sweeps_by_run
from ..store.tags import parse_tags
from ..view import Done, Query, Values
from .compare.runs import LEAST, MOST, filtered
from .demo import Offer

SHOWN = 50  # runs of a page of the table
STATES = ("running", "queued", "stopped", "finished", "failed", "refused", "lost", "damaged", "missing")
MANY = 200
LAUNCHES = 20
REFUSED_SECONDS = 24 * 3600.0
TICK, RUN = 0, 1  # columns whose cells do something when they are selected
METRICS = {
    "Loss": ("loss",),
    "Accuracy": ("rewards/accuracies", "mean_token_accuracy"),
    "Margin": ("rewards/margins",),
    "Reward": ("reward",),
}
FACTS = {"Objective": "objective", "Adapter": "adapter", "Model": "model", "Mesh": "mesh"}
BEFORE, AFTER = ("State", "Progress", *METRICS, "Curve"), ("Sweep", "Tags", "Created", "Duration", "Heartbeat")
"""Columns before and after those of settings."""
OF_FACTS = re.compile(r"(objective|model|adapter)\.type|model\.size|mesh\..*|.*\.every_(steps|minutes)|log_.*")
"""Settings that are columns as facts, or change nothing that is learnt: no columns unless they are chosen."""
MOST_DIFFERING = 6
LETTER_PIXELS, CELL_PIXELS, LEAST_PIXELS, MOST_PIXELS = 8.5, 34, 64, 340
"""Of a letter in the table, what is around a cell's text, and of a column."""
QUESTION = "The ticked runs will be moved to the directory .trash next to the runs."


class Runs(Page):
    """Runs of a filter as a table, and actions on those that are ticked."""

    name, path, title = "runs", "/", "Runs"

    def build(self) -> None:
        control, site = self.view.control, self.site
        self.timer = gr.Timer(4)
        gr.Markdown("# Runs")
        self.offer = Offer(site, self.view)
        with gr.Column(visible=False) as self.body:
            state = gr.Radio([("all", "")], value="", label="State", container=False)
            self.state = control("state", state)
            with gr.Row():
                hint = "Name, objective, model, tag; state:failed, tag:baseline, lr>1e-4, loss<0.5"
                search = gr.Textbox(label="Search runs", placeholder=hint, max_lines=1, scale=3)
                tag = gr.Dropdown([("any tag", "")], value="", label="Tag", min_width=140)
                many: dict[str, Any] = {"multiselect": True, "scale": 3}
                ticked = gr.Dropdown([], label="Ticked runs", info="Here, or in the table", **many)
                self.search, self.tag, self.ticked = control("q", search), control("tag", tag), control("ids", ticked)
            with gr.Accordion("Columns, order and groups", open=False), gr.Row():
                self.columns = control("columns", gr.Dropdown([], label="Columns", **many))
                self.sort = control("sort", gr.Dropdown([("newest first", "")], value="", label="Sort by"))
                self.descending = control("desc", gr.Checkbox(label="Descending", min_width=120))
                self.group = control("group", gr.Dropdown([("none", "")], value="", label="Group by"))
            self.queue_buttons: list[gr.Button] = []
            self.question: Confirmation | None = None
            self._add_actions()
            table: dict[str, Any] = {"interactive": False, "pinned_columns": 2, "max_height": 640}
            self.table = gr.Dataframe(elem_id="runs-table", show_search="none", **table)
            with gr.Row(elem_classes=["buttons"]):
                self.turn = {
                    text: self.view.button(text, partial(_turned, pages=pages), size="sm", visible=False)
                    for text, pages in (("Previous", -1), ("Next", 1))
                }
            self.view.on(self.table.select, _selected, has_event=True)

    def fill(self, query: Query) -> Values:
        site, tags_of, wanted = self.site, self.site.tags.by_run(), _filter(query)
        rows = [*_without_directory(site), *site.index.rows()]
        matching = [row for row in rows if is_found(row, tags_of.get(row.id, ()), wanted)]
        listed = Listed(site, matching, tags_of, query)
        counts = Counter(kind_of(row) for row in rows)
        states = [one for one in STATES if counts[one] or query.get("state") == one]
        ids = {row.id for row in rows}
        used = {one for run, tags in tags_of.items() if run in ids for one in tags}
        tags = [("any tag", ""), *((one, one) for one in sorted({*used, *filter(None, [query.get("tag")])}))]
        is_live = any(row.is_live or row.state == "queued" for row in rows)
        page = f", page {listed.page + 1} of {listed.pages}" if listed.pages > 1 else ""
        groups = [("none", ""), *(one for one in listed.offered if one != "Curve")]
        frame, ticked = listed.frame(), list(dict.fromkeys([*(row.id for row in listed.rows), *_ids(query)]))
        return {
            **self.offer.fill(is_empty=not rows),
            self.body: gr.update(visible=bool(rows)),
            self.state: gr.update(
                choices=[(f"all {len(rows):,}", ""), *((f"{signed(one)} {counts[one]:,}", one) for one in states)],
                value=query.get("state", ""),
            ),
            self.tag: gr.update(choices=tags, value=query.get("tag", "")),
            self.ticked: gr.update(choices=ticked, value=_ids(query)),
            self.columns: gr.update(choices=listed.offered, value=list(listed.columns)),
            self.sort: gr.update(choices=[("newest first", ""), *listed.offered], value=listed.sort),
            self.descending: query.get("desc") == "1",
            self.group: gr.update(choices=groups, value=listed.group),
            self.table: gr.update(
                value=frame,
                column_widths=widths(frame),
                label=f"{pluralize(len(matching), 'run')} in {site.settings.home}{page}",
            ),
            self.turn["Previous"]: gr.update(visible=listed.pages > 1, interactive=listed.page > 0),
            self.turn["Next"]: gr.update(visible=listed.pages > 1, interactive=listed.page + 1 < listed.pages),
            self.timer: gr.update(value=2 if is_live else 4 if len(rows) <= MANY else 12),
            **{button: gr.update(visible=bool(counts["queued"])) for button in self.queue_buttons},
            **({} if self.question is None else self.question.fill(query)),
        }

    def _add_actions(self) -> None:
        """Adds the buttons, those for queued runs among them, and the question before a deletion."""
        site, view = self.site, self.view
        button = partial(view.button, min_width=100)
        with gr.Row(elem_classes=["buttons"]):
            button("Compare", _compare)
            button("Compare what is shown", partial(_compare_shown, site))
            if site.settings.read_only:
                return
            button(
                "Clone", lambda query: Done(goto=link("/new", **{"from": _ticked(query, "clone it", is_one=True)[0]}))
            )
            button("Stop and save", partial(_stop, site))
            self.queue_buttons = [
                button("↑ Earlier", partial(move, site, places=-1), visible=False),
                button("↓ Later", partial(move, site, places=1), visible=False),
                button("Remove from the queue", partial(unqueue, site), visible=False),
            ]
            remove = button("Delete", variant="stop")
            button("New run", variant="primary", link="/new")
        self.question = Confirmation(view, remove, "delete", QUESTION, partial(delete, site), _to_type)
        with gr.Accordion("Tag the ticked runs", open=False), gr.Row(elem_classes=["buttons"]):
            hint = "baseline, -old"
            tags = gr.Textbox(show_label=False, label="Tags", placeholder=hint, max_lines=1, scale=0)
            view.on(partial(gr.on, [button("Tag").click, tags.submit]), partial(retag, site), [tags])


# Actions


def _selected(query: Query, event: gr.SelectData) -> Done:
    """Ticks a run, or opens it."""
    _, column = event.index
    run, ids = str(event.row_value[RUN]), _ids(query)
    if column == RUN:
        return Done(goto=link("/run", id=run))
    if column == TICK:
        ids = [one for one in ids if one != run] if run in ids else [*ids, run]
    return Done(query={"ids": ",".join(ids)})


def _turned(query: Query, pages: int) -> Done:
    """Shows another page of the table; gradio itself reads a part `page` of queries."""
    page = max(0, (whole(query.get("p", "")) or 1) - 1 + pages)
    return Done(query={"p": str(page + 1) if page else ""})


def _compare(query: Query) -> Done:
    ids = _ids(query)
    if not LEAST <= len(ids) <= MOST:
        raise RunError(f"Tick {LEAST} to {MOST} runs to compare them.")
    return Done(goto=link("/compare", ids=",".join(ids)))


def _compare_shown(site: Site, query: Query) -> Done:
    wanted = _filter(query)
    if len(filtered(site, {"filter": wanted})) < LEAST:
        raise RunError("Fewer than two runs with a directory are shown.")
    return Done(goto=link("/compare", filter=wanted))


def _stop(site: Site, query: Query) -> Done:
    ids = _ticked(query, "stop")
    for run in ids:
        site.launcher.stop(run)
    return Done(f"Stop requested: {', '.join(ids)}. They save a checkpoint after the current step.")


def retag(site: Site, query: Query, text: str) -> Done:
    """Adds tags to all ticked runs; `-tag` removes one."""
    ids, new_tags = _ids(query), (text or "").replace(",", " ").split()
    if not ids or not new_tags:
        raise RunError("Tick runs, and enter a tag (or -tag to remove it).")
    removed = {tag[1:] for tag in new_tags if tag.startswith("-")}
    added = parse_tags(" ".join(tag for tag in new_tags if not tag.startswith("-")))
    changed = {
        run: parse_tags(" ".join(tag for tag in (*site.tags.of(run), *added) if tag not in removed)) for run in ids
    }
    for run, tags in changed.items():
        if site.index.row(run) is not None:
            site.tags.set(run, tags)
    return Done(f"Tagged {pluralize(len(ids), 'run')}.")


def delete(site: Site, query: Query) -> Done:
    """Moves all ticked runs to the home's trash."""
    ids = _ticked(query, "delete")
    for count, run in enumerate(ids):
        try:
            site.launcher.trash(run)
        except RunError as error:
            left = {"ids": ",".join(ids[count:])}
            return Done(f"{error}. {count} were deleted before it.", is_problem=True, query=left)
    return Done(f"Moved to {site.settings.home / TRASH}: {', '.join(ids)}.", query={"ids": ""})


def _to_type(query: Query) -> str:
    """What has to be typed to delete the ticked runs."""
    ids = _ids(query)
    return f"{len(ids)} runs" if len(ids) > 1 else "".join(ids)


def move(site: Site, query: Query, places: int) -> Done:
    """Moves the ticked run up or down in the queue."""
    return Done(site.launcher.move(_ticked(query, "move it in the queue", is_one=True)[0], places))


def unqueue(site: Site, query: Query) -> Done:
    """Removes the ticked runs from the queue."""
    return Done(" ".join(site.launcher.unqueue(run) for run in _ticked(query, "take out of the queue")))


def _ids(query: Query) -> list[str]:
    return [one for one in query.get("ids", "").split(",") if one][:50]


def _ticked(query: Query, what: str, *, is_one: bool = False) -> list[str]:
    """The ticked runs; raises if there are none, or several where `is_one`."""
    ids = _ids(query)
    if not ids or (is_one and len(ids) > 1):
        raise RunError(f"Tick {'one run' if is_one else 'the runs'} to {what}.")
    return ids


# The table


def _without_directory(site: Site) -> list[Row]:
    """Runs without a directory: those that are starting or queued, were refused within a day, or lost it at work."""
    home, queued = site.settings.home, [one.run for one in site.launcher.waiting()]
    newest: dict[str, Launch] = {}
    for launch in itertools.islice(site.launcher.launches(), LAUNCHES):
        newest.setdefault(launch.run, launch)
    rows = [
        Row(id=run, path=home / run, state=launch.state)
        for run, launch in newest.items()
        if run not in queued and site.index.row(run) is None
        if launch.is_alive or (launch.exit_code == REFUSED and time.time() - launch.began < REFUSED_SECONDS)
    ]
    places = [(run, f"{place} of {len(queued)}") for place, run in enumerate(queued, start=1)]
    return rows + [Row(id=run, path=home / run, state="queued", inconsistency=place) for run, place in places]


def _filter(query: Query) -> str:
    return filter_text(query.get("q", ""), query.get("state", ""), query.get("tag", ""))


class Listed:
    """The runs that a query finds, as a page of a table whose columns it chooses.

    Without a choice they are those of every list, and settings in which the runs differ.
    """

    def __init__(self, site: Site, matching: Sequence[Row], tags: Mapping[str, tuple[str, ...]], query: Query) -> None:
        self._tags, self._query, self._sweeps = tags, query, sweeps_by_run(site.settings.home)
        differing = {name for row in matching for name, _ in row.settings.items() ^ matching[0].settings.items()}
        paths = list(dict.fromkeys(name for row in matching[:1] for name in row.settings))
        paths += sorted(differing - set(paths))
        self.offered = [*BEFORE, *FACTS, *paths, *AFTER]
        columns = [name for name in paths if name in differing and not OF_FACTS.fullmatch(name)][:MOST_DIFFERING]
        facts = [name for name, key in FACTS.items() if len({row.facts.get(key) for row in matching}) > 1]
        filled = [name for name, keys in METRICS.items() if any(key in row.metrics for row in matching for key in keys)]
        is_live = any(row.is_live for row in matching)
        usual = [name for name in BEFORE if name not in METRICS or name in filled or name == "Loss"]
        hidden = {"Heartbeat"} if not is_live else set()
        hidden |= {"Sweep"} if all(row.id not in self._sweeps for row in matching) else set()
        usual += [*facts, *columns, *(name for name in AFTER if name not in hidden)]
        chosen = [name for name in query.get("columns", "").split(",") if name in self.offered]
        self.columns = tuple(chosen or usual)
        self.sort, self.group = (query[name] if query.get(name) in self.offered else "" for name in ("sort", "group"))
        rows = list(matching)
        for name, is_reversed in ((self.sort, query.get("desc") == "1"), (self.group, False)):  # both sorts are stable
            if name:
                rows = self._sorted(rows, name, is_reversed)
        self.pages = max(1, -(-len(rows) // SHOWN))
        self.page = min(self.pages, max(1, whole(query.get("p", "")) or 1)) - 1
        self.rows = rows[self.page * SHOWN : (self.page + 1) * SHOWN]

    def frame(self) -> pd.DataFrame:
        """The page as a table; a group's column comes first of those that are chosen."""
        names = [self.group, *(one for one in self.columns if one != self.group)] if self.group else self.columns
        ids = set(_ids(self._query))
        lines = [
            ["☑" if row.id in ids else "☐", row.id, *(self._cell(row, name) for name in names)] for row in self.rows
        ]
        return pd.DataFrame(lines, columns=["", "Run", *names], dtype=object)

    def _sorted(self, rows: list[Row], name: str, is_reversed: bool) -> list[Row]:
        """Sorts numbers before texts, and rows without a value last."""
        keyed = [(self._key(row, name), row) for row in rows]
        present = [one for one in keyed if one[0] is not None]
        numbers = [one for one in present if not isinstance(one[0], str)]
        texts = [one for one in present if isinstance(one[0], str)]
        for each in (numbers, texts):
            each.sort(key=lambda one: one[0], reverse=is_reversed)
        return [row for _, row in [*numbers, *texts, *(one for one in keyed if one[0] is None)]]

    def _key(self, row: Row, name: str) -> float | str | None:
        if name == "Created":
            return row.created
        if name in ("Progress", "Duration", "Heartbeat"):
            value = {"Progress": row.status.get("step"), "Duration": row.seconds, "Heartbeat": row.quiet}[name]
            return None if value is None else float(value)
        value = self._cell(row, name)
        number = number_of(value)
        return number if number is not None and math.isfinite(number) else str(value) if value else None

    def _cell(self, row: Row, name: str) -> object:
        status = row.status
        if name in METRICS:
            return _rounded(row.metrics, *METRICS[name])
        if name in FACTS:
            return row.facts.get(FACTS[name], "")
        if name == "State":
            queue = row.inconsistency if row.state == "queued" else None
            return ", ".join([signed(row.state), *filter(None, [row.problem, queue])])
        if name == "Progress":
            total, seconds = status.get("total"), status.get("eta_seconds")
            left = f", {duration(seconds)} left" if row.is_live and seconds is not None else ""
            return f"{status.get('step') or 0:,} of {total:,}{left}" if total else ""
        if name == "Curve":
            values = sampled(row.path / "metrics.jsonl", "loss") if status else np.zeros(0)
            return sparkline(values[np.isfinite(values)].tolist())
        if name == "Sweep":
            return self._sweeps.get(row.id, "")
        if name == "Tags":
            return " ".join(self._tags.get(row.id, ()))
        if name == "Created":
            return local_time(row.created, self._query.get("_zone", ""))
        if name == "Duration":
            return duration(row.seconds)
        if name == "Heartbeat":
            return age(row.quiet) if row.is_live and math.isfinite(row.quiet) else ""
        return row.settings.get(name, "")


def widths(frame: pd.DataFrame) -> list[int]:
    """The width of each column in pixels: no number is cut."""

    def width(name: str) -> int:
        longest = max((len(str(one)) for one in [name, *frame[name]]), default=0)
        return round(min(MOST_PIXELS, max(LEAST_PIXELS, longest * LETTER_PIXELS + CELL_PIXELS)))

    return [44, *(width(name) for name in frame.columns[1:])]


def _rounded(metrics: Mapping[str, Any], *names: str) -> object:
    """The first of some metrics, with four significant digits; a text if it is not finite."""
    value = next((metrics[name] for name in names if name in metrics), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return rounded(value) if math.isfinite(value) else str(value)
