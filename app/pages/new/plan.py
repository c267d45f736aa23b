"""The plan of a draft, computed by a child process, for this machine or another device, and the compiler's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr

from nnxdsl.config.experiment import Experiment

from ...html import link
from ...markdown import plain
from ...state import Site
from ...view import Query, Values, View
from ..layout import plan_texts
from ..layout.compiler import TABLE, Compiler
from ..layout.memory import memory_bars, memory_parts
from ..layout.request import NO_DEVICE, plan_job

DEVICES = ("", "cpu", "h200", "h100", "a100", "b200", "v5e", "v5p", "v6e")

Fill = Callable[[Query, Experiment | None], tuple[Values, bool]]


def device_of(query: Query) -> str:
    """Device of the query; `NO_DEVICE` for this machine's."""
    device = query.get("device", "")
    return device if device in DEVICES and device else NO_DEVICE


def plan_section(site: Site, view: View, current: Callable[[Query], Experiment]) -> tuple[list[Any], Fill]:
    """Adds the components of the plan; `current` loads the experiment of a query.

    Returns:
        The outputs, and a function that fills them and tells whether a child process is at work; a plan is computed
        only for the tab that is shown.
    """
    with gr.Row():
        choices = [(name or "this machine", name) for name in DEVICES]
        view.control("device", gr.Dropdown(choices, value="", label="Device", info="The plan is for its memory"))
        inspect = gr.Button("Inspect the layout", link="/layout", size="sm", scale=0, min_width=160)
    words = gr.Markdown()
    with gr.Column(visible=False) as group:
        bars = gr.Plot(show_label=False)
        parts = gr.Dataframe(label="Memory of each device", **TABLE)
        facts = gr.Dataframe(label="The run", **TABLE)
        gr.Markdown("### Compiler check")
        check = Compiler(site, view, lambda query: (current(query), device_of(query)))

    def fill(query: Query, experiment: Experiment | None) -> tuple[Values, bool]:
        hidden: dict[Any, Any] = {group: gr.update(visible=False), words: "Fix the problems above to see the plan."}
        if experiment is None or query.get("tab") != "plan":
            return hidden, False
        device = device_of(query)
        job = plan_job(site, experiment, device, start=False)
        if job is None or job.state == "cancelled":
            job = plan_job(site, experiment, device, start=True)
        assert job is not None
        hidden[inspect] = gr.update(link=link("/layout", draft=query.get("draft")))
        if not job.is_over:
            return {**hidden, words: f"Planning in a child process, {job.seconds:.0f} s so far ..."}, True
        if job.state != "done":
            return {**hidden, words: f"**✘ {plain(job.error or job.state)}**"}, False
        plans = [job.result]
        checked, is_busy = check.shown((experiment, device))
        return {
            **hidden,
            words: "\n\n".join(filter(None, [plan_texts.verdict(job.result), plan_texts.warnings(job.result)])),
            group: gr.update(visible=True),
            bars: memory_bars(plans),
            parts: memory_parts(plans),
            facts: plan_texts.facts(plans),
            **checked,
        }, is_busy

    return [inspect, words, group, bars, parts, facts, *check.outputs], fill
