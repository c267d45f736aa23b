"""The Outputs page: policy against reference by answers, tokens and held-out pairs; a child process computes."""

from __future__ import annotations

from typing import Any

import gradio as gr

from ...components.states import signed
from ...markup import markdown_link, plain, tag
from ...page import Page
from ...state import Site
from ...store.index import Row
from ...view import Done, Query, Values
from ..demo import Offer
from .chat import Chat
from .generate import Checkpoints, Generate
from .pairs import Pairs
from .request import Chosen, chosen, other_runs, with_checkpoints
from .tab import Tab
from .tokens import Tokens

WHAT = (
    "This page compares the policy of a run's checkpoint with its reference: answers side by side, per-token "
    "log-probs, and all held-out pairs."
)

ENDS = {"done": "The result is complete.", "failed": "The request failed.", "cancelled": "The request was cancelled."}
"""What screen readers announce: how a request ended, and nothing while it is running."""


class Outputs(Page):
    """A checkpoint and what it is compared with, and a tab for each way to do so."""

    name, path, title = "outputs", "/outputs", "Outputs"

    def __init__(self, site: Site) -> None:
        """Adds the page; results are filled apart from the forms, so that what is typed stays."""
        super().__init__(site)
        self.view.refresh(self.fill_results, self.components, self.running)

    def build(self) -> None:
        gr.Markdown("# Outputs")
        with gr.Row():
            run = gr.Dropdown([], value=None, label="Run", info="With a checkpoint", scale=2)
            step = gr.Dropdown([], value=None, label="Policy at step", info="Of a checkpoint")
            against = gr.Dropdown([], value=None, label="Compare with", info="Reference or checkpoint", scale=2)
            self.run, self.step = self.view.control("run", run), self.view.control("step", step)
            self.against = self.view.control("against", against, "reference")
        self.head, self.offer = gr.Markdown(), Offer(self.site, self.view)
        self.tabs: dict[str, Tab] = {}
        with gr.Column(visible=False) as self.body, gr.Tabs() as self.selected:  # Tabs themselves cannot be shown later
            for kind in (Generate, Tokens, Pairs, Chat, Checkpoints):
                with gr.Tab(kind.title, id=kind.name):
                    self.tabs[kind.name] = kind(self.site, self.view)
        self.view.tabs("tab", self.selected)
        self.end = gr.HTML(apply_default_css=False, padding=False)
        self.running = gr.Timer(0.7, active=False)
        for button in (one for tab in self.tabs.values() for one in tab.cancels):
            self.view.on(button.click, self._cancel)

    def fill(self, query: Query) -> Values:
        site, here, rows = self.site, chosen(self.site, query), with_checkpoints(self.site)
        if here.row is not None and here.row.id not in [row.id for row in rows]:
            rows = [here.row, *rows]
        steps = [(f"{one:,}" if one else "0 (before training)", str(one)) for one in (*here.steps, 0)]
        others = [(f"the policy at step {text}", value) for text, value in steps if value != str(here.step)]
        others = [("its reference", "reference"), *others, *other_runs(site, here)]
        has_model = here.model is not None
        values: dict[Any, Any] = {
            self.run: gr.update(choices=[row.id for row in rows], value=None if here.row is None else here.row.id),
            self.step: gr.update(choices=steps, value=str(here.step), visible=has_model),
            self.against: gr.update(choices=others, value=here.against, visible=has_model),
            self.head: _head(site, here, rows, query),
            self.body: gr.update(visible=has_model),
            self.selected: gr.update(selected=here.tab),
            **self.offer.fill(is_empty=not rows and not site.index.rows()),
        }
        for tab in self.tabs.values():
            values |= tab.fill_form(here, query)
        return values

    def fill_results(self, query: Query) -> Values:
        """Shows what there is of the results of the selected tab."""
        here = chosen(self.site, query)
        request, values = self.tabs[here.tab].fill_results(here, query)
        end = None if request is None else ENDS.get(request.state)
        return {
            **values,
            self.running: gr.update(active=request is not None and not request.is_over),
            self.end: tag("div", end, role="status", cls="visually-hidden"),
        }

    def _cancel(self, query: Query) -> Done:
        here = chosen(self.site, query)
        for one in self.tabs[here.tab].requested(here, query):
            self.site.answers.cancel(one.key)
        return Done("Cancelled.")


def _head(site: Site, here: Chosen, rows: list[Row], query: Query) -> str:
    """The state of the run, or why there is nothing to compare."""
    root = site.settings.root
    if here.row is not None:
        run = markdown_link(here.row.id, f"{root}/run", id=here.row.id)
        if here.model is not None:
            return f"{signed(here.row.state)} · {run}"
        return (
            f"{run}: this run has no checkpoint yet. The first one is saved after checkpoint.every_steps steps or "
            "checkpoint.every_minutes minutes, before an evaluation after step 0, at the end, or "
            "when the run is stopped with Stop and save; this page then compares its policy with its reference."
        )
    lost = f"There is no run {plain(query['run'])} here. " if query.get("run") else ""
    if not rows:
        return f"{lost}{WHAT} No run has saved a checkpoint yet. {markdown_link('All runs', f'{root}/')}"
    return f"{lost}{WHAT} Choose a run that has a checkpoint."
