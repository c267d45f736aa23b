"""What a plan says, on the pages Layout and New run: memory, facts, rules, activations, and a check by the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError

from ...markdown import plain
from ...state import Site
from ...view import Done, Query, Values, View, if_any, is_narrow
from . import plan_texts
from .arrays import Plan
from .memory import memory_bars, memory_parts
from .request import plan_job, why_not_compiled

COMPILES = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
READ_ONLY = "This app is read-only; use `nnxdsl plan --compile` in a terminal."
TABLES = ("XLA's figures for one device", "Collectives of one step", "Sharding of activations after compilation")

Chosen = tuple[Experiment, str]
"""An experiment with its mesh, and a device."""
Fill = Callable[[Query, Sequence[Plan], Chosen], tuple[Values, bool]]
"""Takes a query, its plans and what the first of them is of; returns updates, and whether it is being compiled."""


def table(label: str) -> gr.Dataframe:
    """A table that cannot be edited."""
    return gr.Dataframe(label=label, interactive=False, wrap=True)


def plan_report(
    site: Site, view: View, chosen: Callable[[Query], Chosen], *, is_open: bool = False
) -> tuple[list[Any], Fill]:
    """Adds the components, hidden at first, with facts unfolded or not; returns them, and what fills them.

    `chosen` is what a query asks for; an `NnxdslError` of it says why there is none.
    """
    with gr.Column(visible=False) as group:
        gr.Markdown("## Memory of a device")
        plot = gr.Plot(show_label=False)
        parts = table("Parts, and how they are computed")
        with gr.Accordion("Details of the run", open=is_open):
            facts = table("Facts")
        with gr.Accordion("Sharding rules, in order", open=False):
            rules = table("The first applicable rule wins")
        with gr.Accordion("Activations with logical axes", open=False):
            flows = table("Of one micro-batch")
        gr.Markdown("## Compiler check")
        words = gr.Markdown()
        with gr.Row():
            verify, cancel = (
                gr.Button(text, size="sm", scale=0, min_width=200, visible=False)
                for text in ("Verify by compiling", "Cancel compilation")
            )
        reports = [table(label) for label in TABLES]

    def start(query: Query, _client: str) -> None:
        if why := why_not_compiled(*chosen(query)):
            raise RunError(why)
        plan_job(site, *chosen(query), start=True, compiled=True)

    def end(query: Query, _client: str) -> Done:
        if job := plan_job(site, *chosen(query), start=False, compiled=True):
            site.compiles.cancel(job.key)
        return Done("Ended.")

    if not site.settings.read_only:
        view.does(verify.click, start)
    view.does(cancel.click, end)

    def check(of: Chosen) -> tuple[Values, bool]:
        job, why, can_start = plan_job(site, *of, start=False, compiled=True), why_not_compiled(*of), False
        is_busy, tables = job is not None and not job.is_over, [pd.DataFrame()] * len(TABLES)
        if job is not None and job.state == "done":
            text, tables = plan_texts.compiled(job.result), list(plan_texts.compiled_tables(job.result))
        elif job is not None and is_busy:
            text = f"Compiling in a child process, {job.seconds:.0f} s so far ..."
        elif why is not None or site.settings.read_only:
            text = plain(why) if why else READ_ONLY
        else:
            failed = "" if job is None else f"**✘ {plain(job.error or 'The compilation was cancelled.')}**\n\n"
            can_start, text = True, failed + COMPILES
        buttons = {verify: gr.update(visible=can_start), cancel: gr.update(visible=is_busy)}
        return {words: text, **buttons, **dict(zip(reports, map(if_any, tables), strict=True))}, is_busy

    def fill(query: Query, plans: Sequence[Plan], of: Chosen) -> tuple[Values, bool]:
        checked, is_busy = check(of)
        return {
            group: gr.update(visible=True),
            plot: memory_bars(plans, is_narrow=is_narrow(query)),
            parts: memory_parts(plans),
            facts: plan_texts.facts(plans),
            rules: plan_texts.rules(plans),
            flows: plan_texts.activations(plans),
            **checked,
        }, is_busy

    return [group, plot, parts, facts, rules, flows, words, verify, cancel, *reports], fill
