"""The New run page: a form generated from the spec, with Python, JSON, changes, plan and problems beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.core.base import declared
from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import diff, get, to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, Problem

from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.drafts import Draft
from ...store.experiments import from_tree
from ...view import Done, Query, Values, View
from ..layout.request import plan_job
from . import drafting, form_texts
from .form import GROUPS, OPEN, Look, draw, gist, shape
from .plan import device_of, plan_section

COPIED = (
    "**! Another tab has changed this draft since this page was opened.** Your version was saved as a new draft, which "
    "this page shows; the other tab keeps its version."
)
SHOWN = 20_000
"""Maximum number of characters shown of a damaged draft's file."""
MOST_PROBLEMS = 20
CHANGED = "changed"
"""Which fields are shown: those that differ from the experiment that the draft was copied from."""
_QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    if site.settings.read_only:
        gr.Markdown("# New run\n\nThis app is read-only: runs cannot be started.")
        return
    opened, origin, form, saved, marks = (gr.Textbox(visible="hidden") for _ in range(5))
    states = {
        title: gr.Textbox(visible="hidden") for title in GROUPS
    }  # not in a row that is hidden: it would show them
    reading = gr.Timer(0.7, active=False)
    with gr.Column(elem_id="new-head"):
        with gr.Row():
            with gr.Column(min_width=300):
                gr.Markdown("# New run")
            plan = gr.Button("Plan", scale=0, min_width=90, visible=False)
            queue = gr.Button("Queue", scale=0, min_width=90, visible=False)
            launch = gr.Button("Launch", variant="primary", scale=0, min_width=90, visible=False)
        about = gr.Markdown()
    with gr.Column(visible=False) as beginning:
        start = gr.Markdown()
        retry = gr.Button("Retry", size="sm", scale=0, min_width=120, visible=False)
        with gr.Column() as paste:
            _paste(site, view)
    with gr.Column(visible=False) as damaged:
        wrong = gr.Markdown()
        with gr.Row():
            discard = gr.Button("Discard the draft", variant="stop", scale=0, min_width=160)
            gr.Button("Start another draft", link="/new", scale=0, min_width=160)
        contents = gr.Code(label="Contents of its file", interactive=False, max_lines=20)
    with gr.Row(visible=False) as body:
        with gr.Column(scale=11, min_width=320, elem_id="new-form"):
            only = gr.Checkbox(label="Changed fields only", container=False)
            view.control("changed", only)
            groups = _groups(site, view, states, origin, form)
        with gr.Column(scale=10, min_width=320, elem_id="new-panel"):
            problems = gr.Markdown(elem_classes=["problems"], visible=False)
            with gr.Tabs() as tabs:
                with gr.Tab("Python", id="python"):
                    python = gr.Code(
                        label="Python", language="python", interactive=False, max_lines=32, elem_id="new-python"
                    )
                    command = gr.Code(
                        label="In a terminal",
                        elem_id="new-command",
                        language="shell",
                        lines=1,
                        interactive=False,
                        wrap_lines=True,
                    )
                    why = gr.Markdown(visible=False)
                with gr.Tab("JSON", id="json"):
                    text = gr.Code(label="JSON", language="json", interactive=False, max_lines=36, elem_id="new-json")
                with gr.Tab("Changes", id="diff") as changes_tab:
                    verdict = gr.Markdown()
                    changes = gr.Dataframe(label="Changes", datatype=["markdown", "str", "str"], wrap=True)
                with gr.Tab("Plan", id="plan"):
                    plan_outputs, fill_plan = plan_section(site, view, lambda query: drafting.require(site, query)[1])
                with gr.Tab("Import", id="import"):
                    _paste(site, view)
    view.tabs("tab", tabs)

    # What is typed goes into `form`, which is saved; `opened` names the draft whose fields are shown.
    opened.change(lambda name: drafting.origin(site, name), [opened], [origin], **_QUIET)
    origin.change(None, [origin, form], [form], js="(origin, form) => nnx.opened(origin, form)", **_QUIET)
    form.change(
        lambda form: drafting.answer(site, form),
        [form],
        [saved],
        js="nnx.settled",
        trigger_mode="always_last",
        **_QUIET,
    )
    view.follows(saved, "nnx.saved")
    marks.change(None, [marks], None, js="(marks) => nnx.mark(marks)", **_QUIET)
    begin_from = gr.context.Context.root_block.load  # type: ignore[union-attr]
    for trigger in (begin_from, reading.tick):
        view.does(trigger, lambda query, client: drafting.begin(site, query))
    view.does(retry.click, lambda query, client: _retry(site, query))
    view.does(discard.click, lambda query, client: _discard(site, query))
    view.does(launch.click, lambda query, client, form: drafting.launch(site, query, client, form), [form])
    view.does(queue.click, lambda query, client, form: drafting.enqueue(site, query, client, form), [form])
    view.does(plan.click, lambda query, client, form: _plan(site, query, form), [form])

    code = [python, command, why, text, verdict, changes, changes_tab]
    outputs = [
        *(opened, marks, reading, about, plan, queue, launch, beginning, start, retry, paste, damaged, wrong),
        *(discard, contents, body, only, problems, tabs, *code, *plan_outputs),
        *groups.values(),
        *states.values(),
    ]

    def shown(query: Query) -> Values:
        hidden: dict[Any, Any] = dict.fromkeys(
            (plan, queue, launch, beginning, damaged, body), gr.update(visible=False)
        )
        hidden |= {reading: gr.Timer(active=False), about: ""}
        if not query.get("draft"):
            return {**hidden, beginning: gr.update(visible=True), **_started(query)}
        try:
            return {**hidden, **_drafted(query)}
        except Exception as error:  # the file may come from another version of the app: it can be discarded
            message = str(error) if isinstance(error, NnxdslError) else f"{type(error).__name__}: {error}"
            stored = site.drafts.text(query["draft"])
            return {
                **hidden,
                damaged: gr.update(visible=True),
                wrong: f"**! This draft cannot be opened: {plain(message)}**",
                discard: gr.update(visible=bool(stored)),
                contents: gr.update(value=stored[:SHOWN], visible=bool(stored)),
            }

    def _started(query: Query) -> Values:
        """The choice of a beginning, or the state of the one that was chosen."""
        choice = {start: _choice(site), retry: gr.update(visible=False), paste: gr.update(visible=True)}
        try:
            job = drafting.reading(site, query)
        except NnxdslError as error:
            return {**choice, start: f"**! {plain(str(error))}**\n\n{_choice(site)}"}
        if not any(query.get(name) for name in drafting.BEGINNINGS):
            return choice
        is_reading = job is not None and not job.is_over
        can_begin = job is None or is_reading or job.state == "done"  # the timer asks for the draft until there is one
        waiting = {**choice, paste: gr.update(visible=False), reading: gr.Timer(active=can_begin)}
        if can_begin:
            return {**waiting, start: "Reading the recipe ..." if is_reading else "Opening the draft ..."}
        told = f"experiments/{query['preset']}.py cannot be read: {job.error or job.state}"
        return {**waiting, start: f"**✘ {plain(told)}**", retry: gr.update(visible=True)}

    def _drafted(query: Query) -> Values:
        draft = site.drafts.load(query["draft"])
        experiment, found = form_texts.read(draft.texts)
        base = from_tree(draft.base)
        planned, is_busy = fill_plan(query, experiment)
        panel, is_read = _panel(site, draft, base, experiment)
        base_texts = form_texts.texts_of(base)
        look = Look(draft.texts, base_texts, False, origin, form)
        values: dict[Any, Any] = {
            opened: draft.id,
            marks: _marks(draft.texts, base_texts, found),
            about: "\n\n".join(
                filter(None, [COPIED if query.get("copied") else "", _about(site, draft, experiment, found)])
            ),
            **dict.fromkeys((plan, queue, launch), gr.update(visible=True, interactive=experiment is not None)),
            body: gr.update(visible=True),
            only: query.get("changed") == "1",
            tabs: gr.Tabs(selected=query.get("tab") or "python"),
            problems: gr.update(value=_problems(found), visible=bool(found)),
            reading: gr.Timer(active=is_busy or not is_read),
            **dict(zip(code, panel, strict=True)),
            **planned,
        }
        which = CHANGED if query.get("changed") == "1" else "all"
        for title, accordion in groups.items():
            names, told = GROUPS[title], gist(draft.texts, GROUPS[title])
            is_shown = which == "all" or any(map(look.differs, names))
            is_open = is_shown and (which == CHANGED or names[0] in query.get("open", "").split(","))
            values[accordion] = gr.update(
                label=f"{title} · {told}" if told else title, visible=is_shown, **({"open": True} if is_open else {})
            )
            if is_shown and (is_open or title in OPEN):
                key = json.dumps([draft.id, which, shape(draft.texts, names)])
                values[states[title]] = f"{draft.id} {which} {hashlib.sha256(key.encode()).hexdigest()[:12]}"
        return values

    view.shows(shown, outputs)


def _groups(
    site: Site, view: View, states: Mapping[str, gr.Textbox], origin: gr.Textbox, form: gr.Textbox
) -> dict[str, gr.Accordion]:
    """Adds the groups of the form; each draws its fields again when its text, which names the draft, changes."""
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
                    draw(Look(draft.texts, base, which == CHANGED, origin, form), Experiment, names=names)

        found[title] = accordion
        if title not in OPEN:
            for trigger, is_open in ((accordion.expand, "true"), (accordion.collapse, "false")):
                view.sets(trigger, "open", f"nnx.unfolded({json.dumps(names[0])}, {is_open})")
    return found


def _paste(site: Site, view: View) -> None:
    """Adds the import of Python or JSON, pasted or from a file."""
    with gr.Column(elem_classes=["pastes"]):
        text = gr.Textbox(
            label="Python or JSON",
            info="Python as `nnxdsl show FILE --python` prints it, or JSON. It is parsed, never executed.",
            lines=12,
            max_lines=20,
            placeholder="from nnxdsl import ...\n\nexperiment = Experiment(...)",
        )
        gr.HTML('<label>or read a file <input type="file" class="reads-text" accept=".py,.json,.txt"></label>')
        load = gr.Button("Load", variant="primary", scale=0, min_width=120)
    view.does(load.click, lambda query, client, text: drafting.loaded(site, query, text), [text])


def _choice(site: Site) -> str:
    """Markdown: recipes and earlier runs to start from."""
    recipes = [
        f"- {markdown_link(name, link('/new', preset=name))} experiments/{plain(name)}.py"
        for name in site.presets.names()
    ]
    runs = [f"- {markdown_link(row.id, link('/new', **{'from': row.id}))}" for row in site.index.rows()[:8]]
    if not recipes:
        recipes = [
            f"- [demo]({link('/new', demo=1)}) a tiny DPO run with its own data; takes a few minutes",
            "",
            f"Recipes are read from {plain(str(site.presets.place))}.",
        ]
    parts = ["Start from a copy: a recipe, an earlier run, or pasted text.", "## Recipes", "\n".join(recipes)]
    return "\n\n".join([*parts, *(["## Earlier runs", "\n".join(runs)] if runs else []), "## Python or JSON"])


def _about(site: Site, draft: Draft, experiment: Experiment | None, problems: Sequence[Problem]) -> str:
    if experiment is None:
        note = f"**{_count(problems)} to fix first**"
    elif site.index.row(experiment.id) is not None:
        note = f"this run exists already: {markdown_link(experiment.id, link('/run', id=experiment.id))}"
    else:
        note = f"run id: {plain(experiment.id)}"
    return f"Copied from {plain(draft.base_name)}; {note}"


def _count(problems: Sequence[Problem]) -> str:
    return f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"


def _problems(problems: Sequence[Problem]) -> str:
    lines = [
        f"- {f'[{plain(one.path)}](#f-{one.path}): ' if one.path else ''}{plain(one.message)}"
        for one in problems[:MOST_PROBLEMS]
    ]
    return "\n".join([f"### {_count(problems)}", "", *lines])


def _marks(texts: dict[str, str], base: dict[str, str], problems: Sequence[Problem]) -> str:
    """Fields to mark, as JSON: those that differ from the base, or where it has none from defaults, and problems."""
    plain_base = form_texts.completed(shape(texts, tuple(declared(Experiment)))) | base
    changed = sorted({path.removesuffix(".type") for path, text in texts.items() if plain_base.get(path) != text})
    return json.dumps({"changed": changed, "problems": {one.path: one.message for one in problems}})


def _panel(site: Site, draft: Draft, base: Experiment, experiment: Experiment | None) -> tuple[list[Any], bool]:
    """Values of the tabs but for the plan, and whether the recipe of the command has been read."""
    if experiment is None:
        fix = "Fix the problems above to see the changes."
        gone = gr.update(visible=False)
        return [gone, gone, gr.update(visible=True, value="Fix the problems above."), gone, fix, gone, gr.skip()], True
    differing = diff(base, experiment)
    same = (
        "Same run id: only placement or cadence differ." if base.id == experiment.id else "This is a different run id."
    )
    rows = [
        [f"[{plain(path)}](#f-{path})", render(get(base, path)), render(value)] for path, value in differing.items()
    ]
    words, why, is_read = "", "", True
    try:
        words = drafting.command(site, draft, experiment)
    except NnxdslError as error:
        job, why = site.presets.job(draft.recipe), plain(str(error))
        is_read = job is None or job.is_over
    table = pd.DataFrame(rows, columns=["field", "was", "is"])
    told = f"{len(rows)} {'difference' if len(rows) == 1 else 'differences'} from {plain(draft.base_name)}. {same}"
    return [
        gr.update(value=to_python(experiment), visible=True),
        gr.update(value=words, visible=not why),
        gr.update(value=why, visible=bool(why)),
        gr.update(value=to_json(experiment), visible=True),
        told if rows else f"Nothing differs from {plain(draft.base_name)}.",
        gr.update(value=table, visible=bool(rows)),
        gr.Tab(label=f"Changes ({len(rows)})"),
    ], is_read


def _plan(site: Site, query: Query, form: str) -> Done:
    """Shows the plan, and plans again what could not be planned."""
    plan_job(site, drafting.require(site, query, form)[1], device_of(query), start=True)
    return Done(query={"tab": "plan"})


def _retry(site: Site, query: Query) -> None:
    """Reads a recipe again that could not be read."""
    site.presets.job(query.get("preset", ""), again=True)


def _discard(site: Site, query: Query) -> Done:
    site.drafts.discard(query.get("draft", ""))
    return Done("The draft was discarded.", goto="/new")


PAGE = Page(name="new", path="/new", title="New run", build=build)
