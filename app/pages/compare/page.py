"""The Compare page: metrics, curves and differing settings of two to six runs, and whether they are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr
import pandas as pd

from ...components.axes import OVER, offered
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.run_paths import directory_path
from ...view import Query, Values, View
from ..outputs.request import steps_of
from ..run.charts import SMOOTHING
from .config import unfair
from .curves import curves
from .figures import summary
from .runs import LEAST, MOST, Compared, compared
from .settings import settings

FAIR = "✔ Same data, base model, seed, objective and batch size: metrics are directly comparable."


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Compare runs")
    with gr.Row():
        ids = view.control(
            "ids", gr.Dropdown([], multiselect=True, max_choices=MOST, label="Runs", info="Two to six of them", scale=3)
        )
        base = view.control("base", gr.Dropdown([], label="Baseline", info="Differences are to its values"))
    notes = gr.Markdown()
    metrics_title = gr.Markdown("## Metrics", visible=False)
    metrics = gr.Dataframe(label="Last value (difference to the baseline), best value and its step", **_TABLE)
    with gr.Row(visible=False) as files:
        kinds = {"csv": "CSV", "md": "Markdown", "html": "Report (HTML)"}
        saves = {kind: gr.Button(text, link="#", size="sm", scale=0, min_width=120) for kind, text in kinds.items()}
    with gr.Row(visible=False) as controls:
        view.control(
            "smooth", gr.Dropdown(list(SMOOTHING), value="0", label="Smoothing", info="Weight of the past"), "0"
        )
        over = view.control("x", gr.Dropdown(list(OVER), value="step", label="Over", info="Horizontal axis"), "step")
        view.control("log", gr.Checkbox(label="Logarithmic", info="Losses, rates and speeds"))
        view.control("all", gr.Checkbox(label="All metrics", info="Not only those that are charted by default"))
    plot = gr.Plot(show_label=False, visible=False)
    config = view.control(
        "config",
        gr.Radio([("Differing settings", ""), ("All settings", "all")], value="", label="Settings", visible=False),
    )
    fields = gr.Dataframe(label="Settings of the runs", **_TABLE)
    outputs = [ids, base, notes, metrics_title, metrics, files, *saves.values(), controls, over, plot, config, fields]

    def shown(query: Query) -> Values:
        runs, missing_ids = compared(site, query)
        rows = site.index.rows()
        here = {"visible": len(runs) >= LEAST}
        chosen = [run.row.id for run in runs]
        found: dict[Any, Any] = {
            ids: gr.update(choices=[row.id for row in rows], value=chosen),
            base: gr.update(choices=chosen, value=_baseline(query, runs).row.id if runs else None),
            **dict.fromkeys((metrics_title, files, controls, config), gr.update(**here)),
        }
        if len(runs) < LEAST:
            empty = pd.DataFrame()
            hidden = gr.update(visible=False, value=None)
            words = _too_few(len(runs), len(rows))
            return {
                **found,
                notes: "\n\n".join([*_missing(site, missing_ids), words]),
                metrics: gr.update(visible=False, value=empty),
                fields: gr.update(visible=False, value=empty),
                plot: hidden,
            }
        baseline = _baseline(query, runs)
        what, table = settings(runs, everything=query.get("config") == "all")
        saved = link("/download", compare=",".join(chosen))
        return {
            **found,
            notes: "\n\n".join([*_missing(site, missing_ids), *_warnings(runs), *_to_outputs(site, chosen, baseline)]),
            metrics: gr.update(value=summary(runs, baseline), **here),
            **{save: gr.update(link=f"{saved}&as={kind}") for kind, save in saves.items()},
            over: gr.update(choices=list(offered([run.columns for run in runs]))),
            plot: gr.update(value=curves(query, runs), **here),
            fields: gr.update(value=table, label=what, visible=not table.empty),
        }

    view.shows(shown, outputs, every=3)


_TABLE: dict[str, Any] = {
    "interactive": False,
    "wrap": True,
    "visible": False,
    "pinned_columns": 1,
    "show_search": "filter",
}


def _baseline(query: Query, runs: Sequence[Compared]) -> Compared:
    return next((run for run in runs if run.row.id == query.get("base", "")), runs[0])


# What stands above the table


def _too_few(count: int, there: int) -> str:
    if there < LEAST:
        return (
            "This page compares two to six runs: shared charts, metrics, and the settings that differ. "
            f"There are fewer than two runs. {markdown_link('Start one', '/')}"
        )
    return "Choose two to six runs." if not count else "Choose at least one more run."


def _missing(site: Site, missing_ids: Sequence[str]) -> list[str]:
    home = plain(str(site.settings.home))
    return [f"**! Not in {home}: {plain(', '.join(missing_ids))}**"] if missing_ids else []


def _warnings(runs: Sequence[Compared]) -> list[str]:
    unread = [run.row.id for run in runs if not run.config]
    parts = [f"**! The settings of {plain(', '.join(unread))} cannot be read.**"] if unread else []
    found = unfair([run.config for run in runs if run.config])
    if found:
        lines = [f"- **! {one.what}**: {one.why} {', '.join(map(plain, one.paths[:6]))}" for one in found]
        return [*parts, "\n".join(["**Compare with care**", "", *lines])]
    return parts or [FAIR]


def _to_outputs(site: Site, ids: Sequence[str], base: Compared) -> list[str]:
    """Links to the outputs of each run against those of the baseline, if both have a checkpoint."""
    steps = {one: steps_of(directory_path(site.settings.home, one)) for one in ids}
    saved = [one for one in ids if one != base.row.id and steps[one]]
    if not saved or not steps[base.row.id]:
        return []
    against = f"{base.row.id}@{steps[base.row.id][0]}"
    return [
        "Outputs against the baseline: "
        + ", ".join(markdown_link(one, link("/outputs", run=one, against=against)) for one in saved)
    ]


PAGE = Page(name="compare", path="/compare", title="Compare", build=build)
