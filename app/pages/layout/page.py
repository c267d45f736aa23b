"""The Layout page: sharding of every array on one or two meshes, memory per device, and the applied rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.sharding import hardware
from nnxdsl.terminal.plan_format import format_mesh

from ...components.device_grid import drawing
from ...components.paste import paste
from ...markup import link, plain
from ...page import Page, Part
from ...state import Site
from ...store.experiments import from_text
from ...view import Done, Query, Values, View, if_any, is_narrow
from ..demo import beginnings, choices
from ..new import form_texts
from . import arrays as layout_arrays
from . import plan_texts, request
from .report import Chosen, PlanReport, table

MESHES = ("data:1", "fsdp:8", "fsdp:4,tensor:2", "data:2,fsdp:8", "fsdp:16,tensor:8", "fsdp:64,tensor:4")
MEMORIES = ("16", "24", "40", "48", "80", "141")
ABOUT = (
    "Shows whether an experiment fits on given devices, what uses their memory, and the rule of each sharding. "
    "The devices need not be present: nothing is trained."
)
AXES = "If not the experiment's. Axes: stage, data, fsdp, expert, context, tensor, slices"
RULES = "The first applicable rule of a dimension wins. One per line: embed: fsdp, mlp: tensor+fsdp, vocab: -"
ARRAY_RULES = "Applied before all others: *.mlp.down.kernel | mlp: tensor, embed: -"
MODEL = f"A directory of the project with a config.json; without an experiment: {request.EXAMPLE}"
WHY_WIDTHS = ["8%", "17%", "9%", "22%", "17%", "27%"]
NARROW_WIDTHS = [50, 130, 60, 150, 120, 220]  # column widths of the rules of an array, on wide and narrow windows
HIDDEN: dict[str, Any] = gr.update(visible=False)


class Layout(Page):
    """The choice of an experiment and meshes, whether it fits on them, and how its arrays lie there."""

    name, path, title = "layout", "/layout", "Layout"

    def build(self) -> None:
        self.timer = gr.Timer(1, active=False)
        gr.Markdown("# Layout")
        self.choice, self.verdicts = Choice(self.site, self.view), Verdicts(self.site, self.view)
        self.report = PlanReport(self.site, self.view, self._first)
        self.arrays, self.selected = Arrays(self.site, self.view), SelectedArray()

    def fill(self, query: Query) -> Values:
        """Shows the plans of the query, which are started; the timer is active while a child process works for it."""
        shown = request.laid_out(self.site, query)
        report, is_compiling = {self.report.group: HIDDEN}, False
        if shown.plans:
            first = shown.layouts[0]
            report, is_compiling = self.report.fill(query, shown.plans, (first.experiment, first.device))
        is_planning = shown.is_reading or any(one.job is not None and not one.job.is_over for one in shown.layouts)
        sections = (self.choice, self.verdicts, self.arrays, self.selected)
        filled = {component: value for section in sections for component, value in section.fill(shown).items()}
        return {**filled, **report, self.timer: gr.update(active=is_planning or is_compiling)}

    def _first(self, query: Query) -> Chosen:
        first = request.first_layout(self.site, query)
        return first.experiment, first.device


class Choice(Part):
    """The choice of an experiment, a device, meshes and rules."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        devices = [
            (f"{entry.description}{f', {entry.memory / 2**30:.0f} GiB' if entry.memory else ''}", name)
            for name, entry in hardware.DEVICES.items()
        ]
        devices.append(("no device (no memory check)", request.NO_DEVICE))

        def free(name: str, offered: Sequence[str], label: str, info: str) -> gr.Dropdown:
            chooser = gr.Dropdown(list(offered), value=None, label=label, info=info, allow_custom_value=True)
            return view.control(name, chooser)

        with gr.Row():
            self.of = gr.Dropdown([], label="Experiment", info="A recipe, a run or a draft", min_width=240)
            self.model = free("model", [], "Other model", MODEL)
        with gr.Row():
            self.device = gr.Dropdown(devices, label="Device", info="It need not be present")
            view.control("device", self.device, request.DEVICE)
            self.memory = free("memory", MEMORIES, "Memory per device (GiB)", "Instead of the device's own")
            self.mesh = free("mesh", MESHES, "Mesh", AXES)
            self.mesh2 = free("mesh2", MESHES, "Compare with mesh", "A second one, such as fsdp:4,tensor:2")
        with gr.Accordion("Custom rules", open=False) as self.editor:
            self.rules = gr.Textbox(label="Rules", info=RULES, lines=5)
            self.array_rules = gr.Textbox(label="Rules for arrays with matching paths", info=ARRAY_RULES, lines=3)
            view.button("Apply rules", self._apply_rules, [self.rules, self.array_rules], size="sm")
        if not site.settings.read_only:
            with gr.Accordion("Python or JSON", open=False):
                paste(view, "Show its layout", self._load)
        self.notes = gr.Markdown()
        view.on(self.of.input, _choose, [self.of])

    def fill(self, shown: request.Source) -> Values:
        query = shown.query
        kind, other_memory = request.device_parts(query)
        defaults = request.own_rules(shown.experiment) if shown.experiment else ("", "")
        rules = (query.get("rules", defaults[0]), query.get("arrays", defaults[1]))
        texts = ["" if text == request.NONE else text for text in rules]
        count = sum(len(text.splitlines()) for text in texts)
        mine = (shown.display_name if shown.kind else "none", f"{shown.kind}:{shown.name}")
        is_empty = not (shown.kind or query.get("model") or shown.problem)
        return {
            self.of: gr.update(choices=list(dict.fromkeys([mine, *choices(self.site)])), value=mine[1]),
            self.model: gr.update(
                choices=request.models_in(self.site.settings.project), value=query.get("model") or None
            ),
            self.device: kind if kind in (request.NO_DEVICE, *hardware.DEVICES) else None,
            self.memory: other_memory or None,
            self.mesh: query.get("mesh") or None,
            self.mesh2: query.get("mesh2") or None,
            self.editor: gr.update(label=f"Custom rules ({count})" if count else "Custom rules"),
            self.rules: texts[0],
            self.array_rules: texts[1],
            self.notes: if_any(f"{ABOUT}\n\n{beginnings(self.site, '/layout', 'exp', 'run')}" if is_empty else ""),
        }

    def _apply_rules(self, query: Query, *texts: str) -> Done:
        """Writes rules into the query, unless they are the experiment's own."""
        defaults = request.own_rules(request.chosen(self.site, query))
        request.rules_of(texts[0])
        request.array_rules_of(texts[1])
        written = [
            "" if text.strip() == mine else text.strip() or request.NONE
            for text, mine in zip(texts, defaults, strict=True)
        ]
        return Done(query={"rules": written[0], "arrays": written[1]})

    def _load(self, query: Query, text: str) -> Done | None:
        experiment = from_text(text)
        draft = self.site.drafts.new(form_texts.texts_of(experiment), to_dict(experiment), "pasted text")
        return _choose(query, f"draft:{draft.id}")


def _choose(query: Query, chosen: str | None) -> Done | None:
    """Opens another experiment, with its own mesh and rules."""
    of, (kind, _, name) = request.Source.named(query), (chosen or "").partition(":")
    if (of.kind, of.name) == (kind, name):  # a dropdown tells its value also when the focus only passes through it
        return None
    return Done(query={**dict.fromkeys((*request.SOURCES, "mesh", "rules", "arrays", "array"), ""), kind: name})


class Verdicts(Part):
    """Whether it fits on each mesh, or how far its plan is."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        self.problem = gr.Textbox(label="Problem", interactive=False, lines=1, max_lines=30, visible=False)
        with gr.Row():
            self.sides = [gr.Markdown(visible=False, container=True, min_width=300) for _ in range(2)]
        with gr.Row():
            self.again = view.button("Try again", self._restart, size="sm", visible=False)
            self.cancel = view.button("Cancel", self._cancel, size="sm", visible=False)

    def fill(self, shown: request.Source) -> Values:
        jobs = [one.job for one in shown.layouts if one.job is not None]
        texts = [_side(one) for one in shown.layouts]
        texts = [f"Reading {plain(shown.display_name)} ..."] if shown.is_reading else texts
        is_broken = bool(shown.problem) and shown.kind == "exp" and shown.experiment is None
        return {
            self.problem: if_any("\n".join(filter(None, [shown.problem, *(job.error for job in jobs)]))),
            **{side: if_any(text) for side, text in zip(self.sides, [*texts, "", ""][:2], strict=True)},
            self.again: gr.update(visible=is_broken or any(job.state in ("failed", "cancelled") for job in jobs)),
            self.cancel: gr.update(visible=any(not job.is_over for job in jobs)),
        }

    def _layouts(self, query: Query) -> list[request.Layout]:
        return request.layouts(self.site, query, request.source(self.site, query).experiment)

    def _restart(self, query: Query) -> None:  # reading a recipe, and plans
        self.site.presets.job(query.get("exp", ""), again=True)
        for one in self._layouts(query):
            request.plan_job(self.site, one.experiment, one.device, start=True)

    def _cancel(self, query: Query) -> Done:
        for one in self._layouts(query):
            if one.job is not None:
                self.site.jobs.cancel(one.job.key)
        return Done("Ended.")


def _side(layout: request.Layout) -> str:
    if layout.plan is not None:
        return plan_texts.summary(layout.plan)
    job = layout.job
    title = f"### {format_mesh(layout.experiment.mesh.sizes)}"
    if job is None or job.is_over:
        return f"{title}\n\n**✘ The plan {'failed' if job and job.state == 'failed' else 'was cancelled'}.**"
    state = "Waiting for another child process" if job.state == "waiting" else "Planning in a child process"
    return f"{title}\n\n{state}, {job.seconds:.0f} s so far ..."


class Arrays(Part):
    """The table of all arrays, with its filters."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        parts = [("all parts", ""), *((part, part) for part in layout_arrays.PARTS)]
        sorts = [(text, name) for name, text in layout_arrays.SORTS.items()]
        with gr.Column(visible=False) as self.group:
            gr.Markdown("## Sharding of each array")
            with gr.Row():
                search = gr.Textbox(label="Arrays with", placeholder="kernel, float32, tensor ...", max_lines=1)
                self.search = view.control("q", search)
                self.part = view.control("part", gr.Dropdown(parts, value="", label="Part"))
                self.order = view.control("sort", gr.Dropdown(sorts, value="", label="Order"))
            with gr.Row():
                self.count = gr.Markdown()
                self.save = gr.Button("Download CSV", link="#", size="sm", scale=0, min_width=160)
            label = "Arrays; select one to see where its blocks are"
            self.table = gr.Dataframe(label=label, interactive=False, max_height=420)
        view.on(self.table.select, self._select, has_event=True)

    def fill(self, shown: request.Source) -> Values:
        query = shown.query
        if not shown.plans:
            return {self.group: HIDDEN}
        count, rows = layout_arrays.table(shown.plans[0], next(iter(shown.plans[1:]), None), query)
        parameters = {name: value for name, value in query.items() if not name.startswith("_")}
        return {
            self.group: gr.update(visible=True),
            self.count: count,
            self.table: if_any(rows, pinned_columns=0 if is_narrow(query) else 2),
            self.save: gr.update(link=link("/download", layout="arrays.csv", **parameters)),
        }

    def _select(self, query: Query, event: gr.SelectData) -> Done | None:
        plan, number = request.first_layout(self.site, query).plan, str(event.row_value[0])
        array = layout_arrays.array_of_row(plan, query, int(number)) if plan and number.isdecimal() else None
        return Done(query={"array": layout_arrays.name_of(array)}) if array is not None else None


class SelectedArray(Part):
    """The drawing of one array on each mesh, and why its dimensions are sharded as they are."""

    def __init__(self) -> None:
        self.sides: list[tuple[gr.Column, gr.Markdown, gr.HTML, gr.Dataframe]] = []
        with gr.Column(visible=False) as self.group:
            self.heading = gr.Markdown()
            with gr.Row():
                for _ in range(2):
                    with gr.Column(visible=False) as column:
                        rules = "Why each dimension has its mesh axes"
                        self.sides.append((column, gr.Markdown(), gr.HTML("", apply_default_css=False), table(rules)))

    def fill(self, shown: request.Source) -> Values:
        """Shows the array of the query, or else the largest one."""
        array = layout_arrays.selected(shown.plans[0]["arrays"], shown.query) if shown.plans else None
        if array is None:
            return {self.group: HIDDEN}
        values: dict[Any, Any] = {self.group: gr.update(visible=True), self.sides[1][0]: HIDDEN}
        values |= {self.heading: f"## {plain(array['path'])} ({plain(array['part'])})"}
        widths = NARROW_WIDTHS if is_narrow(shown.query) else WHY_WIDTHS
        for (column, mesh, grid, rules), plan in zip(self.sides, shown.plans, strict=False):
            same = [one for one in plan["arrays"] if layout_arrays.name_of(one) == layout_arrays.name_of(array)]
            absent = "" if same else "\n\nThis array does not exist on this mesh."
            values[column] = gr.update(visible=True)
            values[mesh] = f"### {format_mesh(plan['mesh'])}{absent}"
            values[grid] = drawing(same[0], plan["mesh"]) if same else ""
            values[rules] = if_any(layout_arrays.why(same[0]) if same else pd.DataFrame(), column_widths=widths)
        return values
