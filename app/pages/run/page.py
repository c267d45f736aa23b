"""The page of one run: state, curves, log, config and actions."""

from __future__ import annotations

from typing import Any

import gradio as gr

from nnxdsl.errors import RunError

from ...components.confirm import Confirmation
from ...components.states import badge, bar
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.experiments import stored
from ...store.rollouts import NAME as ROLLOUTS
from ...store.tags import words_of
from ...view import Done, Query, Values, View
from ..outputs.request import steps_of
from . import head
from .charts import Charts
from .chosen import Chosen, chosen
from .config import Config
from .files import Environment, Events, Log, Samples

TABS: dict[str, Any] = {
    "charts": ("Charts", Charts),
    "log": ("Log", Log),
    "config": ("Config", Config),
    "samples": ("Samples", Samples),
    "environment": ("Environment", Environment),
    "events": ("Events", Events),
}
LIVE_SECONDS, IDLE_SECONDS = 2, 10


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    timer = gr.Timer(LIVE_SECONDS)
    with gr.Row(elem_classes=["titled"]):
        title, state = gr.Markdown("# Run"), gr.HTML(padding=False)
    other = view.control("id", gr.Dropdown([], label="Run", visible=False))
    with gr.Row(elem_classes=["buttons"]):
        buttons = _buttons(site, view)
    questions = [] if site.settings.read_only else _questions(site, view, buttons)
    error = gr.Code(label="Error", interactive=False, wrap_lines=True, lines=1, show_line_numbers=False, visible=False)
    trouble = gr.Markdown(elem_classes=["problem"])
    words, progress = gr.Markdown(), gr.HTML(padding=False)
    figures, tags = gr.Markdown(), gr.Markdown()
    edited = None if site.settings.read_only else _tagging(site, view)
    output = gr.Textbox(label="Output", lines=4, max_lines=24, interactive=False, visible=False, elem_classes=["log"])
    parts = {}
    with gr.Tabs() as tabs:
        for name, (text, part) in TABS.items():
            with gr.Tab(text, id=name):
                parts[name] = part(view)
    view.tabs("tab", tabs)

    def shown(query: Query) -> Values:
        run = chosen(site, query.get("id", ""))
        row, wrong, directory = run.row, head.trouble(run), run.directory
        tab = query.get("tab") if query.get("tab") in parts else "charts"
        newest = run.newest if row is None else None
        status = {} if row is None else row.status
        own_tags = site.tags.of(run.id) if row is not None else ()
        found: dict[Any, Any] = {
            title: head.chosen_title(run),
            state: gr.update(value=badge(run.state, run.id), visible=bool(run.state)),
            other: gr.update(choices=head.choices(site) if not run.state else [], value=None, visible=not run.state),
            words: head.words(site, run),
            progress: gr.update(
                value=bar(status.get("step") or 0, status.get("total") or 1), visible=bool(status.get("total"))
            ),
            trouble: gr.update(value=plain(wrong.words), visible=bool(wrong.words)),
            error: gr.update(value=wrong.error, visible=bool(wrong.error)),
            figures: "" if row is None or directory is None else head.figures(row, query.get("_zone", "")),
            tags: gr.update(value=_tag_links(own_tags), visible=bool(own_tags)),
            output: gr.update(value=newest.output() if newest else "", visible=newest is not None),
            tabs: gr.update(selected=tab, visible=directory is not None),
            timer: gr.update(value=LIVE_SECONDS if run.is_live or run.place else IDLE_SECONDS),
            **_offered(run, wrong.field, buttons),
        }
        if edited is not None:
            box, field = edited
            found |= {box: gr.update(visible=directory is not None), field: ", ".join(own_tags)}
        for question in questions:
            found |= question.shown(query)
        if directory is not None and row is not None:
            found |= parts[tab].shown(site, directory, row, query)
        return found

    outputs = [title, state, other, words, progress, trouble, error, figures, tags, output, tabs, timer]
    outputs += [*buttons.values(), *(edited or ()), *(one for part in parts.values() for one in part.outputs)]
    view.shows(shown, [*outputs, *(one for question in questions for one in question.outputs)], every=timer)


def _tag_links(words: tuple[str, ...]) -> str:
    return "Tags: " + ", ".join(markdown_link(word, link("/", tag=word)) for word in words)


# Buttons


def _buttons(site: Site, view: View) -> dict[str, gr.Button]:
    """Adds the buttons, by what they do; those that write are not there in a read-only app."""
    found: dict[str, gr.Button] = {}

    def add(name: str, text: str, **more: Any) -> gr.Button:
        found[name] = gr.Button(text, scale=0, min_width=90, visible=False, **more)
        return found[name]

    if not site.settings.read_only:
        view.does(add("stop", "Stop and save", variant="primary").click, lambda *given: stop(site, *given))
        view.does(add("resume", "Resume", variant="primary").click, lambda *given: resume(site, *given))
        add("edit", "Edit", variant="primary", link="#")
        view.does(add("again", "Start again").click, lambda *given: again(site, *given))
        view.does(add("unqueue", "Do not run").click, lambda *given: unqueue(site, *given))
        add("fix", "Clone with a fix", link="#")
        add("clone", "Clone", link="#")
    for name in ("layout", "outputs", "rollouts", "compare", "report"):
        add(name, name.capitalize(), link="#")
    if not site.settings.read_only:
        add("kill", "Kill", variant="stop")
        add("delete", "Delete", variant="stop")
    return found


def _offered(run: Chosen, blamed: str | None, buttons: dict[str, gr.Button]) -> dict[gr.Button, Any]:
    """Which buttons the state of a run allows, and where those that are links lead: a fix, to the field to blame."""
    has_files = run.directory is not None
    has_rollouts = run.directory is not None and (run.directory.path / ROLLOUTS).exists()
    draft = link("/new", **{"from": run.id})
    fix = draft + (f"#f-{blamed}" if blamed else "")
    allowed = {
        "stop": run.is_live,
        "kill": run.is_live,
        "resume": has_files and not run.is_live and run.state in ("stopped", "failed", "lost", "queued"),
        "again": run.state == "refused",
        "unqueue": run.place is not None,
        "delete": has_files and not run.is_live,
    }
    links = {
        "edit": draft if run.state == "refused" else None,
        "fix": fix if run.state == "failed" and has_files else None,
        "clone": draft if has_files and run.state != "failed" else None,
        "layout": link("/layout", run=run.id) if has_files else None,
        "outputs": link("/outputs", run=run.id) if has_files else None,
        "rollouts": link("/rollouts", run=run.id) if has_rollouts else None,
        "compare": link("/compare", ids=run.id) if has_files else None,
        "report": link("/download", **{"compare": run.id, "as": "html"}) if has_files else None,
    }
    found: dict[gr.Button, Any] = {}
    for name, button in buttons.items():
        if name in allowed:
            found[button] = gr.update(visible=allowed[name])
        else:
            where = links[name]
            found[button] = gr.update(visible=where is not None, link=where or "")
    return found


def _questions(site: Site, view: View, buttons: dict[str, gr.Button]) -> list[Confirmation]:
    """Adds what asks before a run is killed or deleted."""
    lost = "Its last checkpoint stays valid; progress since then is lost."
    moved = "It will be moved to the directory .trash next to the runs."
    return [
        Confirmation(view, buttons["kill"], "kill", lost, lambda *given: kill(site, *given)),
        Confirmation(view, buttons["delete"], "delete", moved, lambda *given: delete(site, *given), _id),
    ]


def _tagging(site: Site, view: View) -> tuple[gr.Accordion, gr.Textbox]:
    """Adds the field of the run's tags."""
    with gr.Accordion("Change the tags", open=False, visible=False) as box, gr.Row(elem_classes=["buttons"]):
        label = "Tags, separated by commas"
        field = gr.Textbox(label=label, show_label=False, placeholder="baseline, sweep-3", max_lines=1, scale=0)
        save = gr.Button("Save", scale=0, min_width=90)
    for trigger in (save.click, field.submit):
        view.does(trigger, lambda query, client, text: retag(site, query, client, text), [field])
    return box, field


# Actions


def _id(query: Query) -> str:
    return query.get("id", "")


def stop(site: Site, query: Query, client: str) -> Done:
    """Requests that the run saves a checkpoint and stops."""
    return Done(site.launcher.stop(_id(query), client))


def kill(site: Site, query: Query, client: str) -> Done:
    """Kills the run."""
    return Done(site.launcher.kill(_id(query), client))


def resume(site: Site, query: Query, client: str) -> Done:
    """Resumes the run from its last checkpoint, or from the beginning if there is none."""
    run = _id(query)
    steps = steps_of(site.run(run).path)
    site.launcher.resume(run, client)
    if not steps:
        return Done("No checkpoint: starting from the beginning.")
    return Done(f"Resuming from the checkpoint of step {steps[0]:,}.")


def again(site: Site, query: Query, client: str) -> Done:
    """Retries a launch that failed before the run had a directory."""
    newest = site.launcher.newest(_id(query))
    experiment = None if newest is None else stored(newest.directory / "experiment.json")
    if newest is None or experiment is None:
        raise RunError("The record of this launch was deleted; create a new run.")
    site.launcher.launch(experiment, client, newest.recipe)
    return Done("Started again.")


def unqueue(site: Site, query: Query, client: str) -> Done:
    """Removes the run from the queue."""
    return Done(site.launcher.unqueue(_id(query), client), goto="/")


def retag(site: Site, query: Query, client: str, text: str) -> Done:
    """Replaces the run's tags."""
    run = _id(query)
    if site.index.row(run) is None:
        raise RunError(f"There is no run {run}.")
    site.tags.set(run, words_of(text or ""), client)
    return Done("The tags were saved.")


def delete(site: Site, query: Query, client: str) -> Done:
    """Moves the run to the home's trash."""
    return Done(site.launcher.put_away(_id(query), client), goto="/")


PAGE = Page(name="run", path="/run", title="Run", build=build, in_navigation=False)
