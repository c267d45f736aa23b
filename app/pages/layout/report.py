"""What a plan says, on the pages Layout and New run: memory, facts, rules, activations, and a check by the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import gradio as gr
import pandas as pd
import plotly.graph_objects as go

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.terminal.plan_format import format_mesh

from ...components.plots import styled
from ...formatting import size
from ...markup import plain
from ...page import Part
from ...state import Site
from ...view import Done, Query, Values, View, if_any, is_narrow
from . import plan_texts
from .arrays import Plan, unit_of
from .request import plan_job, why_not_compiled

COMPILES = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
READ_ONLY = "This app is read-only; use `nnxdsl plan --compile` in a terminal."
TABLES = ("XLA's figures for one device", "Collectives of one step", "Sharding of activations after compilation")
COLOURS = {
    "frozen weights": "#2f6fed",
    "trainable weights": "#d9480f",
    "optimizer": "#2b8a3e",
    "frozen weights, transposed": "#91a7ff",
    "gradients": "#ffa94d",
    "activations": "#9c36b5",
    "workspace": "#868e96",
    "teacher": "#c2255c",
    "reference copy": "#087f8b",
}
OTHER = "#5f3dc4"
"""Colour of parts that have none of their own."""

Chosen = tuple[Experiment, str]  # an experiment with its mesh, and a device


def table(label: str) -> gr.Dataframe:
    """A table that cannot be edited."""
    return gr.Dataframe(label=label, interactive=False, wrap=True)


class PlanReport(Part):
    """Memory, facts, rules and activations of plans, and a check by the compiler."""

    def __init__(self, site: Site, view: View, chosen: Callable[[Query], Chosen], *, is_open: bool = False) -> None:
        """Adds the components, hidden at first, with facts unfolded or not.

        `chosen` is what a query asks for; an `NnxdslError` of it says why there is none.
        """
        self.site, self._chosen = site, chosen
        with gr.Column(visible=False) as self.group:
            gr.Markdown("## Memory of a device")
            self.plot = gr.Plot(show_label=False)
            self.parts = table("Parts, and how they are computed")
            with gr.Accordion("Details of the run", open=is_open):
                self.facts = table("Facts")
            with gr.Accordion("Sharding rules, in order", open=False):
                self.rules = table("The first applicable rule wins")
            with gr.Accordion("Activations with logical axes", open=False):
                self.activations = table("Of one micro-batch")
            gr.Markdown("## Compiler check")
            self.verdict = gr.Markdown()
            with gr.Row():
                hidden: dict[str, Any] = {"size": "sm", "min_width": 200, "visible": False}
                start = None if site.settings.read_only else self._compile
                self.verify = view.button("Verify by compiling", start, **hidden)
                self.cancel = view.button("Cancel compilation", self._cancel, **hidden)
            self.compiled = [table(label) for label in TABLES]

    def fill(self, query: Query, plans: Sequence[Plan], of: Chosen) -> tuple[Values, bool]:
        """Shows plans, and the compilation of the first; also returns whether it is under way."""
        compiled, is_busy = self._fill_compiled(of)
        return {
            self.group: gr.update(visible=True),
            self.plot: memory_bars(plans, is_narrow=is_narrow(query)),
            self.parts: memory_parts(plans),
            self.facts: plan_texts.facts(plans),
            self.rules: plan_texts.rules(plans),
            self.activations: plan_texts.activations(plans),
            **compiled,
        }, is_busy

    def _fill_compiled(self, of: Chosen) -> tuple[Values, bool]:
        job, why = plan_job(self.site, *of, start=False, compiled=True), why_not_compiled(*of)
        is_busy, can_start, tables = job is not None and not job.is_over, False, [pd.DataFrame()] * len(TABLES)
        if job is not None and job.state == "done":
            text, tables = plan_texts.compiled(job.result), list(plan_texts.compiled_tables(job.result))
        elif job is not None and is_busy:
            text = f"Compiling in a child process, {job.seconds:.0f} s so far ..."
        elif why is not None or self.site.settings.read_only:
            text = plain(why) if why else READ_ONLY
        else:
            failed = "" if job is None else f"**✘ {plain(job.error or 'The compilation was cancelled.')}**\n\n"
            can_start, text = True, failed + COMPILES
        return {
            self.verdict: text,
            self.verify: gr.update(visible=can_start),
            self.cancel: gr.update(visible=is_busy),
            **dict(zip(self.compiled, map(if_any, tables), strict=True)),
        }, is_busy

    def _compile(self, query: Query) -> None:
        of = self._chosen(query)
        if why := why_not_compiled(*of):
            raise RunError(why)
        plan_job(self.site, *of, start=True, compiled=True)

    def _cancel(self, query: Query) -> Done:
        if job := plan_job(self.site, *self._chosen(query), start=False, compiled=True):
            self.site.compiles.cancel(job.key)
        return Done("Ended.")


def memory_bars(plans: Sequence[Plan], *, is_narrow: bool = False) -> go.Figure:
    """Draws a bar for each plan, of what is in a device's memory; the end of its memory is marked where it is near."""
    plot = go.Figure()
    totals = [plan["bytes_per_device"] for plan in plans]
    unit, divisor = unit_of(totals)
    parts = [[part for part in plan["memory"] if part["memory"] == "device" and part["bytes"]] for plan in plans]
    for name in dict.fromkeys(part["name"] for each in parts for part in each):
        rows = [(index, part) for index, each in enumerate(parts) for part in each if part["name"] == name]
        texts = [
            [size(part["bytes"]), f"{part['bytes'] / max(1, totals[index]):.1%}", part["tag"], escape(part["formula"])]
            for index, part in rows
        ]
        plot.add_bar(
            x=[part["bytes"] / divisor for _, part in rows],
            y=[index for index, _ in rows],
            customdata=texts,
            name=escape(name),
            orientation="h",
            width=0.6,
            marker={"color": COLOURS.get(name, OTHER), "line": {"width": 0}},
            hovertemplate="<b>%{fullData.name}</b> %{customdata[0]}, %{customdata[1]}<br>"
            "%{customdata[2]}: %{customdata[3]}<extra></extra>",
        )
    device, end, label = plans[0]["device"], max(totals) / divisor, f"{unit} on each device"
    if device and device["memory"]:
        usable = device["usable"] / divisor
        label += f", of which {size(device['usable'])} is usable"
        if end > usable / 8:  # else the parts would be too small to be told apart
            end = max(end, device["memory"] / divisor)
            line = {"width": 2, "dash": "dash", "color": "#c92a2a"}
            plot.add_vline(usable, line=line, annotation_text="usable", annotation_position="top left")
    names = [format_mesh(plan["mesh"]).partition(" (")[0].replace(" x ", "<br>") for plan in plans]
    legend = 160 if is_narrow else 50  # pixels
    styled(plot, legend + 70 + 60 * len(plans))
    plot.update_layout(barmode="stack", margin={"t": legend, "b": 60}, legend={"traceorder": "normal"})
    plot.update_xaxes(title=label.replace(", ", ",<br>") if is_narrow else label, range=[0, end * 1.02])
    plot.update_yaxes(tickvals=list(range(len(plans))), ticktext=names, autorange="reversed", automargin=True)
    return plot


def memory_parts(plans: Sequence[Plan]) -> pd.DataFrame:
    """Returns a row for each part: its bytes in each plan, whether that is exact, and how it is computed."""
    parts = [{(part["name"], part["memory"]): part for part in plan["memory"] if part["bytes"]} for plan in plans]
    rows: list[dict[str, str]] = []
    for key in dict.fromkeys(key for each in parts for key in each):
        name, memory = key
        values: list[Mapping[str, Any]] = [each[key] for each in parts if key in each]
        row = {"part": name if memory == "device" else f"{name} (host's memory)"}
        for column, each, plan in zip(("memory", "second mesh"), parts, plans, strict=False):
            total = plan["bytes_per_device" if memory == "device" else "host_bytes_per_device"]
            share = each[key]["bytes"] / max(1, total) if key in each else 0
            percent = "<1%" if share < 0.005 else f"{share:.0%}"
            row[column] = f"{size(each[key]['bytes'])}, {percent}" if key in each else "-"
        row["basis"] = " / ".join(dict.fromkeys(part["tag"] for part in values))
        row["formula"] = "; on the second mesh: ".join(dict.fromkeys(part["formula"] for part in values))
        rows.append(row)
    return pd.DataFrame(rows)
