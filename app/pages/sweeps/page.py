"""The Sweeps page: points as a table, parallel coordinates, the best so far, importance and curves of fields."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.errors import RunError
from nnxdsl.launch.driver import STOP
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import write_json

from ...formatting import number, sentence
from ...markup import markdown_link, plain
from ...page import Page
from ...processes.launch import SWEEPS
from ...state import Site
from ...store.experiments import stored
from ...store.sweeps import OpenedSweep, Point, created, names, opened
from ...view import Done, Part, Query, Values, View, if_any, is_narrow
from .plots import best_so_far, curves, importance, parallel

EMPTY = (
    "A sweep runs one experiment at several points, a search looks for good ones. Start one from a run below, or "
    "define one in a Python file as `sweep = Sweep(...)` and run `nnxdsl sweep FILE`; it appears here while it runs."
)
COMBINED, ZIPPED = "Grid: every combination", "Zip: first values together, then second ones"
COMPARED = 6
SECONDS = 5.0


class Sweeps(Page):
    """A sweep: its points, the best first, plots of them, and what may be done to it."""

    name, path, title = "sweeps", "/sweeps", "Sweeps"

    def build(self) -> None:
        gr.Markdown("# Sweeps")
        with gr.Row():
            sweep = gr.Dropdown([], label="Sweep", info="Of the runs' directory, newest first", scale=2)
            metric = gr.Dropdown([], label="Metric", info="Last value of each run")
            by = gr.Dropdown([], label="Colour by", info="Field that groups the curves")
            named = {"of": sweep, "metric": metric, "by": by}
            self.sweep, self.metric, self.by = (self.view.control(name, one) for name, one in named.items())
        self.about = gr.Markdown()
        self.actions = None if self.site.settings.read_only else Actions(self.view, self.site)
        table: dict[str, Any] = {"show_search": "filter", "pinned_columns": 1, "interactive": False, "visible": False}
        self.points = gr.Dataframe(label="Points, the best first", **table)
        self.plots = [gr.Plot(show_label=False, visible=False) for _ in range(4)]
        self.lacking = gr.Markdown(visible=False)
        self.timer = gr.Timer(SECONDS)

    def fill(self, query: Query) -> Values:
        """Shows the sweep of the query, or the newest one."""
        site, sweeps = self.site, names(self.site.settings.home)
        name = query.get("of") or next(iter(sweeps), "")
        sweep = opened(site.settings.home, site.index, site.series, name) if name else None
        values: dict[Any, Any] = {} if self.actions is None else {**self.actions.fill(sweep)}
        if sweep is None:
            results = (self.points, *self.plots, self.lacking)
            hidden = dict.fromkeys(results, gr.update(visible=False))
            return {**values, **hidden, self.sweep: gr.update(choices=[]), self.about: EMPTY}
        metric = query["metric"] if query.get("metric") in sweep.metrics else next(iter(sweep.metrics), "")
        field = query["by"] if query.get("by") in sweep.fields else next(iter(sweep.fields), "")
        best, shares, lacking = sweep.ranked(metric), None, ""
        try:
            shares = importance(sweep, metric)
        except RunError as error:  # its library is an extra
            lacking = plain(sentence(str(error)))
        columns = 1 if is_narrow(query) else 2
        of_points = [parallel(sweep, metric), best_so_far(sweep, metric)] if best else [None, None]
        plots = [*of_points, shares, curves(site, sweep, metric, field, columns)]
        points = _table(sweep, metric, best)
        kinds = ["markdown" if name == "run" else "str" for name in points]
        return {
            **values,
            self.sweep: gr.update(choices=sweeps, value=name),
            self.metric: gr.update(choices=sweep.metrics, value=metric or None),
            self.by: gr.update(choices=sweep.fields, value=field or None),
            self.about: _about(sweep, metric),
            self.points: gr.update(value=points, datatype=kinds, visible=True),
            self.lacking: if_any(lacking),
            **{
                plot: gr.update(value=one, visible=one is not None) for plot, one in zip(self.plots, plots, strict=True)
            },
        }


class Actions(Part):
    """Buttons and the form of a new sweep; built only where the app may write."""

    def __init__(self, view: View, site: Site) -> None:
        self.site = site
        self._refused = gr.Markdown(visible=False, elem_classes=["problem"])
        with gr.Row():
            options: dict[str, Any] = {"visible": False, "size": "sm", "min_width": 160}
            self._stop = view.button("Stop the sweep", self._stopped, **options)
            self._resume, self._retry = (
                view.button(text, **options) for text in ("Resume the sweep", "Retry failed runs")
            )
        with gr.Accordion("New sweep", open=False):
            self._base = gr.Dropdown([], label="Run", info="Its experiment is changed at every point")
            fields = gr.Textbox(
                label="Fields",
                info="One per line, with values as on the command line",
                lines=3,
                placeholder="objective.beta=0.05, 0.1\nseed=0, 1",
            )
            with gr.Row():
                combine = gr.Radio([COMBINED, ZIPPED], value=COMBINED, label="Points")
                parallel = gr.Number(1, label="Concurrent runs", precision=0, minimum=1)
            inputs = [self._base, fields, combine, parallel]
            view.button("Start the sweep", self._started, inputs, variant="primary", min_width=160)
        view.on(self._resume.click, self._resumed, [parallel])
        view.on(self._retry.click, partial(self._resumed, retry_failed=True), [parallel])

    def fill(self, sweep: OpenedSweep | None) -> Values:
        """Shows which buttons a sweep has, and why its last start was refused; None for no sweep."""
        points = () if sweep is None else sweep.points
        start = None if sweep is None else self.site.launcher.newest(sweep.name, SWEEPS)
        is_driven = start is not None and start.is_alive
        is_live = is_driven or any(point.row is not None and point.row.is_live for point in points)
        states = set() if is_live else {point.state for point in points}
        is_refused = start is not None and not is_driven and start.exit_code not in (None, 0, FAILED, INTERRUPTED)
        output = plain(start.output()) if start is not None and is_refused else ""
        return {
            self._stop: gr.update(visible=is_live),
            self._resume: gr.update(visible=bool(states - {"finished", "failed"})),
            self._retry: gr.update(visible="failed" in states and sweep is not None and sweep.kind == "sweep"),
            self._refused: gr.update(value=f"**The last start was refused:** {output}", visible=is_refused),
            self._base: gr.update(choices=[row.id for row in self.site.index.rows()]),
        }

    def _started(self, query: Query, run: str, text: str, points: str, parallel: int | None) -> Done:
        site = self.site
        experiment = stored(site.run(run or "").path / "experiment.json")
        if experiment is None:
            raise RunError(f"{run}: its experiment is damaged, or names code that is not allowed (--allow)")
        path = created(site.settings, experiment, text or "", zipped_values=points == ZIPPED)
        site.launcher.sweep(path, parallel=parallel or 1)
        return Done(f"Started {path.name}.", query={"of": path.name})

    def _resumed(self, query: Query, parallel: int | None, *, retry_failed: bool = False) -> Done:
        sweep = self._opened(query)
        self.site.launcher.sweep(sweep.path, parallel=parallel or 1, retry_failed=retry_failed)
        return Done(f"Resumed {sweep.name}.")

    def _stopped(self, query: Query) -> Done:
        sweep = self._opened(query)
        write_json(sweep.path / STOP, {"time": process_info.utc()})  # for the command that drives it
        self.site.launcher.audit("stop sweep", sweep.name)
        return Done("Stop requested: the command that drives the sweep stops all runs and ends.")

    def _opened(self, query: Query) -> OpenedSweep:
        home = self.site.settings.home
        return opened(home, self.site.index, self.site.series, query.get("of") or next(iter(names(home)), ""))


def _about(sweep: OpenedSweep, metric: str) -> str:
    """How many points have which state, and which is the best."""
    states = Counter(point.state for point in sweep.points).most_common()
    kind = "trials" if sweep.kind == "search" else "points"
    parts = [f"{len(sweep.points)} {kind}: {', '.join(f'{count} {plain(state)}' for state, count in states)}"]
    if best := sweep.ranked(metric):
        tied = [point for point in best if point.metrics[metric] == best[0].metrics[metric]]
        changes = ", ".join(f"{path}={value}" for path, value in best[0].changes.items())
        runs = ", ".join(_link(point.run) for point in tied[:COMPARED])
        named = f"{len(tied)} are tied, {runs}," if len(tied) > 1 else runs
        of = "" if len(tied) > 1 else f" ({plain(changes)})"
        parts.append(f"Best: {named} with {plain(metric)} {number(best[0].metrics[metric])}{of}")
    if len(best) > 1:
        ids = [point.run for point in best[:COMPARED]]
        parts.append(markdown_link(f"Compare the best {len(ids)}", "/compare", ids=",".join(ids)))
    return "\n\n".join(parts)


def _table(sweep: OpenedSweep, metric: str, best: list[Point]) -> pd.DataFrame:
    others = [point for point in sweep.points if point not in best]
    values = [point.metrics[metric] for point in best]  # sorted: a tie has the rank of its first
    ranks = {
        point.run: f"{values.index(value) + 1}{' (tie)' if values.count(value) > 1 else ''}"
        for point, value in zip(best, values, strict=True)
    }
    return pd.DataFrame(
        [
            {
                "rank": ranks.get(point.run, ""),
                "#": point.point,
                **{path: point.changes.get(path, "") for path in sweep.fields},
                metric or "metric": number(point.metrics.get(metric)),
                "state": point.state,
                "step": "" if point.row is None else point.row.status.get("step") or 0,
                "run": _link(point.run),
            }
            for point in [*best, *others]
        ]
    )


def _link(run: str) -> str:
    return markdown_link(run, "/run", id=run)
