"""The Compare page: metrics, curves and differing settings of runs or groups of them, and if they are comparable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from ...components.axes import offered
from ...components.metrics import controls
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.index import Row
from ...view import Query, Values, View, if_any
from ..outputs.request import steps_of
from .config import paths, unfair
from .curves import BANDS, curves
from .runs import (
    LEAST,
    MOST,
    MOST_FOUND,
    SEEDS,
    Compared,
    Group,
    averaged_over,
    baseline_of,
    compared,
    fields,
    filtered,
    grouped,
    ids_of,
)
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
        over = controls(view).over
        plot = gr.Plot(show_label=False)
        choices = [("Differing settings", ""), ("All settings", "all")]
        view.control("config", gr.Radio(choices, value="", label="Settings"))
        table = gr.Dataframe(**options)
    outputs = [ids, wanted, by, band, base, notes, comparison, metrics, *saves.values(), over, plot, table]

    def shown(query: Query) -> Values:
        runs, missing_ids = compared(site, query)
        key = query.get("group", "")
        key = key if key == SEEDS or key in paths([run.config for run in runs]) else ""
        groups = grouped(runs, key)
        baseline = baseline_of(groups, query)
        names = dict.fromkeys([*fields(runs), *([key] if key not in ("", SEEDS) else [])])
        kinds = [("Run", ""), ("Seeds: equal settings but for the seed", SEEDS), *((name, name) for name in names)]
        chosen = [run.row.id for run in runs if run.row.id in ids_of(query)]
        found: dict[Any, Any] = {
            ids: gr.update(choices=[row.id for row in site.index.rows()], value=chosen),
            wanted: query.get("filter", ""),
            by: gr.update(choices=kinds, value=key),
            band: gr.update(value=query["band"] if query.get("band") in BANDS else "", visible=bool(key)),
            base: gr.update(
                choices=[(group.name, group.runs[0].row.id) for group in groups],
                value=None if baseline is None else baseline.runs[0].row.id,
            ),
            notes: "\n\n".join(_notes(site, query, runs, groups, key, missing_ids)),
            comparison: gr.update(visible=len(runs) >= LEAST),
        }
        if baseline is None or len(runs) < LEAST:
            return {**found, plot: None}
        what = "Last value (difference to the baseline), best value"
        is_one = all(group.is_one for group in groups)
        what += " and its step" if is_one else ": mean ± sample standard deviation (number of runs)"
        label, differing = settings(groups, everything=query.get("config") == "all")
        told = {name: query.get(name) for name in ("filter", "group", "band", "smooth", "x", "log")}
        saved = link("/download", compare=",".join(chosen), **told)
        return {
            **found,
            metrics: gr.update(value=summary(groups, baseline), label=what),
            **{save: gr.update(link=f"{saved}&as={kind}") for kind, save in saves.items()},
            over: gr.update(choices=list(offered([run.columns for run in runs]))),
            plot: curves(query, groups),
            table: if_any(differing, label=label),
        }

    view.shows(shown, outputs, every=3)


def _notes(
    site: Site, query: Query, runs: Sequence[Compared], groups: Sequence[Group], key: str, missing_ids: Sequence[str]
) -> Iterator[str]:
    """What stands above the comparison: what cannot be compared, and what makes it unfair."""
    if missing_ids:
        yield f"**! Not in {plain(str(site.settings.home))}: {plain(', '.join(missing_ids))}**"
    if len(runs) < LEAST:
        yield _too_few(len(runs), len(site.index.rows()), has_filter=bool(query.get("filter")))
        return
    if key != query.get("group", ""):
        yield f"**! Not grouped: these runs have no setting {plain(query['group'][:100])}.**"
    if query.get("filter"):
        count = len(filtered(site, query))
        words = f"The filter finds {count:,} {'run' if count == 1 else 'runs'}"
        yield f"{words}." if count <= MOST_FOUND else f"**! {words}; the newest {MOST_FOUND} are compared.**"
    if unread := [run.row.id for run in runs if not run.config]:
        yield f"**! The settings of {plain(', '.join(unread))} cannot be read.**"
    if mixed := averaged_over(groups, key):
        more = f" and {len(mixed) - 6} more" if len(mixed) > 6 else ""
        yield f"**! Runs of one group differ in more than the seed: {', '.join(map(plain, mixed[:6]))}{more}.**"
    if found := unfair([group.config for group in groups if group.config]):
        lines = [f"- **! {one.what}**: {one.why} {', '.join(map(plain, one.paths[:6]))}" for one in found]
        yield "\n".join(["**Compare with care**", "", *lines])
    elif not unread and not mixed:
        yield FAIR
    if all(group.is_one for group in groups) and (base := baseline_of(groups, query)):
        yield from _to_outputs([group.runs[0].row for group in groups], base.runs[0].row)


def _too_few(count: int, there: int, *, has_filter: bool) -> str:
    if there < LEAST:
        return (
            "This page compares two to six runs: shared charts, metrics, and the settings that differ. "
            f"There are fewer than two runs. {markdown_link('Start one', '/')}"
        )
    if has_filter:
        return f"The filter finds {'one run' if count else 'no run'}: at least two are compared."
    return "Choose two to six runs, or enter a filter." if not count else "Choose at least one more run."


def _to_outputs(rows: Sequence[Row], base: Row) -> Iterator[str]:
    """Links to the outputs of each run against those of the baseline, if both have a checkpoint."""
    saved = [row.id for row in rows if row.id != base.id and steps_of(row.path)]
    if saved and (steps := steps_of(base.path)):
        links = [markdown_link(one, link("/outputs", run=one, against=f"{base.id}@{steps[0]}")) for one in saved]
        yield f"Outputs against the baseline: {', '.join(links)}"


PAGE = Page(name="compare", path="/compare", title="Compare", build=build)
