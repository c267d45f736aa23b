"""What a plan says, on the pages Layout and New run: memory, facts, rules, activations, and a check by the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError

from ...markup import plain
from ...page import Part
from ...state import Site
from ...view import Done, Query, Values, View, if_any, is_narrow
from . import plan_texts
from .arrays import Plan
from .memory import memory_bars, memory_parts
from .request import plan_job, why_not_compiled

COMPILES = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
READ_ONLY = "This app is read-only; use `nnxdsl plan --compile` in a terminal."
TABLES = ("XLA's figures for one device", "Collectives of one step", "Sharding of activations after compilation")

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
