"""The Compare page: metrics, curves and differing settings of runs or groups of them, and if they are comparable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from ...components.metrics import ChartOptions
from ...markup import link, markdown_link, plain
from ...page import Page
from ...state import Site
from ...store.index import Row
from ...view import Query, Values, if_any
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

SECONDS = 3.0
FAIR = "✔ Same data, base model, seed, objective and batch size: metrics are directly comparable."


class Compare(Page):
    """Which runs are compared, how, and their metrics, curves and settings."""

    name, path, title = "compare", "/compare", "Compare"

    def build(self) -> None:
        control = self.view.control
        gr.Markdown("# Compare runs")
        with gr.Row():
            ids = gr.Dropdown([], multiselect=True, max_choices=MOST, label="Runs", info="At most six", scale=3)
            self.ids = control("ids", ids)
            more = f"And the newest {MOST_FOUND} runs that it finds, as on the page Runs"
            hint = "state:finished tag:baseline words, or *"
            text = gr.Textbox(label="Filter", info=more, placeholder=hint, max_lines=1, scale=2)
            self.filter = control("filter", text)
        with gr.Row():
            by = gr.Dropdown([("Run", "")], value="", label="Group by", info="Groups are averaged")
            bands = [(f"mean and {label}", value) for value, label in BANDS.items()]
            band = gr.Dropdown(bands, value="", label="Curves of groups", visible=False)
            base = gr.Dropdown([], label="Baseline", info="Differences are to its values")
            self.by, self.band, self.base = control("group", by), control("band", band), control("base", base)
        self.notes = gr.Markdown()
        options: dict[str, Any] = {"interactive": False, "wrap": True, "pinned_columns": 1, "show_search": "filter"}
        with gr.Column(visible=False) as self.comparison:
            self.chart_options = ChartOptions(self.view)
            self.plot = gr.Plot(show_label=False)
            with gr.Accordion("Metrics"):
                self.metrics = gr.Dataframe(**options)
            with gr.Row():
                kinds = {"csv": "CSV", "md": "Markdown", "html": "Report (HTML)"}
                button: dict[str, Any] = {"link": "#", "size": "sm", "scale": 0, "min_width": 120}
                self.saves = {kind: gr.Button(text, **button) for kind, text in kinds.items()}
            choices = [("Differing settings", ""), ("All settings", "all")]
            self.view.control("config", gr.Radio(choices, value="", label="Settings"))
            self.settings = gr.Dataframe(**options)
        self.timer = gr.Timer(SECONDS)

    def fill(self, query: Query) -> Values:
        runs, missing_ids = compared(self.site, query)
        key = query.get("group", "")
        key = key if key == SEEDS or key in paths([run.config for run in runs]) else ""
        groups = grouped(runs, key)
        baseline = baseline_of(groups, query)
        names = dict.fromkeys([*fields(runs), *([key] if key not in ("", SEEDS) else [])])
        kinds = [("Run", ""), ("Seeds: equal settings but for the seed", SEEDS), *((name, name) for name in names)]
        chosen = [run.row.id for run in runs if run.row.id in ids_of(query)]
        values: dict[Any, Any] = {
            self.ids: gr.update(choices=[row.id for row in self.site.index.rows()], value=chosen),
            self.filter: query.get("filter", ""),
            self.by: gr.update(choices=kinds, value=key),
            self.band: gr.update(value=query["band"] if query.get("band") in BANDS else "", visible=bool(key)),
            self.base: gr.update(
                choices=[(group.name, group.runs[0].row.id) for group in groups],
                value=None if baseline is None else baseline.runs[0].row.id,
            ),
            self.notes: "\n\n".join(_notes(self.site, query, runs, groups, key, missing_ids)),
            self.comparison: gr.update(visible=len(runs) >= LEAST),
        }
        if baseline is None or len(runs) < LEAST:
            return {**values, self.plot: None}
        label = "Last value (difference to the baseline), best value"
        is_one = all(group.is_one for group in groups)
        label += " and its step" if is_one else ": mean ± sample standard deviation (number of runs)"
        about, differing = settings(groups, everything=query.get("config") == "all")
        parameters = {name: query.get(name) for name in ("filter", "group", "band", "smooth", "x", "log")}
        saved = link("/download", compare=",".join(chosen), **parameters)
        return {
            **values,
            **self.chart_options.fill([run.columns for run in runs]),
            self.metrics: gr.update(value=summary(groups, baseline), label=label),
            **{save: gr.update(link=f"{saved}&as={kind}") for kind, save in self.saves.items()},
            self.plot: curves(query, groups),
            self.settings: if_any(differing, label=about),
        }


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
        text = f"The filter finds {count:,} {'run' if count == 1 else 'runs'}"
        yield f"{text}." if count <= MOST_FOUND else f"**! {text}; the newest {MOST_FOUND} are compared.**"
    if unread := [run.row.id for run in runs if not run.config]:
        yield f"**! The settings of {plain(', '.join(unread))} cannot be read.**"
    if mixed := averaged_over(groups, key):
        more = f" and {len(mixed) - 6} more" if len(mixed) > 6 else ""
        yield f"**! Runs of one group differ in more than the seed: {', '.join(map(plain, mixed[:6]))}{more}.**"
    if reasons := unfair([group.config for group in groups if group.config]):
        lines = [f"- **! {one.what}**: {one.why} {', '.join(map(plain, one.paths[:6]))}" for one in reasons]
        yield "\n".join(["**Compare with care**", "", *lines])
    elif not unread and not mixed:
        yield FAIR
    if all(group.is_one for group in groups) and (base := baseline_of(groups, query)):
        yield from _to_outputs([group.runs[0].row for group in groups], base.runs[0].row)


def _too_few(count: int, existing: int, *, has_filter: bool) -> str:
    if existing < LEAST:
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
        links = [markdown_link(one, "/outputs", run=one, against=f"{base.id}@{steps[0]}") for one in saved]
        yield f"Outputs against the baseline: {', '.join(links)}"
