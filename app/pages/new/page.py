"""The New run page: a form generated from the spec, with Python, JSON, changes, plan and problems beside it."""

from __future__ import annotations

import hashlib
import json
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
from ...markup import link, markdown_link, plain
from ...page import Page, Part
from ...state import Site
from ...store.experiments import from_tree
from ...view import UNQUEUED, Done, Query, Values, View, if_any
from ..demo import beginnings
from ..layout import plan_texts
from ..layout.report import PlanReport
from ..layout.request import NO_DEVICE, plan_job
from . import drafting, form_texts
from .basics import Basics, templates
from .drafting import Opened
from .form import GROUPS, OPEN, FormState, classes_of, differs, draw, shape

COPIED = (
    "**! Another tab has changed this draft since this page was opened.** Your version was saved as a new draft, which "
    "this page shows; the other tab keeps its version."
)
SHOWN = 20_000  # maximum number of characters shown of a damaged draft's file
MOST_PROBLEMS = 20
CHANGED = "changed"  # which fields are shown: those that differ from the experiment that the draft was copied from
DEVICES = ("", "cpu", "h200", "h100", "a100", "b200", "v5e", "v5p", "v6e")
HIDDEN: dict[str, Any] = gr.update(visible=False)


class NewRun(Page):
    """The first screen; or the draft of the query, as a form with a panel beside it."""

    name, path, title = "new", "/new", "New run"

    def build(self) -> None:
        site, view = self.site, self.view
        if site.settings.read_only:
            gr.Markdown("# New run\n\nThis app is read-only: runs cannot be started.")
            return
        # What is typed goes into `form`, which is saved; `opened` names the draft that is shown, `origin` has it.
        self.opened, origin, form, saved, self.marks = (gr.Textbox(visible="hidden") for _ in range(5))
        self.timer = gr.Timer(0.7, active=False)  # reads again until there is a draft, rows, or a plan
        self.head = Head(site, view, form)
        self.basics, self.beginning = Basics(site, view), Beginning(site, view)
        with gr.Row(visible=False) as self.body:
            with gr.Column(scale=11, min_width=320, elem_id="new-form"):
                self.form = Form(site, view, form)
            with gr.Column(scale=10, min_width=320, elem_id="new-panel"):
                self.problems = gr.Markdown(elem_classes=["problems"], visible=False)
                self.panel = Panel(site, view)
        self.opened.change(partial(drafting.origin, site), [self.opened], [origin], **UNQUEUED)
        origin.change(None, [origin], [form], js="nnx.opened", **UNQUEUED)
        answer = partial(drafting.answer, site)
        form.change(answer, [form], [saved], js="nnx.settled", trigger_mode="always_last", **UNQUEUED)
        view.on_change(saved, "nnx.saved")
        self.marks.change(None, [self.marks], None, js="nnx.mark", **UNQUEUED)
        for trigger in (gr.context.Context.root_block.load, self.timer.tick):  # type: ignore[union-attr]
            view.on(trigger, partial(drafting.begin, site))

    def fill(self, query: Query) -> Values:
        """Shows the first screen, a draft that is being opened, a draft, or why it cannot be opened."""
        hidden = dict.fromkeys((*self.head.buttons.values(), self.beginning.group, self.body, self.basics.row), HIDDEN)
        if query.get("draft"):
            try:
                return {**hidden, **self._fill_draft(query, Opened.of(self.site, query["draft"]))}
            except Exception as error:  # the file may come from another version of the app: it can be discarded
                values, _ = self.beginning.fill(query, error)
                return {**hidden, **values, self.head.about: "", self.timer: gr.update(active=False)}
        values, is_opening = self.beginning.fill(query)
        if is_opening:
            return {**hidden, **values, self.head.about: "", self.timer: gr.update(active=True)}
        basics, missing, is_reading = self.basics.fill(query)
        return {
            **hidden,
            **values,
            **basics,
            **self.head.fill(can_start=not missing, is_draft=False),
            self.head.about: plain(missing) or "Ready to launch; everything else is under All settings.",
            self.timer: gr.update(active=is_reading),
        }

    def _fill_draft(self, query: Query, opened: Opened) -> Values:
        panel, is_planning = self.panel.fill(query, opened)
        copied = [COPIED] if query.get("copied") else []
        return {
            **self.head.fill(can_start=opened.experiment is not None, is_draft=True),
            **self.form.fill(query, opened),
            **panel,
            self.opened: opened.draft.id,
            self.marks: _marks(opened),
            self.head.about: "\n\n".join([*copied, _about(self.site, opened)]),
            self.body: gr.update(visible=True),
            self.problems: if_any(_problems(opened)),
            self.timer: gr.update(active=is_planning),
        }


class Head(Part):
    """What stays in sight: what is known of the run, and buttons that plan and start it, or show all settings."""

    def __init__(self, site: Site, view: View, form: gr.Textbox) -> None:
        self.site = site
        actions = {
            "All settings": partial(drafting.edited, site),
            "Plan": self._plan,
            "Queue": partial(drafting.enqueue, site),
            "Launch": partial(drafting.launch, site),
        }
        self.buttons: dict[str, gr.Button] = {}
        with gr.Column(elem_id="new-head"):
            with gr.Row():
                with gr.Column(min_width=300):
                    gr.Markdown("# New run")
                for text, act in actions.items():
                    variant = "primary" if text == "Launch" else "secondary"
                    self.buttons[text] = view.button(text, act, [form], variant=variant, min_width=130, visible=False)
            self.about = gr.Markdown()

    def fill(self, *, can_start: bool, is_draft: bool) -> Values:
        shown = gr.update(visible=True, interactive=can_start)
        other = "All settings" if is_draft else "Plan"
        return {button: HIDDEN if text == other else shown for text, button in self.buttons.items()}

    def _plan(self, query: Query, form: str) -> Done:  # again, if it could not be planned
        plan_job(self.site, drafting.require(self.site, query, form)[1], _device(query), start=True)
        return Done(query={"tab": "plan"})


class Beginning(Part):
    """Templates, recipes and earlier runs to begin from, and why a draft cannot be opened."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        with gr.Column(visible=False) as self.group:
            self.text = gr.Markdown()
            self.retry = view.button("Retry", self._retry, size="sm", min_width=120, visible=False)
            hidden: dict[str, Any] = {"min_width": 160, "visible": False}
            self.discard = view.button("Discard the draft", self._discard, variant="stop", **hidden)
            contents: dict[str, Any] = {"interactive": False, "max_lines": 20, "visible": False}
            self.contents = gr.Code(label="Contents of the draft's file", **contents)
            with gr.Accordion("Import Python or JSON", open=False) as self.pasted:
                paste(view, "Load", partial(drafting.loaded, site))

    def fill(self, query: Query, error: Exception | None = None) -> tuple[Values, bool]:
        """Shows what to begin from, or the error of a draft; also returns whether a draft is being opened."""
        site = self.site
        texts = ["", templates(), beginnings(site, "/new", "preset", "from")]
        is_failed, is_opening, stored = False, False, ""
        if error is not None:
            message = str(error) if isinstance(error, NnxdslError) else f"{type(error).__name__}: {error}"
            texts[0], stored = f"**! This draft cannot be opened: {plain(message)}**", site.drafts.text(query["draft"])
        elif any(query.get(name) for name in drafting.BEGINNINGS):
            is_opening = True
            try:
                is_read = drafting.beginning(site, query) is not None
                texts = ["Opening the draft ..." if is_read else "Reading the recipe ..."]
            except NnxdslError as wrong:
                is_opening, is_failed = False, query.get("preset") in site.presets.names()
                texts[0] = f"**✘ {plain(str(wrong))}**"
        return {
            self.group: gr.update(visible=True),
            self.text: "\n\n".join(texts),
            self.retry: gr.update(visible=is_failed),
            self.discard: gr.update(visible=bool(stored)),
            self.contents: if_any(stored[:SHOWN]),
            self.pasted: gr.update(visible=error is None and not is_opening),
        }, is_opening

    def _retry(self, query: Query) -> None:
        self.site.presets.job(query.get("preset", ""), again=True)

    def _discard(self, query: Query) -> Done:
        self.site.drafts.discard(query.get("draft", ""))
        return Done("The draft was discarded.", goto="/new")


class Form(Part):
    """All settings in groups; each draws its fields again when its text in `states`, which names the draft, changes."""

    def __init__(self, site: Site, view: View, form: gr.Textbox) -> None:
        """Adds the components; `form` is the browser's copy of all texts."""
        self.site = site
        self.only = view.control("changed", gr.Checkbox(label="Changed fields only", container=False))
        self.states = {title: gr.Textbox(visible="hidden") for title in GROUPS}
        self.groups: dict[str, gr.Accordion] = {}
        for title, names in GROUPS.items():
            classes = ["group", *(f"has-{name}" for name in names)]
            with gr.Accordion(title, open=title in OPEN, elem_classes=classes) as self.groups[title]:
                self._render(self.states[title], names, form)
            if title not in OPEN:
                view.on(self.groups[title].expand, partial(_unfold, name=names[0], is_open=True))
                view.on(self.groups[title].collapse, partial(_unfold, name=names[0], is_open=False))

    def _render(self, state: gr.Textbox, names: tuple[str, ...], form: gr.Textbox) -> None:
        # One at a time: gradio's renders of one session change the same dictionary of components.
        once: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "form", "show_progress": "hidden"}

        @gr.render([state], triggers=[state.change], **once)
        def fields(text: str) -> None:
            draft_id, which, digest = text.split(" ")
            draft = self.site.drafts.load(draft_id)
            base = form_texts.texts_of(from_tree(draft.base))
            with gr.Column(elem_classes=["shape"], elem_id=f"shape-{names[0]}-{digest}"):
                draw(FormState(draft.texts, base, which == CHANGED, form), Experiment, names=names)

    def fill(self, query: Query, opened: Opened) -> Values:
        texts, which = opened.draft.texts, CHANGED if query.get("changed") == "1" else "all"
        base, values = form_texts.texts_of(opened.base), dict[Any, Any]({self.only: which == CHANGED})
        for title, names in GROUPS.items():
            classes = classes_of(texts, names)
            is_shown = which == "all" or any(differs(texts, base, name) for name in names)
            is_open = is_shown and (which == CHANGED or names[0] in query.get("open", "").split(","))
            unfolds: dict[str, Any] = {"open": True} if is_open else {}
            label = f"{title} · {classes}" if classes else title
            values[self.groups[title]] = gr.update(label=label, visible=is_shown, **unfolds)
            if is_shown and (is_open or title in OPEN):
                key = json.dumps([opened.draft.id, which, shape(texts, names)])
                digest = hashlib.sha256(key.encode()).hexdigest()[:12]
                values[self.states[title]] = f"{opened.draft.id} {which} {digest}"
        return values


def _unfold(query: Query, *, name: str, is_open: bool) -> Done:
    names = [one for one in query.get("open", "").split(",") if one not in ("", name)]
    return Done(query={"open": ",".join([*names, name] if is_open else names)})


class Panel(Part):
    """The draft as Python and JSON, its changes, its plan, and a text to import."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        code: dict[str, Any] = {"interactive": False}
        with gr.Tabs() as self.tabs:
            with gr.Tab("Python", id="python"):
                self.python = gr.Code(label="Python", language="python", max_lines=32, elem_id="new-python", **code)
                options: dict[str, Any] = {**code, "language": "shell", "lines": 1, "wrap_lines": True}
                self.command = gr.Code(label="In a terminal", elem_id="new-command", **options)
                self.no_command = gr.Markdown(visible=False)
            with gr.Tab("JSON", id="json"):
                self.json = gr.Code(label="JSON", language="json", max_lines=36, elem_id="new-json", **code)
            with gr.Tab("Changes", id="diff") as self.changes_tab:
                self.verdict = gr.Markdown()
                self.changes = gr.Dataframe(label="Changes", datatype=["markdown", "str", "str"], wrap=True)
            with gr.Tab("Plan", id="plan"):
                self.plan = PlanTab(site, view)
            with gr.Tab("Import", id="import"):
                paste(view, "Load", partial(drafting.loaded, site))
        view.tabs("tab", self.tabs)

    def fill(self, query: Query, opened: Opened) -> tuple[Values, bool]:
        """Shows a draft; also returns whether a child process is at work for it."""
        experiment, base = opened.experiment, opened.base
        plan, is_busy = self.plan.fill(query, experiment)
        values: dict[Any, Any] = {self.tabs: gr.update(selected=query.get("tab") or "python"), **plan}
        if experiment is None:
            values |= dict.fromkeys((self.python, self.command, self.json, self.changes), HIDDEN)
            fix = "Fix the problems above to see the changes."
            return {**values, self.no_command: if_any("Fix the problems above."), self.verdict: fix}, is_busy
        command = problem = ""
        try:
            command = drafting.command(self.site, opened.draft, experiment)
        except NnxdslError as error:
            job, problem = self.site.presets.job(opened.draft.recipe), plain(str(error))
            is_busy = is_busy or (job is not None and not job.is_over)
        differing, name = diff(base, experiment), plain(opened.draft.base_name)
        rows = [
            [f"[{plain(path)}](#f-{path})", render(get(base, path)), render(value)] for path, value in differing.items()
        ]
        is_same = base.id == experiment.id
        same = "Same run id: only placement or cadence differ." if is_same else "This is a different run id."
        count = pluralize(len(rows), "difference")
        return {
            **values,
            self.python: gr.update(value=to_python(experiment), visible=True),
            self.command: if_any(command),
            self.no_command: if_any(problem),
            self.json: gr.update(value=to_json(experiment), visible=True),
            self.verdict: f"{count} from {name}. {same}" if rows else f"Nothing differs from {name}.",
            self.changes: if_any(pd.DataFrame(rows, columns=["field", "was", "is"])),
            self.changes_tab: gr.update(label=f"Changes ({len(rows)})"),
        }, is_busy


class PlanTab(Part):
    """The plan of a draft, which is computed only for the tab that is shown."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        with gr.Row():
            choices = [(name or "this machine", name) for name in DEVICES]
            view.control("device", gr.Dropdown(choices, value="", label="Device", info="The plan is for its memory"))
            self.layout = gr.Button("Inspect the layout", link="/layout", size="sm", scale=0, min_width=160)
        self.text = gr.Markdown()
        self.report = PlanReport(
            site, view, lambda query: (drafting.require(site, query)[1], _device(query)), is_open=True
        )

    def fill(self, query: Query, experiment: Experiment | None) -> tuple[Values, bool]:
        """Shows the plan of an experiment; also returns whether it is being computed."""
        values: dict[Any, Any] = {self.report.group: HIDDEN, self.text: "Fix the problems above to see the plan."}
        if experiment is None or query.get("tab") != "plan":
            return values, False
        of = experiment, _device(query)
        job = plan_job(self.site, *of, start=False)
        if job is None or job.state == "cancelled":
            job = plan_job(self.site, *of, start=True)
        assert job is not None
        values[self.layout] = gr.update(link=link("/layout", draft=query.get("draft")))
        is_busy = not job.is_over
        if job.state == "done":
            texts = filter(None, [plan_texts.verdict(job.result), plan_texts.warnings(job.result)])
            report, is_compiling = self.report.fill(query, [job.result], of)
            return {**values, **report, self.text: "\n\n".join(texts)}, is_busy or is_compiling
        progress = f"Planning in a child process, {job.seconds:.0f} s so far ..."
        return {**values, self.text: progress if is_busy else f"**✘ {plain(job.error)}**"}, is_busy


def _about(site: Site, opened: Opened) -> str:
    if opened.experiment is None:
        note = f"**{pluralize(len(opened.problems), 'problem')} to fix first**"
    elif site.index.row(run := opened.experiment.id) is not None:
        note = f"this run exists already: {markdown_link(run, '/run', id=run)}"
    else:
        note = f"run id: {plain(run)}"
    return f"Copied from {plain(opened.draft.base_name)}; {note}"


def _problems(opened: Opened) -> str:
    lines = [
        f"- {f'[{plain(one.path)}](#f-{one.path}): ' if one.path else ''}{plain(one.message)}"
        for one in opened.problems[:MOST_PROBLEMS]
    ]
    return "\n".join([f"### {pluralize(len(opened.problems), 'problem')}", "", *lines]) if lines else ""


def _marks(opened: Opened) -> str:
    """Fields to mark, as JSON: those that differ from the base, or where it has none from defaults, and problems."""
    texts = opened.draft.texts
    base = form_texts.completed(shape(texts, tuple(declared(Experiment)))) | form_texts.texts_of(opened.base)
    changed = sorted({path.removesuffix(".type") for path, text in texts.items() if base.get(path) != text})
    return json.dumps({"changed": changed, "problems": {one.path: one.message for one in opened.problems}})


def _device(query: Query) -> str:
    """Device of the query; `NO_DEVICE` for this machine's."""
    return query["device"] if query.get("device") in DEVICES[1:] else NO_DEVICE
