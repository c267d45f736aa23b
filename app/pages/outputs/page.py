"""The Outputs page: policy against reference by answers, tokens and held-out pairs; a child process computes."""

from __future__ import annotations

from typing import Any

import gradio as gr

from ...components.states import signed
from ...html import link, tag
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.index import Row
from ...view import Done, Query, Values, View
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


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Outputs")
    with gr.Row():
        run = view.control("run", gr.Dropdown([], value=None, label="Run", info="With a checkpoint", scale=2))
        step = view.control("step", gr.Dropdown([], value=None, label="Policy at step", info="Of a checkpoint"))
        against = view.control(
            "against",
            gr.Dropdown([], value=None, label="Compare with", info="Reference or checkpoint", scale=2),
            "reference",
        )
    head, offer = gr.Markdown(), Offer(site, view)
    parts: dict[str, Tab] = {}
    with gr.Column(visible=False) as body, gr.Tabs() as tabs:  # Tabs themselves cannot be shown later
        for kind in (Generate, Tokens, Pairs, Chat, Checkpoints):
            with gr.Tab(kind.title, id=kind.name):
                parts[kind.name] = kind(site, view)
    view.tabs("tab", tabs)
    timer, spoken = gr.Timer(0.7, active=False), gr.HTML(apply_default_css=False, padding=False)

    def shown(query: Query) -> Values:
        here, rows = chosen(site, query), with_checkpoints(site)
        if here.row is not None and here.row.id not in [row.id for row in rows]:
            rows = [here.row, *rows]
        steps = [(f"{one:,}" if one else "0 (before training)", str(one)) for one in (*here.steps, 0)]
        others = [(f"the policy at step {text}", value) for text, value in steps if value != str(here.step)]
        others = [("its reference", "reference"), *others, *other_runs(site, here)]
        values: dict[Any, Any] = {
            run: gr.update(choices=[row.id for row in rows], value=None if here.row is None else here.row.id),
            step: gr.update(choices=steps, value=str(here.step), visible=here.model is not None),
            against: gr.update(choices=others, value=here.against, visible=here.model is not None),
            head: _head(site, here, rows, query),
            body: gr.update(visible=here.model is not None),
            tabs: gr.update(selected=here.tab),
            **offer.shown(not rows and not site.index.rows()),
        }
        for part in parts.values():
            values |= part.filled(here, query)
        return values

    def answered(query: Query) -> Values:
        here = chosen(site, query)
        found, values = parts[here.tab].answered(here, query)
        end = None if found is None else ENDS.get(found.state)
        return {
            **values,
            timer: gr.update(active=found is not None and not found.is_over),
            spoken: tag("div", end, role="status", cls="visually-hidden"),
        }

    def cancelled(query: Query, client: str) -> Done:
        here = chosen(site, query)
        for one in parts[here.tab].requested(here, query):
            site.answers.cancel(one.key)
        return Done("Cancelled.")

    fields, outputs = [], []
    for part in parts.values():
        fields += part.filled_outputs
        outputs += part.outputs
        for button in part.cancels:
            view.does(button.click, cancelled)
    view.shows(shown, [run, step, against, head, body, tabs, *offer.outputs, *fields])
    view.shows(answered, [timer, *outputs, spoken], every=timer)


def _head(site: Site, here: Chosen, rows: list[Row], query: Query) -> str:
    """The state of the run, or why there is nothing to compare."""
    root = site.settings.root
    if here.row is not None:
        run = markdown_link(here.row.id, root + link("/run", id=here.row.id))
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


PAGE = Page(name="outputs", path="/outputs", title="Outputs", build=build)
