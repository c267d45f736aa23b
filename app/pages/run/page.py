"""The page of one run: state, curves, log, config and actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr

from nnxdsl.errors import RunError

from ...components.confirm import Confirmation
from ...components.inside import inside
from ...components.states import badge, bar, signed
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.experiments import stored
from ...store.rollouts import NAME as ROLLOUTS
from ...store.tags import words_of
from ...view import Done, Query, Values, View, if_any
from ..outputs.request import steps_of
from . import head
from .charts import charts
from .config import config
from .files import Shows, environment, events, log, samples

TABS = {part.__name__: part for part in (charts, log, config, samples, environment, events)}
LIVE_SECONDS, IDLE_SECONDS = 2, 10
LOST = "Its last checkpoint stays valid; progress since then is lost."
MOVED = "It will be moved to the directory .trash next to the runs."


def build(site: Site) -> None:
    """Adds the components of the page."""
    view, writes = View(), not site.settings.read_only
    timer = gr.Timer(LIVE_SECONDS)
    with gr.Row(elem_classes=["titled"]):
        title, state = gr.Markdown("# Run"), gr.HTML(padding=False)
    other = view.control("id", gr.Dropdown([], label="Run", visible=False))
    with gr.Row(elem_classes=["buttons"]):
        buttons = _buttons(site, view)
    questions: list[Confirmation] = []
    if writes:
        kill, delete = partial(_done, site.launcher.kill), partial(_done, site.launcher.put_away, goto="/")
        questions.append(Confirmation(view, buttons["kill"], "kill", LOST, kill))
        questions.append(Confirmation(view, buttons["delete"], "delete", MOVED, delete, _id))
    error = gr.Code(label="Error", interactive=False, wrap_lines=True, lines=1, show_line_numbers=False, visible=False)
    trouble = gr.Markdown(elem_classes=["problem"])
    words, progress = gr.Markdown(), gr.HTML(padding=False)
    figures, tags = gr.Markdown(), gr.Markdown()
    output = gr.Textbox(label="Output", lines=4, max_lines=24, interactive=False, visible=False, elem_classes=["log"])
    parts: dict[str, Shows] = {}
    with gr.Column(visible=False) as body:  # gr.Tabs themselves cannot be shown or hidden once they are rendered
        edited = _tagging(site, view) if writes else None
        with gr.Tabs() as tabs:
            for name, part in TABS.items():
                with gr.Tab(name.capitalize(), id=name):
                    parts[name] = part(view)
    view.tabs("tab", tabs)

    def shown(query: Query) -> Values:
        run = head.chosen(site, _id(query))
        row, wrong, directory = run.row, head.trouble(run), run.directory
        newest = run.newest if row is None else None
        status = {} if row is None else row.status
        own_tags = site.tags.of(run.id) if row is not None else ()
        tag_links = [markdown_link(one, link("/", tag=one)) for one in own_tags]
        tab = query["tab"] if query.get("tab") in parts else "charts"
        latest = [] if run.state else [(f"{one.id} ({signed(one.state)})", one.id) for one in site.index.rows()[:50]]
        found: dict[Any, Any] = {
            title: f"# {plain(run.id or 'Run')}",
            state: gr.update(value=badge(run.state, run.id), visible=bool(run.state)),
            other: gr.update(choices=latest, value=None, visible=not run.state),
            words: head.words(site, run),
            progress: gr.update(
                value=bar(status.get("step") or 0, status.get("total") or 1), visible=bool(status.get("total"))
            ),
            trouble: if_any(plain(wrong.words)),
            error: if_any(wrong.error),
            figures: "" if row is None or directory is None else head.figures(row, query.get("_zone", "")),
            tags: gr.update(value=f"Tags: {', '.join(tag_links)}", visible=bool(own_tags)),
            output: gr.update(value=newest.output() if newest else "", visible=newest is not None),
            body: gr.update(visible=directory is not None),
            tabs: gr.update(selected=tab),
            timer: gr.update(value=LIVE_SECONDS if run.is_live or run.place else IDLE_SECONDS),
            **_offered(run, wrong.field, buttons),
        }
        if edited is not None:
            found[edited] = ", ".join(own_tags)
        for question in questions:
            found |= question.shown(query)
        if directory is not None and row is not None:
            found |= parts[tab](site, directory, row, query)
        return found

    outputs = [title, state, other, words, progress, trouble, error, figures, tags, output, body, tabs, timer]
    outputs += [
        *buttons.values(),
        *([] if edited is None else [edited]),
        *inside(tabs),
        *(one for question in questions for one in question.outputs),
    ]
    view.shows(shown, outputs, every=timer)


# Buttons


def _buttons(site: Site, view: View) -> dict[str, gr.Button]:
    """Adds the buttons, by what they do; those that write are not there in a read-only app."""
    found: dict[str, gr.Button] = {}

    def add(name: str, text: str, act: Callable[[Query, str], Done] | None = None, **more: Any) -> None:
        found[name] = gr.Button(text, scale=0, min_width=90, visible=False, **more)
        if act is not None:
            view.does(found[name].click, act)

    if not site.settings.read_only:
        add("stop", "Stop and save", partial(_done, site.launcher.stop), variant="primary")
        add("resume", "Resume", partial(resume, site), variant="primary")
        add("edit", "Edit", variant="primary", link="#")
        add("again", "Start again", partial(_again, site))
        add("unqueue", "Remove from the queue", partial(_done, site.launcher.unqueue, goto="/"))
        add("fix", "Clone with a fix", link="#")
        add("clone", "Clone", link="#")
    for name in ("layout", "outputs", "rollouts", "compare", "report"):
        add(name, name.capitalize(), link="#")
    if not site.settings.read_only:
        add("kill", "Kill", variant="stop")
        add("delete", "Delete", variant="stop")
    return found


def _offered(run: head.Chosen, blamed: str | None, buttons: dict[str, gr.Button]) -> Values:
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


def _tagging(site: Site, view: View) -> gr.Textbox:
    """Adds the field of the run's tags."""
    with gr.Accordion("Edit tags", open=False), gr.Row(elem_classes=["buttons"]):
        label = "Tags, separated by commas"
        field = gr.Textbox(label=label, show_label=False, placeholder="baseline, sweep-3", max_lines=1, scale=0)
        save = gr.Button("Save", scale=0, min_width=90)
    view.does(partial(gr.on, [save.click, field.submit]), partial(retag, site), [field])
    return field


# Actions


def _id(query: Query) -> str:
    return query.get("id", "")


def _done(act: Callable[[str, str], str], query: Query, client: str, goto: str | None = None) -> Done:
    """Does something to the run, which says what it did."""
    return Done(act(_id(query), client), goto=goto)


def resume(site: Site, query: Query, client: str) -> Done:
    """Resumes the run from its last checkpoint, or from the beginning if there is none."""
    steps = steps_of(site.run(_id(query)).path)
    site.launcher.resume(_id(query), client)
    if not steps:
        return Done("No checkpoint: starting from the beginning.")
    return Done(f"Resuming from the checkpoint of step {steps[0]:,}.")


def _again(site: Site, query: Query, client: str) -> Done:
    """Retries a launch that failed before the run had a directory."""
    newest = site.launcher.newest(_id(query))
    experiment = None if newest is None else stored(newest.directory / "experiment.json")
    if newest is None or experiment is None:
        raise RunError("The record of this launch was deleted; create a new run.")
    site.launcher.launch(experiment, client, newest.recipe)
    return Done("Started again.")


def retag(site: Site, query: Query, client: str, text: str) -> Done:
    """Replaces the run's tags."""
    if site.index.row(_id(query)) is None:
        raise RunError(f"There is no run {_id(query)}.")
    site.tags.set(_id(query), words_of(text or ""), client)
    return Done("The tags were saved.")


PAGE = Page(name="run", path="/run", title="Run", build=build, in_navigation=False)
