"""The Compare page: metrics, curves and differing settings of runs or groups of them, and if they are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

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
from .config import paths, unfair
from .curves import BANDS, curves
from .groups import SEEDS, Group, averaged_over, baseline_of, fields, grouped
from .runs import LEAST, MOST, MOST_FOUND, Compared, compared, filtered, ids_of
from .tables import settings, summary

FAIR = "✔ Same data, base model, seed, objective and batch size: metrics are directly comparable."


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Compare runs")
    with gr.Row():
        ids = view.control(
            "ids",
            gr.Dropdown([], multiselect=True, max_choices=MOST, label="Runs", info="At most six of them", scale=3),
        )
        wanted = view.control(
            "filter",
            gr.Textbox(
                label="Filter",
                info=f"And the newest {MOST_FOUND} runs that it finds, as on the page Runs",
                placeholder="state:finished tag:baseline words, or *",
                max_lines=1,
                scale=2,
            ),
        )
    with gr.Row():
        by = view.control("group", gr.Dropdown([("Run", "")], value="", label="Group by", info="Groups are averaged"))
        bands = [(f"mean and {words}", value) for value, words in BANDS.items()]
        band = view.control("band", gr.Dropdown(bands, value="", label="Curves of groups", visible=False))
        base = view.control("base", gr.Dropdown([], label="Baseline", info="Differences are to its values"))
    notes = gr.Markdown()
    options: dict[str, Any] = {"interactive": False, "wrap": True, "pinned_columns": 1, "show_search": "filter"}
    with gr.Column(visible=False) as comparison:
        gr.Markdown("## Metrics")
        metrics = gr.Dataframe(**options)
        with gr.Row():
            kinds = {"csv": "CSV", "md": "Markdown", "html": "Report (HTML)"}
            saves = {kind: gr.Button(text, link="#", size="sm", scale=0, min_width=120) for kind, text in kinds.items()}
        with gr.Row():
            view.control(
                "smooth", gr.Dropdown(list(SMOOTHING), value="0", label="Smoothing", info="Weight of the past"), "0"
            )
            over = view.control(
                "x", gr.Dropdown(list(OVER), value="step", label="Over", info="Horizontal axis"), "step"
            )
            view.control("log", gr.Checkbox(label="Logarithmic", info="Losses, rates and speeds"))
            view.control("all", gr.Checkbox(label="All metrics", info="Not only those that are charted by default"))
        plot = gr.Plot(show_label=False)
        choices = [("Differing settings", ""), ("All settings", "all")]
        view.control("config", gr.Radio(choices, value="", label="Settings"))
        table = gr.Dataframe(**options)
    outputs = [ids, wanted, by, band, base, notes, comparison, metrics, *saves.values(), over, plot, table]

    def shown(query: Query) -> Values:
        runs, missing_ids = compared(site, query)
        rows = site.index.rows()
        chosen = [run.row.id for run in runs if run.row.id in ids_of(query)]
        key, problem = _group_by(query, runs)
        groups = grouped(runs, key)
        baseline = baseline_of(groups, query) if groups else None
        missing = (
            [f"**! Not in {plain(str(site.settings.home))}: {plain(', '.join(missing_ids))}**"] if missing_ids else []
        )
        found: dict[Any, Any] = {
            ids: gr.update(choices=[row.id for row in rows], value=chosen),
            wanted: query.get("filter", ""),
            by: gr.update(choices=_offered(runs, key), value=key),
            band: gr.update(value=query["band"] if query.get("band") in BANDS else "", visible=bool(key)),
            base: gr.update(
                choices=[(group.name, group.runs[0].row.id) for group in groups],
                value=baseline.runs[0].row.id if baseline else None,
            ),
            comparison: gr.update(visible=len(runs) >= LEAST),
        }
        if baseline is None or len(runs) < LEAST:
            words = _too_few(len(runs), len(rows), has_filter=bool(query.get("filter")))
            return {**found, notes: "\n\n".join([*missing, words]), plot: None}
        above = [*problem, *_found(site, query), *_warnings(runs, groups, key), *_to_outputs(site, groups, baseline)]
        what, settings_of = settings(groups, everything=query.get("config") == "all")
        told = {name: query.get(name) for name in ("filter", "group", "band", "smooth", "x", "log")}
        saved = link("/download", compare=",".join(chosen), **told)
        return {
            **found,
            notes: "\n\n".join([*missing, *above]),
            metrics: gr.update(value=summary(groups, baseline), label=_label(groups)),
            **{save: gr.update(link=f"{saved}&as={kind}") for kind, save in saves.items()},
            over: gr.update(choices=list(offered([run.columns for run in runs]))),
            plot: curves(query, groups),
            table: gr.update(value=settings_of, label=what, visible=not settings_of.empty),
        }

    view.shows(shown, outputs, every=3)


def _group_by(query: Query, runs: Sequence[Compared]) -> tuple[str, list[str]]:
    """What the query groups by, and why its choice is not followed."""
    key = query.get("group", "")
    if key in ("", SEEDS) or not runs or key in paths([run.config for run in runs]):
        return key, []
    return "", [f"**! Not grouped: these runs have no setting {plain(key[:100])}.**"]


def _offered(runs: Sequence[Compared], key: str) -> list[tuple[str, str]]:
    names = dict.fromkeys([*fields(runs), *([key] if key not in ("", SEEDS) else [])])
    return [("Run", ""), ("Seeds: equal settings but for the seed", SEEDS), *((name, name) for name in names)]


def _label(groups: Sequence[Group]) -> str:
    words = "Last value (difference to the baseline), best value"
    if all(group.is_one for group in groups):
        return f"{words} and its step"
    return f"{words}: mean ± sample standard deviation (number of runs)"


def _too_few(count: int, there: int, *, has_filter: bool) -> str:
    if there < LEAST:
        return (
            "This page compares two to six runs: shared charts, metrics, and the settings that differ. "
            f"There are fewer than two runs. {markdown_link('Start one', '/')}"
        )
    if has_filter:
        return f"The filter finds {'one run' if count else 'no run'}: at least two are compared."
    return "Choose two to six runs, or enter a filter." if not count else "Choose at least one more run."


def _found(site: Site, query: Query) -> list[str]:
    """How many runs the filter finds."""
    count = len(filtered(site, query))
    if not query.get("filter"):
        return []
    words = f"The filter finds {count:,} {'run' if count == 1 else 'runs'}"
    return [f"{words}." if count <= MOST_FOUND else f"**! {words}; the newest {MOST_FOUND} are compared.**"]


def _warnings(runs: Sequence[Compared], groups: Sequence[Group], key: str) -> list[str]:
    unread = [run.row.id for run in runs if not run.config]
    parts = [f"**! The settings of {plain(', '.join(unread))} cannot be read.**"] if unread else []
    if mixed := averaged_over(groups, key):
        more = f" and {len(mixed) - 6} more" if len(mixed) > 6 else ""
        parts.append(f"**! Runs of one group differ in more than the seed: {', '.join(map(plain, mixed[:6]))}{more}.**")
    found = unfair([group.config for group in groups if group.config])
    if found:
        lines = [f"- **! {one.what}**: {one.why} {', '.join(map(plain, one.paths[:6]))}" for one in found]
        return [*parts, "\n".join(["**Compare with care**", "", *lines])]
    return parts or [FAIR]


def _to_outputs(site: Site, groups: Sequence[Group], base: Group) -> list[str]:
    """Links to the outputs of each run against those of the baseline, if both have a checkpoint and none is a group."""
    if not all(group.is_one for group in groups):
        return []
    ids, first = [group.runs[0].row.id for group in groups], base.runs[0].row.id
    steps = {one: steps_of(directory_path(site.settings.home, one)) for one in ids}
    saved = [one for one in ids if one != first and steps[one]]
    if not saved or not steps[first]:
        return []
    against = f"{first}@{steps[first][0]}"
    return [
        "Outputs against the baseline: "
        + ", ".join(markdown_link(one, link("/outputs", run=one, against=against)) for one in saved)
    ]


PAGE = Page(name="compare", path="/compare", title="Compare", build=build)
