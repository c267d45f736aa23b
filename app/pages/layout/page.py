"""The Layout page: sharding of every array on one or two meshes, memory per device, and the applied rules.

Each section is a function that adds its components and returns them, with a function that fills them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.sharding import hardware
from nnxdsl.terminal.plan_format import format_mesh

from ...components.device_grid import device_grid, drawing
from ...components.paste import paste
from ...html import link
from ...markdown import plain
from ...page import Page
from ...state import Site
from ...store.experiments import from_text
from ...view import Done, Query, Values, View, if_any, is_narrow
from ..demo import beginnings, choices
from ..new import form_texts
from . import arrays as layout_arrays
from . import plan_texts, request
from .report import Chosen, plan_report, table

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
NARROW_WIDTHS = [50, 130, 60, 150, 120, 220]
"""Column widths of the rules of an array, on wide and narrow windows."""
HIDDEN: dict[str, Any] = gr.update(visible=False)


Section = tuple[Sequence[Any], Callable[[request.Source], Values]]


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    timer = gr.Timer(1, active=False)
    gr.Markdown("# Layout")
    sections = [_choice(site, view), _verdicts(site, view), _report(site, view, timer)]
    sections += [_arrays(site, view), _selected_array()]

    def values(query: Query) -> Values:
        shown = request.laid_out(site, query)
        return {component: value for _, fill in sections for component, value in fill(shown).items()}

    view.shows(values, [component for components, _ in sections for component in components], every=timer)


def _choice(site: Site, view: View) -> Section:
    """Adds the choice of an experiment, a device, meshes and rules."""
    devices = [
        (f"{entry.description}{f', {entry.memory / 2**30:.0f} GiB' if entry.memory else ''}", name)
        for name, entry in hardware.DEVICES.items()
    ]
    devices.append(("no device (no memory check)", request.NO_DEVICE))

    def free(name: str, offered: Sequence[str], label: str, info: str) -> gr.Dropdown:
        chooser = gr.Dropdown(list(offered), value=None, label=label, info=info, allow_custom_value=True)
        return view.control(name, chooser)

    with gr.Row():
        of = gr.Dropdown([], label="Experiment", info="A recipe, a run or a draft", min_width=240)
        model = free("model", [], "Other model", MODEL)
    with gr.Row():
        device = gr.Dropdown(devices, label="Device", info="It need not be present")
        view.control("device", device, request.DEVICE)
        memory = free("memory", MEMORIES, "Memory per device (GiB)", "Instead of the device's own")
        mesh = free("mesh", MESHES, "Mesh", AXES)
        mesh2 = free("mesh2", MESHES, "Compare with mesh", "A second one, such as fsdp:4,tensor:2")
    with gr.Accordion("Custom rules", open=False) as editor:
        rules = gr.Textbox(label="Rules", info=RULES, lines=5)
        array_rules = gr.Textbox(label="Rules for arrays with matching paths", info=ARRAY_RULES, lines=3)
        apply = gr.Button("Apply rules", size="sm", scale=0)
    if not site.settings.read_only:
        with gr.Accordion("Python or JSON", open=False):
            paste(view, "Show its layout", lambda query, text: _loaded(site, query, text))
    notes = gr.Markdown()
    view.does(of.input, lambda query, client, chosen: _chosen(query, chosen), [of])
    view.does(apply.click, lambda query, client, *texts: _ruled(site, query, *texts), [rules, array_rules])

    def fill(shown: request.Source) -> Values:
        query = shown.query
        kind, other_memory = request.device_parts(query)
        own = request.own_rules(shown.experiment) if shown.experiment else ("", "")
        given = (query.get("rules", own[0]), query.get("arrays", own[1]))
        texts = ["" if text == request.NONE else text for text in given]
        count = sum(len(text.splitlines()) for text in texts)
        mine = (shown.words if shown.kind else "none", f"{shown.kind}:{shown.name}")
        is_empty = not (shown.kind or query.get("model") or shown.problem)
        return {
            of: gr.update(choices=list(dict.fromkeys([mine, *choices(site)])), value=mine[1]),
            model: gr.update(choices=request.models_in(site.settings.project), value=query.get("model") or None),
            device: kind if kind in (request.NO_DEVICE, *hardware.DEVICES) else None,
            memory: other_memory or None,
            mesh: query.get("mesh") or None,
            mesh2: query.get("mesh2") or None,
            editor: gr.update(label=f"Custom rules ({count})" if count else "Custom rules"),
            rules: texts[0],
            array_rules: texts[1],
            notes: if_any(f"{ABOUT}\n\n{beginnings(site, '/layout', 'exp', 'run')}" if is_empty else ""),
        }

    return [of, model, device, memory, mesh, mesh2, editor, rules, array_rules, notes], fill


def _chosen(query: Query, chosen: str | None) -> Done | None:
    """Opens another experiment, with its own mesh and rules."""
    of, (kind, _, name) = request.Source.named(query), (chosen or "").partition(":")
    if (of.kind, of.name) == (kind, name):  # a dropdown tells its value also when the focus only passes through it
        return None
    return Done(query={**dict.fromkeys((*request.SOURCES, "mesh", "rules", "arrays", "array"), ""), kind: name})


def _ruled(site: Site, query: Query, *texts: str) -> Done:
    """Writes rules into the query, unless they are the experiment's own."""
    own = request.own_rules(request.chosen(site, query))
    request.rules_of(texts[0])
    request.array_rules_of(texts[1])
    written = [
        "" if text.strip() == mine else text.strip() or request.NONE for text, mine in zip(texts, own, strict=True)
    ]
    return Done(query={"rules": written[0], "arrays": written[1]})


def _loaded(site: Site, query: Query, text: str) -> Done | None:
    """Creates a draft from a pasted text."""
    experiment = from_text(text)
    draft = site.drafts.new(form_texts.texts_of(experiment), to_dict(experiment), "pasted text")
    return _chosen(query, f"draft:{draft.id}")


def _verdicts(site: Site, view: View) -> Section:
    """Adds whether it fits on each mesh, or how far its plan is."""
    problem = gr.Textbox(label="Problem", interactive=False, lines=1, max_lines=30, visible=False)
    with gr.Row():
        sides = [gr.Markdown(visible=False, container=True, min_width=300) for _ in range(2)]
    with gr.Row():
        again = gr.Button("Try again", size="sm", scale=0, visible=False)
        cancel = gr.Button("Cancel", size="sm", scale=0, visible=False)

    def restart(query: Query, _client: str) -> None:  # reading a recipe, and plans
        site.presets.job(query.get("exp", ""), again=True)
        for one in request.layouts(site, query, request.source(site, query).experiment):
            request.plan_job(site, one.experiment, one.device, start=True)

    def end(query: Query, _client: str) -> Done:
        for one in request.layouts(site, query, request.source(site, query).experiment):
            if one.job is not None:
                site.jobs.cancel(one.job.key)
        return Done("Ended.")

    view.does(again.click, restart)
    view.does(cancel.click, end)

    def fill(shown: request.Source) -> Values:
        jobs = [one.job for one in shown.layouts if one.job is not None]
        texts = [f"Reading {plain(shown.words)} ..."] if shown.is_reading else [_side(one) for one in shown.layouts]
        is_broken = bool(shown.problem) and shown.kind == "exp" and shown.experiment is None
        return {
            problem: if_any("\n".join(filter(None, [shown.problem, *(job.error for job in jobs)]))),
            **{side: if_any(text) for side, text in zip(sides, [*texts, "", ""][:2], strict=True)},
            again: gr.update(visible=is_broken or any(job.state in ("failed", "cancelled") for job in jobs)),
            cancel: gr.update(visible=any(not job.is_over for job in jobs)),
        }

    return [problem, *sides, again, cancel], fill


def _side(layout: request.Layout) -> str:
    if layout.plan is not None:
        return plan_texts.summary(layout.plan)
    job = layout.job
    title = f"### {format_mesh(layout.experiment.mesh.sizes)}"
    if job is None or job.is_over:
        return f"{title}\n\n**✘ The plan {'failed' if job and job.state == 'failed' else 'was cancelled'}.**"
    state = "Waiting for another child process" if job.state == "waiting" else "Planning in a child process"
    return f"{title}\n\n{state}, {job.seconds:.0f} s so far ..."


def _report(site: Site, view: View, timer: gr.Timer) -> Section:
    """Adds what the plans say; the timer is active while a child process works for the page."""

    def chosen(query: Query) -> Chosen:
        first = request.first_layout(site, query)
        return first.experiment, first.device

    components, fill_report = plan_report(site, view, chosen)

    def fill(shown: request.Source) -> Values:
        values: Values = {components[0]: HIDDEN}
        is_busy = shown.is_reading or any(one.job is not None and not one.job.is_over for one in shown.layouts)
        if shown.plans:
            first = shown.layouts[0]
            values, is_compiling = fill_report(shown.query, shown.plans, (first.experiment, first.device))
            is_busy = is_busy or is_compiling
        return {**values, timer: gr.update(active=is_busy)}

    return [*components, timer], fill


def _arrays(site: Site, view: View) -> Section:
    """Adds the table of all arrays, with its filters."""
    parts = [("all parts", ""), *((part, part) for part in layout_arrays.PARTS)]
    sorts = [(words, name) for name, words in layout_arrays.SORTS.items()]
    with gr.Column(visible=False) as group:
        gr.Markdown("## Sharding of each array")
        with gr.Row():
            search = gr.Textbox(label="Arrays with", placeholder="kernel, float32, tensor ...", max_lines=1)
            words = view.control("q", search)
            part = view.control("part", gr.Dropdown(parts, value="", label="Part"))
            order = view.control("sort", gr.Dropdown(sorts, value="", label="Order"))
        with gr.Row():
            count = gr.Markdown()
            save = gr.Button("Download CSV", link="#", size="sm", scale=0, min_width=160)
        found = gr.Dataframe(label="Arrays; select one to see where its blocks are", interactive=False, max_height=420)

    def select(query: Query, _client: str, event: gr.SelectData) -> Done | None:
        plan, number = request.first_layout(site, query).plan, str(event.row_value[0])
        array = layout_arrays.array_of_row(plan, query, int(number)) if plan and number.isdecimal() else None
        return Done(query={"array": layout_arrays.name_of(array)}) if array is not None else None

    view.does(found.select, select, has_event=True)

    def fill(shown: request.Source) -> Values:
        query = shown.query
        filters = {words: query.get("q", ""), part: query.get("part", ""), order: query.get("sort", "")}
        if not shown.plans:
            return {**filters, group: HIDDEN}
        text, rows = layout_arrays.table(shown.plans[0], next(iter(shown.plans[1:]), None), query)
        own = {name: value for name, value in query.items() if not name.startswith("_")}
        return {
            **filters,
            group: gr.update(visible=True),
            count: text,
            found: if_any(rows, pinned_columns=0 if is_narrow(query) else 2),
            save: gr.update(link=link("/download", layout="arrays.csv", **own)),
        }

    return [group, words, part, order, count, found, save], fill


def _selected_array() -> Section:
    """Adds the drawing of one array on each mesh, and why its dimensions are sharded as they are."""
    sides: list[tuple[gr.Column, gr.Markdown, gr.HTML, gr.Dataframe]] = []
    with gr.Column(visible=False) as group:
        title = gr.Markdown()
        with gr.Row():
            for _ in range(2):
                with gr.Column(visible=False) as column:
                    sides.append((column, gr.Markdown(), device_grid(), table("Why each dimension has its mesh axes")))

    def fill(shown: request.Source) -> Values:
        array = layout_arrays.selected(shown.plans[0]["arrays"], shown.query) if shown.plans else None
        if array is None:
            return {group: HIDDEN}
        values: dict[Any, Any] = {group: gr.update(visible=True), sides[1][0]: HIDDEN}
        values |= {title: f"## {plain(array['path'])} ({plain(array['part'])})"}
        widths = NARROW_WIDTHS if is_narrow(shown.query) else WHY_WIDTHS
        for (column, mesh, grid, rules), plan in zip(sides, shown.plans, strict=False):
            found = [one for one in plan["arrays"] if layout_arrays.name_of(one) == layout_arrays.name_of(array)]
            absent = "" if found else "\n\nThis array does not exist on this mesh."
            values[column] = gr.update(visible=True)
            values[mesh] = f"### {format_mesh(plan['mesh'])}{absent}"
            values[grid] = drawing(found[0], plan["mesh"]) if found else ""
            values[rules] = if_any(layout_arrays.why(found[0]) if found else pd.DataFrame(), column_widths=widths)
        return values

    return [group, title, *(component for side in sides for component in side)], fill


PAGE = Page(name="layout", path="/layout", title="Layout", build=build)
