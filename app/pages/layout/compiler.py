"""The check of a plan by the compiler, on the pages Layout and New run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError

from ...markdown import plain
from ...state import Site
from ...view import Done, Query, View, if_any
from . import plan_texts
from .request import plan_job, why_not_compiled

COMPILES = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
READ_ONLY = "This app is read-only; use `nnxdsl plan --compile` in a terminal."
TABLE: dict[str, Any] = {"interactive": False, "wrap": True}
TABLES = ("XLA's figures for one device", "Collectives of one step", "Sharding of activations after compilation")

Chosen = tuple[Experiment, str]
"""An experiment with its mesh, and a device."""


class Compiler:
    """The components of the check: the report, and buttons that start and cancel it.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, site: Site, view: View, chosen: Callable[[Query], Chosen]) -> None:
        """Adds the components; `chosen` is what a query asks for, an `NnxdslError` of it says why there is none."""
        self._site, self._chosen = site, chosen
        self._words = gr.Markdown()
        with gr.Row():
            size: dict[str, Any] = {"size": "sm", "scale": 0, "min_width": 200, "visible": False}
            self._verify = gr.Button("Verify by compiling", **size)
            self._cancel = gr.Button("Cancel compilation", **size)
        self._tables = [gr.Dataframe(label=label, visible=False, **TABLE) for label in TABLES]
        self.outputs = [self._words, self._verify, self._cancel, *self._tables]
        if not site.settings.read_only:
            view.does(self._verify.click, lambda query, client: self._start(query))
        view.does(self._cancel.click, lambda query, client: self._end(query))

    def _start(self, query: Query) -> None:
        chosen = self._chosen(query)
        why = why_not_compiled(*chosen)
        if why is not None:
            raise RunError(why)
        plan_job(self._site, *chosen, start=True, compiled=True)

    def _end(self, query: Query) -> Done:
        job = plan_job(self._site, *self._chosen(query), start=False, compiled=True)
        if job is not None:
            self._site.compiles.cancel(job.key)
        return Done("Ended.")

    def shown(self, chosen: Chosen) -> tuple[dict[Any, Any], bool]:
        """Returns updates of the components, and whether it is compiling."""
        job, why = plan_job(self._site, *chosen, start=False, compiled=True), why_not_compiled(*chosen)
        is_busy, reports = job is not None and not job.is_over, [pd.DataFrame()] * len(TABLES)
        can_start = False
        if job is not None and job.state == "done":
            text, reports = plan_texts.compiled(job.result), list(plan_texts.compiled_tables(job.result))
        elif job is not None and is_busy:
            text = f"Compiling in a child process, {job.seconds:.0f} s so far ..."
        elif why is not None:
            text = plain(why)
        elif self._site.settings.read_only:
            text = READ_ONLY
        else:
            can_start, text = True, COMPILES
            if job is not None:
                text = f"**✘ {plain(job.error or 'The compilation was cancelled.')}**\n\n{text}"
        return {
            self._words: text,
            self._verify: gr.update(visible=can_start),
            self._cancel: gr.update(visible=is_busy),
            **{table: if_any(report) for table, report in zip(self._tables, reports, strict=True)},
        }, is_busy
