"""The New run page: a form generated from the spec, with Python, JSON, changes, plan and problems beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.core.base import declared
from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import diff, get, to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError
from nnxdsl.terminal.plan_format import pluralize

from ...components.paste import paste
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.experiments import from_tree
from ...view import UNQUEUED, Done, Query, Values, View, if_any
from ..demo import beginnings
from ..layout import plan_texts
from ..layout.report import plan_report
from ..layout.request import NO_DEVICE, plan_job
from . import drafting, form_texts
from .basics import Basics, templates
from .drafting import Opened
from .form import GROUPS, OPEN, Look, differs, draw, gist, shape

COPIED = (
    "**! Another tab has changed this draft since this page was opened.** Your version was saved as a new draft, which "
    "this page shows; the other tab keeps its version."
)
SHOWN = 20_000
"""Maximum number of characters shown of a damaged draft's file."""
MOST_PROBLEMS = 20
CHANGED = "changed"
"""Which fields are shown: those that differ from the experiment that the draft was copied from."""
DEVICES = ("", "cpu", "h200", "h100", "a100", "b200", "v5e", "v5p", "v6e")
HIDDEN: dict[str, Any] = gr.update(visible=False)

Updates = dict[Any, Any]
"""New values by component."""


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    if site.settings.read_only:
        gr.Markdown("# New run\n\nThis app is read-only: runs cannot be started.")
        return
    # What is typed goes into `form`, which is saved; `opened` names the draft whose fields are shown, `origin` has it.
    opened, origin, form, saved, marks = (gr.Textbox(visible="hidden") for _ in range(5))
    states = {title: gr.Textbox(visible="hidden") for title in GROUPS}
    reading = gr.Timer(0.7, active=False)  # asks for the draft until there is one
    about, buttons, edit = _head(site, view, form)
    first = Basics(site, view)
    begun, fill_begun = _beginning(site, view)
    with gr.Row(visible=False) as body:
        with gr.Column(scale=11, min_width=320, elem_id="new-form"):
            only = view.control("changed", gr.Checkbox(label="Changed fields only", container=False))
            groups = _groups(site, view, states, form)
        with gr.Column(scale=10, min_width=320, elem_id="new-panel"):
            problems = gr.Markdown(elem_classes=["problems"], visible=False)
            panel, fill_panel = _panel(site, view)
    opened.change(partial(drafting.origin, site), [opened], [origin], **UNQUEUED)
    origin.change(None, [origin], [form], js="nnx.opened", **UNQUEUED)
    form.change(
        partial(drafting.answer, site), [form], [saved], js="nnx.settled", trigger_mode="always_last", **UNQUEUED
    )
    view.follows(saved, "nnx.saved")
    marks.change(None, [marks], None, js="nnx.mark", **UNQUEUED)
    for trigger in (gr.context.Context.root_block.load, reading.tick):  # type: ignore[union-attr]
        view.does(trigger, lambda query, client: drafting.begin(site, query))

    def shown(query: Query) -> Values:
        hidden = dict.fromkeys((*buttons, edit, begun[0], body, first.components[0]), HIDDEN)
        if not query.get("draft"):
            values, is_reading = fill_begun(query)
            if any(query.get(name) for name in drafting.BEGINNINGS):
                return {**hidden, about: "", **values, reading: gr.update(active=is_reading)}
            basic, missing, is_busy = first.fill(query)
            usable = gr.update(visible=True, interactive=not missing)
            told = plain(missing) or "Ready to launch; everything else is under All settings."
            shows = dict.fromkeys((*buttons[1:], edit), usable)
            return {**hidden, **values, **basic, **shows, about: told, reading: gr.update(active=is_busy)}
        try:
            found = Opened.of(site, query["draft"])
            values, is_busy = fill_panel(query, found)
            head = [COPIED] if query.get("copied") else []
            return {
                **hidden,
                opened: found.draft.id,
                marks: _marks(found),
                about: "\n\n".join([*head, _about(site, found)]),
                **dict.fromkeys(buttons, gr.update(visible=True, interactive=found.experiment is not None)),
                body: gr.update(visible=True),
                only: query.get("changed") == "1",
                problems: if_any(_problems(found)),
                reading: gr.update(active=is_busy),
                **values,
                **_fields(query, found, groups, states),
            }
        except Exception as error:  # the file may come from another version of the app: it can be discarded
            return {**hidden, about: "", reading: gr.update(active=False), **fill_begun(query, error)[0]}

    parts = [opened, marks, reading, about, *buttons, edit, *begun, body, only, problems, *panel]
    view.shows(shown, [*parts, *groups.values(), *states.values(), *first.components])


def _head(site: Site, view: View, form: gr.Textbox) -> tuple[gr.Markdown, list[gr.Button], gr.Button]:
    """Adds what stays in sight: what is known of the run, and buttons that plan and start it, or show all settings."""

    def plan(site: Site, query: Query, _client: str, form: str) -> Done:  # again, if it could not be planned
        plan_job(site, drafting.require(site, query, form)[1], _device(query), start=True)
        return Done(query={"tab": "plan"})

    buttons: list[gr.Button] = []
    with gr.Column(elem_id="new-head"):
        with gr.Row():
            with gr.Column(min_width=300):
                gr.Markdown("# New run")
            acts = {"All settings": drafting.edited, "Plan": plan, "Queue": drafting.enqueue, "Launch": drafting.launch}
            for text, act in acts.items():
                variant = "primary" if text == "Launch" else "secondary"
                buttons.append(gr.Button(text, variant=variant, scale=0, min_width=130, visible=False))
                view.does(buttons[-1].click, partial(act, site), [form])
        return gr.Markdown(), buttons[1:], buttons[0]


def _beginning(site: Site, view: View) -> tuple[list[Any], Callable[..., tuple[Updates, bool]]]:
    """Adds the choice of a beginning, and why a draft cannot be opened; it also tells whether one is being opened."""
    with gr.Column(visible=False) as group:
        words = gr.Markdown()
        retry = gr.Button("Retry", size="sm", scale=0, min_width=120, visible=False)
        discard = gr.Button("Discard the draft", variant="stop", scale=0, min_width=160, visible=False)
        contents = gr.Code(label="Contents of the draft's file", interactive=False, max_lines=20, visible=False)
        with gr.Accordion("Import Python or JSON", open=False) as pasted:
            paste(view, "Load", partial(drafting.loaded, site))

    def again(query: Query, _client: str) -> None:
        site.presets.job(query.get("preset", ""), again=True)

    def discarded(query: Query, _client: str) -> Done:
        site.drafts.discard(query.get("draft", ""))
        return Done("The draft was discarded.", goto="/new")

    view.does(retry.click, again)
    view.does(discard.click, discarded)

    def fill(query: Query, error: Exception | None = None) -> tuple[Updates, bool]:
        parts = ["", templates(), beginnings(site, "/new", "preset", "from")]
        is_failed, is_begun, stored = False, False, ""
        if error is not None:
            message = str(error) if isinstance(error, NnxdslError) else f"{type(error).__name__}: {error}"
            parts[0], stored = f"**! This draft cannot be opened: {plain(message)}**", site.drafts.text(query["draft"])
        else:
            try:
                found = drafting.beginning(site, query)
                if is_begun := any(query.get(name) for name in drafting.BEGINNINGS):
                    parts = ["Reading the recipe ..." if found is None else "Opening the draft ..."]
            except NnxdslError as wrong:
                parts[0], is_failed = f"**✘ {plain(str(wrong))}**", query.get("preset") in site.presets.names()
        return {
            group: gr.update(visible=True),
            words: "\n\n".join(parts),
            retry: gr.update(visible=is_failed),
            discard: gr.update(visible=bool(stored)),
            contents: if_any(stored[:SHOWN]),
            pasted: gr.update(visible=error is None and not is_begun),
        }, is_begun

    return [group, words, retry, discard, contents, pasted], fill


def _groups(site: Site, view: View, states: dict[str, gr.Textbox], form: gr.Textbox) -> dict[str, gr.Accordion]:
    """Adds the groups of the form; each draws its fields again when its text, which names the draft, changes."""

    def unfold(query: Query, _client: str, *, name: str, is_open: bool) -> Done:
        names = [one for one in query.get("open", "").split(",") if one not in ("", name)]
        return Done(query={"open": ",".join([*names, name] if is_open else names)})

    found: dict[str, gr.Accordion] = {}
    for title, names in GROUPS.items():
        classes = ["group", *(f"has-{name}" for name in names)]
        with gr.Accordion(title, open=title in OPEN, elem_classes=classes) as accordion:
            # One at a time: gradio's renders of one session change the same dictionary of components.
            @gr.render(
                [states[title]],
                triggers=[states[title].change],
                concurrency_limit=1,
                concurrency_id="form",
                show_progress="hidden",
            )
            def fields(state: str, names: tuple[str, ...] = names) -> None:
                draft_id, which, shape = state.split(" ")
                draft = site.drafts.load(draft_id)
                base = form_texts.texts_of(from_tree(draft.base))
                with gr.Column(elem_classes=["shape"], elem_id=f"shape-{names[0]}-{shape}"):
                    draw(Look(draft.texts, base, which == CHANGED, form), Experiment, names=names)

        found[title] = accordion
        if title not in OPEN:
            view.does(accordion.expand, partial(unfold, name=names[0], is_open=True))
            view.does(accordion.collapse, partial(unfold, name=names[0], is_open=False))
    return found


def _fields(query: Query, found: Opened, groups: dict[str, gr.Accordion], states: dict[str, gr.Textbox]) -> Updates:
    """Which groups are shown and unfolded, and what they draw."""
    texts, which = found.draft.texts, CHANGED if query.get("changed") == "1" else "all"
    base, values = form_texts.texts_of(found.base), dict[Any, Any]()
    for title, names in GROUPS.items():
        told = gist(texts, names)
        is_shown = which == "all" or any(differs(texts, base, name) for name in names)
        is_open = is_shown and (which == CHANGED or names[0] in query.get("open", "").split(","))
        unfolds: dict[str, Any] = {"open": True} if is_open else {}
        values[groups[title]] = gr.update(label=f"{title} · {told}" if told else title, visible=is_shown, **unfolds)
        if is_shown and (is_open or title in OPEN):
            key = json.dumps([found.draft.id, which, shape(texts, names)])
            values[states[title]] = f"{found.draft.id} {which} {hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return values


def _about(site: Site, found: Opened) -> str:
    if found.experiment is None:
        note = f"**{pluralize(len(found.problems), 'problem')} to fix first**"
    elif site.index.row(run := found.experiment.id) is not None:
        note = f"this run exists already: {markdown_link(run, link('/run', id=run))}"
    else:
        note = f"run id: {plain(run)}"
    return f"Copied from {plain(found.draft.base_name)}; {note}"


def _problems(found: Opened) -> str:
    lines = [
        f"- {f'[{plain(one.path)}](#f-{one.path}): ' if one.path else ''}{plain(one.message)}"
        for one in found.problems[:MOST_PROBLEMS]
    ]
    return "\n".join([f"### {pluralize(len(found.problems), 'problem')}", "", *lines]) if lines else ""


def _marks(found: Opened) -> str:
    """Fields to mark, as JSON: those that differ from the base, or where it has none from defaults, and problems."""
    texts = found.draft.texts
    base = form_texts.completed(shape(texts, tuple(declared(Experiment)))) | form_texts.texts_of(found.base)
    changed = sorted({path.removesuffix(".type") for path, text in texts.items() if base.get(path) != text})
    return json.dumps({"changed": changed, "problems": {one.path: one.message for one in found.problems}})


def _panel(site: Site, view: View) -> tuple[list[Any], Callable[[Query, Opened], tuple[Updates, bool]]]:
    """Adds the tabs; what fills them also tells whether a child process is at work for them."""
    code: dict[str, Any] = {"interactive": False}
    with gr.Tabs() as tabs:
        with gr.Tab("Python", id="python"):
            python = gr.Code(label="Python", language="python", max_lines=32, elem_id="new-python", **code)
            looks: dict[str, Any] = {"language": "shell", "lines": 1, "wrap_lines": True, "elem_id": "new-command"}
            command = gr.Code(label="In a terminal", **looks, **code)
            why = gr.Markdown(visible=False)
        with gr.Tab("JSON", id="json"):
            text = gr.Code(label="JSON", language="json", max_lines=36, elem_id="new-json", **code)
        with gr.Tab("Changes", id="diff") as changes_tab:
            verdict = gr.Markdown()
            changes = gr.Dataframe(label="Changes", datatype=["markdown", "str", "str"], wrap=True)
        with gr.Tab("Plan", id="plan"):
            plan, fill_plan = _plan(site, view)
        with gr.Tab("Import", id="import"):
            paste(view, "Load", partial(drafting.loaded, site))
    view.tabs("tab", tabs)

    def fill(query: Query, found: Opened) -> tuple[Updates, bool]:
        experiment, base = found.experiment, found.base
        planned, is_busy = fill_plan(query, experiment)
        values: Updates = {tabs: gr.update(selected=query.get("tab") or "python"), **planned}
        if experiment is None:
            values |= dict.fromkeys((python, command, text, changes), HIDDEN)
            values |= {why: if_any("Fix the problems above."), verdict: "Fix the problems above to see the changes."}
            return values, is_busy
        words = told = ""
        try:
            words = drafting.command(site, found.draft, experiment)
        except NnxdslError as error:
            job, told = site.presets.job(found.draft.recipe), plain(str(error))
            is_busy = is_busy or (job is not None and not job.is_over)
        differing, name = diff(base, experiment), plain(found.draft.base_name)
        rows = [
            [f"[{plain(path)}](#f-{path})", render(get(base, path)), render(value)] for path, value in differing.items()
        ]
        is_same = base.id == experiment.id
        same = "Same run id: only placement or cadence differ." if is_same else "This is a different run id."
        count = pluralize(len(rows), "difference")
        return {
            **values,
            python: gr.update(value=to_python(experiment), visible=True),
            command: if_any(words),
            why: if_any(told),
            text: gr.update(value=to_json(experiment), visible=True),
            verdict: f"{count} from {name}. {same}" if rows else f"Nothing differs from {name}.",
            changes: if_any(pd.DataFrame(rows, columns=["field", "was", "is"])),
            changes_tab: gr.update(label=f"Changes ({len(rows)})"),
        }, is_busy

    return [tabs, python, command, why, text, verdict, changes, changes_tab, *plan], fill


def _device(query: Query) -> str:
    """Device of the query; `NO_DEVICE` for this machine's."""
    return query["device"] if query.get("device") in DEVICES[1:] else NO_DEVICE


def _plan(site: Site, view: View) -> tuple[list[Any], Callable[[Query, Experiment | None], tuple[Updates, bool]]]:
    """Adds the plan, which is computed only for the tab that is shown; it also tells whether it is being computed."""
    with gr.Row():
        choices = [(name or "this machine", name) for name in DEVICES]
        view.control("device", gr.Dropdown(choices, value="", label="Device", info="The plan is for its memory"))
        inspect = gr.Button("Inspect the layout", link="/layout", size="sm", scale=0, min_width=160)
    words = gr.Markdown()

    def chosen(query: Query) -> tuple[Experiment, str]:
        return drafting.require(site, query)[1], _device(query)

    report, fill_report = plan_report(site, view, chosen, is_open=True)

    def fill(query: Query, experiment: Experiment | None) -> tuple[Updates, bool]:
        values: Updates = {report[0]: HIDDEN, words: "Fix the problems above to see the plan."}
        if experiment is None or query.get("tab") != "plan":
            return values, False
        of = experiment, _device(query)
        job = plan_job(site, *of, start=False)
        if job is None or job.state == "cancelled":
            job = plan_job(site, *of, start=True)
        assert job is not None
        values[inspect] = gr.update(link=link("/layout", draft=query.get("draft")))
        if job.state == "done":
            told = filter(None, [plan_texts.verdict(job.result), plan_texts.warnings(job.result)])
            filled, is_busy = fill_report(query, [job.result], of)
            return {**values, **filled, words: "\n\n".join(told)}, is_busy
        progress = f"Planning in a child process, {job.seconds:.0f} s so far ..."
        return {**values, words: f"**✘ {plain(job.error)}**" if job.is_over else progress}, not job.is_over

    return [inspect, words, *report], fill


PAGE = Page(name="new", path="/new", title="New run", build=build)
