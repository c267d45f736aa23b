"""The plan of a draft, computed by a child process, for this machine or another device, and the compiler's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr
import pandas as pd
from gradio.components import Component

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError

from ...html import link
from ...markdown import plain
from ...state import Site
from ...view import Done, Query, Values, View
from ..layout import plan_texts
from ..layout.memory import memory_bars, memory_parts
from ..layout.request import NO_DEVICE, plan_job, why_not_compiled

DEVICES = ("", "cpu", "h200", "h100", "a100", "b200", "v5e", "v5p", "v6e")
COMPILES = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
_TABLE: dict[str, Any] = {"interactive": False, "wrap": True, "visible": False}

Fill = Callable[[Query, Experiment | None], tuple[Values, bool]]


def device_of(query: Query) -> str:
    """Device of the query; `NO_DEVICE` for this machine's."""
    device = query.get("device", "")
    return device if device in DEVICES and device else NO_DEVICE


def plan_section(site: Site, view: View, current: Callable[[Query], Experiment]) -> tuple[list[Component], Fill]:
    """Adds the components of the plan.

    Args:
        site: State of the app.
        view: The page.
        current: Loads the experiment of a query.

    Returns:
        The outputs, and a function that fills them and tells whether a child process is at work; without an
        experiment they are emptied, and a plan is computed only for the tab that is shown.
    """
    with gr.Row():
        choices = [(name or "this machine", name) for name in DEVICES]
        view.control("device", gr.Dropdown(choices, value="", label="Device", info="The plan is for its memory"))
        inspect = gr.Button("Inspect the layout", link="/layout", size="sm", scale=0, min_width=160)
    words = gr.Markdown()
    bars = gr.Plot(show_label=False, visible=False)
    parts, facts = gr.Dataframe(label="Memory of each device", **_TABLE), gr.Dataframe(label="The run", **_TABLE)
    with gr.Column(visible=False) as compiler:
        gr.Markdown("### Compiler check")
        report = gr.Markdown()
        verify = gr.Button("Verify by compiling", size="sm", scale=0, min_width=200)
        cancel = gr.Button("Cancel compilation", size="sm", scale=0, min_width=200)
        labels = ("XLA's figures for one device", "Collectives of one step", "Activations after compilation")
        tables = [gr.Dataframe(label=label, **_TABLE) for label in labels]

    def verify_it(query: Query, _client: str) -> None:
        experiment, device = current(query), device_of(query)
        why = why_not_compiled(experiment, device)
        if why is not None:
            raise RunError(why)
        plan_job(site, experiment, device, start=True, compiled=True)

    def cancel_it(query: Query, _client: str) -> Done:
        job = plan_job(site, current(query), device_of(query), start=False, compiled=True)
        if job is not None:
            site.compiles.cancel(job.key)
        return Done("Ended.")

    view.does(verify.click, verify_it)
    view.does(cancel.click, cancel_it)
    results = [bars, parts, facts, *tables]

    def fill(query: Query, experiment: Experiment | None) -> tuple[Values, bool]:
        hidden: dict[Any, Any] = dict.fromkeys(results, gr.update(visible=False, value=None))
        hidden |= {compiler: gr.update(visible=False), words: "Fix the problems above to see the plan."}
        if experiment is None or query.get("tab") != "plan":
            return hidden, False
        device = device_of(query)
        job = plan_job(site, experiment, device, start=False)
        if job is None or job.state == "cancelled":
            job = plan_job(site, experiment, device, start=True)
        assert job is not None
        here = {inspect: gr.update(link=link("/layout", draft=query.get("draft")))}
        if not job.is_over:
            told = f"Planning in a child process, {job.seconds:.0f} s so far ..."
            return {**hidden, **here, words: told}, True
        if job.state != "done":
            return {**hidden, **here, words: f"**✘ {plain(job.error or job.state)}**"}, False
        plans = [job.result]
        compiled, is_busy = checked(experiment, device)
        return {
            **here,
            words: "\n\n".join(filter(None, [plan_texts.verdict(job.result), plan_texts.warnings(job.result)])),
            bars: gr.update(value=memory_bars(plans), visible=True),
            parts: gr.update(value=memory_parts(plans), visible=True),
            facts: gr.update(value=plan_texts.facts(plans), visible=True),
            compiler: gr.update(visible=True),
            **compiled,
        }, is_busy

    def checked(experiment: Experiment, device: str) -> tuple[Values, bool]:
        job = plan_job(site, experiment, device, start=False, compiled=True)
        why, reports = why_not_compiled(experiment, device), [pd.DataFrame()] * len(tables)
        is_done, is_busy = job is not None and job.state == "done", job is not None and not job.is_over
        if job is not None and is_done:
            told, reports = plan_texts.compiled(job.result), list(plan_texts.compiled_tables(job.result))
        elif job is not None and is_busy:
            told = f"Compiling in a child process, {job.seconds:.0f} s so far ..."
        elif why is not None:
            told = plain(why)
        else:
            told = f"**✘ {plain(job.error)}**\n\n{COMPILES}" if job is not None and job.error else COMPILES
        filled = zip(tables, reports, strict=True)
        return {
            report: told,
            verify: gr.update(visible=not (is_done or is_busy or why)),
            cancel: gr.update(visible=is_busy),
            **{table: gr.update(value=found, visible=not found.empty) for table, found in filled},
        }, is_busy

    return [inspect, words, *results, compiler, report, verify, cancel], fill
