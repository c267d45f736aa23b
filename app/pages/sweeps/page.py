"""The Sweeps page: points as a table, parallel coordinates, the best so far, importance and curves of fields."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.errors import RunError

from ...formatting import number, sentence
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...store.sweeps import OpenedSweep, Point, names, opened
from ...view import Query, Values, if_any, is_narrow
from .actions import Actions
from .plots import best_so_far, curves, importance, parallel

EMPTY = (
    "A sweep runs one experiment at several points, a search looks for good ones. Start one from a run below, or "
    "define one in a Python file as `sweep = Sweep(...)` and run `nnxdsl sweep FILE`; it appears here while it runs."
)
COMPARED = 6
SECONDS = 5.0


class Sweeps(Page):
    """A sweep: its points, the best first, plots of them, and what may be done to it."""

    name, path, title = "sweeps", "/sweeps", "Sweeps"

    def build(self) -> None:
        """Adds the components."""
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
        return {
            **values,
            self.sweep: gr.update(choices=sweeps, value=name),
            self.metric: gr.update(choices=sweep.metrics, value=metric or None),
            self.by: gr.update(choices=sweep.fields, value=field or None),
            self.about: _about(sweep, metric),
            self.points: gr.update(value=points, datatype=_kinds(points), visible=True),
            self.lacking: if_any(lacking),
            **{
                plot: gr.update(value=one, visible=one is not None) for plot, one in zip(self.plots, plots, strict=True)
            },
        }


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
        parts.append(markdown_link(f"Compare the best {len(ids)}", link("/compare", ids=",".join(ids))))
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
                "#": point.number,
                **{path: point.changes.get(path, "") for path in sweep.fields},
                metric or "metric": number(point.metrics.get(metric)),
                "state": point.state,
                "step": "" if point.row is None else point.row.status.get("step") or 0,
                "run": _link(point.run),
            }
            for point in [*best, *others]
        ]
    )


def _kinds(rows: pd.DataFrame) -> list[str]:
    return ["markdown" if name == "run" else "str" for name in rows]


def _link(run: str) -> str:
    return markdown_link(run, link("/run", id=run))
