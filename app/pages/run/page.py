"""The page of one run: state, curves, log, config and actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr

from nnxdsl.errors import RunError

from ...components.confirm import Confirmation
from ...components.states import badge, signed
from ...markup import link, markdown_link, plain, tag
from ...page import Page
from ...state import Site
from ...store.experiments import stored
from ...store.rollouts import NAME as ROLLOUTS
from ...store.tags import parse_tags
from ...view import Done, Query, Values, if_any
from ..outputs.request import steps_of
from . import head
from .charts import Charts
from .files import Config, Environment, Events, Log, Samples

TABS = {kind.__name__.lower(): kind for kind in (Charts, Log, Config, Samples, Environment, Events)}
LIVE_SECONDS, IDLE_SECONDS = 2, 10
LOST = "Its last checkpoint stays valid; progress since then is lost."
MOVED = "It will be moved to the directory .trash next to the runs."


class Run(Page):
    """State, problem and figures of a run, actions on it, and tabs of its files."""

    name, path, title = "run", "/run", "Run"
    in_navigation = False

    def build(self) -> None:
        site, view, writes = self.site, self.view, not self.site.settings.read_only
        with gr.Row(elem_classes=["titled"]):
            self.heading, self.state = gr.Markdown("# Run"), gr.HTML(padding=False)
        self.other = view.control("id", gr.Dropdown([], label="Run", visible=False))
        with gr.Row(elem_classes=["buttons"]):
            self.buttons = self._add_buttons()
        self.questions: list[Confirmation] = []
        if writes:
            kill, delete = partial(_act, site.launcher.kill), partial(_act, site.launcher.trash, goto="/")
            self.questions = [
                Confirmation(view, self.buttons["kill"], "kill", LOST, kill),
                Confirmation(view, self.buttons["delete"], "delete", MOVED, delete, _id),
            ]
        lines: dict[str, Any] = {"interactive": False, "visible": False, "lines": 1}
        self.error = gr.Code(label="Error", wrap_lines=True, show_line_numbers=False, **lines)
        self.trouble = gr.Markdown(elem_classes=["problem"])
        self.activity, self.progress = gr.Markdown(), gr.HTML(padding=False)
        self.figures, self.tags = gr.Markdown(), gr.Markdown()
        self.output = gr.Textbox(label="Output", elem_classes=["log"], max_lines=24, **{**lines, "lines": 4})
        self.tabs: dict[str, Charts | Log | Config | Samples | Environment | Events] = {}
        with gr.Column(visible=False) as self.body:  # gr.Tabs themselves cannot be shown or hidden once rendered
            self.edited_tags = self._add_tagging() if writes else None
            with gr.Tabs() as self.selected:
                for name, kind in TABS.items():
                    with gr.Tab(name.capitalize(), id=name):
                        self.tabs[name] = kind(view)
        view.tabs("tab", self.selected)
        self.timer = gr.Timer(LIVE_SECONDS)

    def fill(self, query: Query) -> Values:
        site, run = self.site, head.chosen(self.site, _id(query))
        row, trouble, directory = run.row, head.trouble(run), run.directory
        newest = run.newest if row is None else None
        step, total = (0, 0) if row is None else (row.status.get("step") or 0, row.status.get("total") or 0)
        progress = tag("progress", value=min(step, total), max=total, aria_label="Steps done") if total else ""
        tags = site.tags.of(run.id) if row is not None else ()
        links = [markdown_link(one, "/", tag=one) for one in tags]
        tab = query["tab"] if query.get("tab") in self.tabs else "charts"
        latest = [] if run.state else [(f"{one.id} ({signed(one.state)})", one.id) for one in site.index.rows()[:50]]
        values: dict[Any, Any] = {
            self.heading: f"# {plain(run.id or 'Run')}",
            self.state: gr.update(value=badge(run.state, run.id), visible=bool(run.state)),
            self.other: gr.update(choices=latest, value=None, visible=not run.state),
            self.activity: head.activity(site, run),
            self.progress: if_any(progress),
            self.trouble: if_any(plain(trouble.message)),
            self.error: if_any(trouble.error),
            self.figures: "" if row is None or directory is None else head.figures(row, query.get("_zone", "")),
            self.tags: gr.update(value=f"Tags: {', '.join(links)}", visible=bool(tags)),
            self.output: gr.update(value=newest.output() if newest else "", visible=newest is not None),
            self.body: gr.update(visible=directory is not None),
            self.selected: gr.update(selected=tab),
            self.timer: gr.update(value=LIVE_SECONDS if run.is_live or run.place else IDLE_SECONDS),
            **_button_updates(run, trouble.field, self.buttons),
        }
        if self.edited_tags is not None:
            values[self.edited_tags] = ", ".join(tags)
        for question in self.questions:
            values |= question.fill(query)
        if directory is not None and row is not None:
            values |= self.tabs[tab].fill(site, directory, row, query)
        return values

    def _add_buttons(self) -> dict[str, gr.Button]:
        """Adds the buttons, by what they do; those that write are not there in a read-only app."""
        site, add = self.site, partial(self.view.button, min_width=90, visible=False)
        pages = ("layout", "outputs", "rollouts", "compare", "report")
        if site.settings.read_only:
            return {name: add(name.capitalize(), link="#") for name in pages}
        return {
            "stop": add("Stop and save", partial(_act, site.launcher.stop), variant="primary"),
            "resume": add("Resume", partial(resume, site), variant="primary"),
            "edit": add("Edit", variant="primary", link="#"),
            "again": add("Start again", partial(_start_again, site)),
            "unqueue": add("Remove from the queue", partial(_act, site.launcher.unqueue, goto="/")),
            "fix": add("Clone with a fix", link="#"),
            "clone": add("Clone", link="#"),
            **{name: add(name.capitalize(), link="#") for name in pages},
            "kill": add("Kill", variant="stop"),
            "delete": add("Delete", variant="stop"),
        }

    def _add_tagging(self) -> gr.Textbox:
        with gr.Accordion("Edit tags", open=False), gr.Row(elem_classes=["buttons"]):
            hint = "baseline, sweep-3"
            field = gr.Textbox(label="Tags", show_label=False, placeholder=hint, max_lines=1, scale=0)
            save = gr.Button("Save", scale=0, min_width=90)
        self.view.on(partial(gr.on, [save.click, field.submit]), partial(retag, self.site), [field])
        return field


def _button_updates(run: head.Chosen, blamed: str | None, buttons: dict[str, gr.Button]) -> Values:
    """Which buttons the state of a run allows, and where those that are links lead: a fix, to the field to blame."""
    has_files, draft = run.directory is not None, link("/new", **{"from": run.id})
    has_rollouts = run.directory is not None and (run.directory.path / ROLLOUTS).exists()
    offered = {
        "stop": run.is_live,
        "kill": run.is_live,
        "resume": has_files and not run.is_live and run.state in ("stopped", "failed", "lost", "queued"),
        "again": run.state in ("refused", "missing") and run.newest is not None and not run.is_live,
        "unqueue": run.place is not None,
        "delete": has_files and not run.is_live,
        "edit": run.state == "refused",
        "fix": has_files and run.state == "failed",
        "clone": has_files and run.state != "failed",
        "rollouts": has_rollouts,
        **dict.fromkeys(("layout", "outputs", "compare", "report"), has_files),
    }
    links = {
        "edit": draft,
        "fix": draft + (f"#f-{blamed}" if blamed else ""),
        "clone": draft,
        "compare": link("/compare", ids=run.id),
        "report": link("/download", **{"compare": run.id, "as": "html"}),
        **{name: link(f"/{name}", run=run.id) for name in ("layout", "outputs", "rollouts")},
    }
    return {
        button: gr.update(visible=offered[name], **({"link": links[name]} if name in links else {}))
        for name, button in buttons.items()
    }


# Actions


def _id(query: Query) -> str:
    return query.get("id", "")


def _act(act: Callable[[str], str], query: Query, goto: str | None = None) -> Done:
    return Done(act(_id(query)), goto=goto)


def resume(site: Site, query: Query) -> Done:
    """Resumes the run from its last checkpoint, or from the beginning if there is none."""
    steps = steps_of(site.run(_id(query)).path)
    site.launcher.resume(_id(query))
    if not steps:
        return Done("No checkpoint: starting from the beginning.")
    return Done(f"Resuming from the checkpoint of step {steps[0]:,}.")


def _start_again(site: Site, query: Query) -> Done:
    """Retries a launch that failed before the run had a directory."""
    newest = site.launcher.newest(_id(query))
    experiment = None if newest is None else stored(newest.directory / "experiment.json")
    if newest is None or experiment is None:
        raise RunError("The record of this launch was deleted; create a new run.")
    site.launcher.launch(experiment, newest.recipe)
    return Done("Started again.")


def retag(site: Site, query: Query, text: str) -> Done:
    """Replaces the run's tags."""
    if site.index.row(_id(query)) is None:
        raise RunError(f"There is no run {_id(query)}.")
    site.tags.set(_id(query), parse_tags(text or ""))
    return Done("The tags were saved.")
