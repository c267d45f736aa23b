"""The Layout page: sharding of every array on one or two meshes, memory per device, and the applied rules.

Each section is a function that adds its components and returns them, with a function that fills them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import gradio as gr
import pandas as pd

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.sharding import hardware
from nnxdsl.terminal.plan_format import format_mesh

from ...components.device_grid import device_grid, drawing
from ...html import link
from ...markdown import link as markdown_link
from ...markdown import plain
from ...page import Page
from ...processes.jobs import Job
from ...state import Site
from ...store.experiments import from_text
from ...view import Done, Query, Values, View, is_narrow
from ..new import form_texts
from . import arrays as layout_arrays
from . import plan_texts
from .memory import memory_bars, memory_parts
from .request import (
    DEVICE,
    EXAMPLE,
    NO_DEVICE,
    NONE,
    SOURCES,
    Layout,
    Source,
    array_rules_of,
    array_rules_text,
    device_parts,
    layouts,
    models_in,
    named,
    plan_job,
    rules_of,
    rules_text,
    source,
    why_not_compiled,
)

MESHES = ("data:1", "fsdp:8", "fsdp:4,tensor:2", "data:2,fsdp:8", "fsdp:16,tensor:8", "fsdp:64,tensor:4")
MEMORIES = ("16", "24", "40", "48", "80", "141")
ABOUT = (
    "Shows whether an experiment fits on given devices, what uses their memory, and the rule of each sharding. "
    "The devices need not be present: nothing is trained."
)
AXES = "If not the experiment's. Axes: stage, data, fsdp, expert, context, tensor, slices"
RULES = "The first applicable rule of a dimension wins. One per line: embed: fsdp, mlp: tensor+fsdp, vocab: -"
ARRAY_RULES = "Applied before all others: *.mlp.down.kernel | mlp: tensor, embed: -"
COMPILES = "XLA compiles the step ahead of time for these devices, which need not be present. This can take minutes."
RUNS_SHOWN = 60
WHY_WIDTHS = ["8%", "17%", "9%", "22%", "17%", "27%"]
NARROW_WIDTHS = [50, 130, 60, 150, 120, 220]
"""Column widths of the rules of an array, on wide and narrow windows."""


@attrs.frozen
class Shown:
    """What the page shows.

    Attributes:
        query: Query of the URL.
        of: The experiment; without it, if it has not been read or cannot be.
        layouts: The layout on the mesh, and on the second one.
        problem: Why there are none; empty if there are.
    """

    query: Query
    of: Source
    layouts: Sequence[Layout] = ()
    problem: str = ""

    @property
    def is_reading(self) -> bool:
        """Whether a child process still reads the experiment."""
        return bool(self.of.kind) and self.of.experiment is None and not self.problem

    @property
    def plans(self) -> list[layout_arrays.Plan]:
        """The plans that are computed, if that of the first mesh is among them."""
        plans = [one.plan for one in self.layouts]
        return [plan for plan in plans if plan is not None] if plans and plans[0] is not None else []


Updates = dict[Any, Any]
"""New values by component."""
Section = tuple[Sequence[Any], Callable[[Shown], Updates]]


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Layout")
    sections = [_choice(site, view), _verdicts(site, view), _memory(), _compiler(site, view), _arrays(site, view)]
    sections += [_selected_array(), _timer(site)]

    def values(query: Query) -> Values:
        shown = _shown(site, query)
        return {component: value for _, fill in sections for component, value in fill(shown).items()}

    timer = sections[-1][0][0]
    view.shows(values, [component for components, _ in sections for component in components], every=timer)


def _shown(site: Site, query: Query) -> Shown:
    of = named(query)
    try:
        of = source(site, query)
        return Shown(query, of, layouts(site, query, of, start=True))
    except NnxdslError as error:
        return Shown(query, of, problem=str(error))


# The choice


def _choice(site: Site, view: View) -> Section:
    devices = [(_device_name(entry), name) for name, entry in hardware.DEVICES.items()]
    devices.append(("no device (no memory check)", NO_DEVICE))
    with gr.Row():
        of = gr.Dropdown([], label="Experiment", info="A recipe, a run or a draft", min_width=240)
        model = view.control(
            "model",
            gr.Dropdown(
                [],
                label="Other model",
                info=f"A directory of the project with a config.json; without an experiment: {EXAMPLE}",
                allow_custom_value=True,
                min_width=240,
            ),
        )
    with gr.Row():
        device = view.control("device", gr.Dropdown(devices, label="Device", info="It need not be present"), DEVICE)
        memory = view.control("memory", _free("Memory per device (GiB)", "If not the catalogue's", MEMORIES))
        mesh = view.control("mesh", _free("Mesh", AXES, MESHES))
        mesh2 = view.control("mesh2", _free("Compare with mesh", "A second one, such as fsdp:4,tensor:2", MESHES))
    with gr.Accordion("Custom rules", open=False) as editor:
        rules = gr.Textbox(label="Rules", info=RULES, lines=5)
        array_rules = gr.Textbox(label="Rules for arrays with matching paths", info=ARRAY_RULES, lines=3)
        apply = gr.Button("Apply rules", size="sm", scale=0)
    if not site.settings.read_only:
        with gr.Accordion("Python or JSON", open=False):
            text = gr.Textbox(label="Experiment", info="As `nnxdsl show FILE --python` prints it, or JSON", lines=8)
            load = gr.Button("Show its layout", size="sm", scale=0)
        view.does(load.click, lambda query, client, text: _loaded(site, text), [text])
    notes = gr.Markdown()
    view.does(of.input, lambda query, client, chosen: _chosen(query, chosen), [of])
    view.does(apply.click, lambda query, client, *texts: _ruled(site, query, *texts), [rules, array_rules])

    def fill(shown: Shown) -> Updates:
        experiment, query = shown.of.experiment, shown.query
        kind, other_memory = device_parts(query)
        own = experiment.mesh if experiment else None
        texts = [
            _rules(query.get("rules"), rules_text(own.rules) if own else ""),
            _rules(query.get("arrays"), array_rules_text(own.array_rules) if own else ""),
        ]
        count = sum(len(text.splitlines()) for text in texts)
        return {
            of: gr.update(choices=_experiments(site, shown.of), value=f"{shown.of.kind}:{shown.of.name}"),
            model: gr.update(choices=models_in(site.settings.project), value=query.get("model") or None),
            device: kind if kind in (NO_DEVICE, *hardware.DEVICES) else None,
            memory: other_memory or None,
            mesh: query.get("mesh") or None,
            mesh2: query.get("mesh2") or None,
            editor: gr.update(label=f"Custom rules ({count})" if count else "Custom rules"),
            rules: texts[0],
            array_rules: texts[1],
            notes: gr.update(value=_empty(site), visible=not (shown.of.kind or query.get("model") or shown.problem)),
        }

    return [of, model, device, memory, mesh, mesh2, editor, rules, array_rules, notes], fill


def _free(label: str, info: str, choices: Sequence[str]) -> gr.Dropdown:
    return gr.Dropdown(list(choices), value=None, label=label, info=info, allow_custom_value=True)


def _device_name(entry: hardware.Device) -> str:
    return f"{entry.description}{f', {entry.memory / 2**30:.0f} GiB' if entry.memory else ''}"


def _rules(given: str | None, own: str) -> str:
    """Rules of the query, or the experiment's own."""
    return own if given is None else "" if given == NONE else given


def _experiments(site: Site, of: Source) -> list[tuple[str, str]]:
    names = {f"{of.kind}:{of.name}": of.words if of.kind else "none"}
    names |= {f"exp:{name}": f"experiments/{name}.py" for name in site.presets.names()}
    names |= {f"run:{row.id}": f"run {row.id}" for row in site.index.rows()[:RUNS_SHOWN]}
    return [(words, name) for name, words in names.items()]


def _empty(site: Site) -> str:
    """What the page is for, and links to its first pictures."""
    parts = [ABOUT]
    if recipes := site.presets.names():
        parts.append("Recipes: " + ", ".join(markdown_link(name, link("/layout", exp=name)) for name in recipes))
    else:
        demo = markdown_link("Start with the demo", link("/new", demo=1))
        parts.append(f"There is no recipe in {plain(str(site.presets.place))}. {demo}.")
    if rows := site.index.rows()[:8]:
        parts.append("Runs: " + ", ".join(markdown_link(row.id, link("/layout", run=row.id)) for row in rows))
    return "\n\n".join(parts)


def _chosen(query: Query, chosen: str | None) -> Done | None:
    """Opens the chosen experiment; a dropdown tells its value also when the focus only passes through it."""
    of = named(query)
    return None if chosen == f"{of.kind}:{of.name}" else _other_experiment(chosen)


def _other_experiment(chosen: str | None) -> Done:
    """Another experiment has its own mesh and rules."""
    kind, _, name = (chosen or "").partition(":")
    named = {one: name if one == kind else "" for one in SOURCES}
    return Done(query={**named, "mesh": "", "rules": "", "arrays": "", "array": ""})


def _ruled(site: Site, query: Query, *texts: str) -> Done:
    """Writes rules into the query, unless they are the experiment's own.

    Raises:
        SpecError: an invalid line.
    """
    experiment = source(site, query).experiment
    if experiment is None:
        raise RunError("Choose an experiment first: a recipe, a run or a draft.")
    rules_of(texts[0])
    array_rules_of(texts[1])
    own = rules_text(experiment.mesh.rules), array_rules_text(experiment.mesh.array_rules)
    written = ["" if text.strip() == mine else text.strip() or NONE for text, mine in zip(texts, own, strict=True)]
    return Done(query={"rules": written[0], "arrays": written[1]})


def _loaded(site: Site, text: str) -> Done:
    """Creates a draft from a pasted text.

    Raises:
        SpecError: all problems, with their positions.
    """
    experiment = from_text(text)
    draft = site.drafts.new(form_texts.texts_of(experiment), to_dict(experiment), "pasted text")
    return _other_experiment(f"draft:{draft.id}")


# Whether it fits


def _verdicts(site: Site, view: View) -> Section:
    problem = gr.Textbox(label="Problem", interactive=False, lines=1, max_lines=30, visible=False)
    with gr.Row():
        sides = [gr.Markdown(visible=False, container=True, min_width=300) for _ in range(2)]
    with gr.Row():
        again = gr.Button("Try again", size="sm", scale=0, visible=False)
        cancel = gr.Button("Cancel", size="sm", scale=0, visible=False)
    view.does(again.click, lambda query, client: _again(site, query))
    view.does(cancel.click, lambda query, client: _cancel(site, query))

    def fill(shown: Shown) -> Updates:
        jobs = [one.job for one in shown.layouts if one.job is not None]
        errors = [shown.problem, *(job.error for job in jobs)]
        texts = [_side(one) for one in shown.layouts]
        if shown.is_reading:
            texts = [f"Reading {plain(shown.of.words)} ..."]
        return {
            problem: gr.update(value="\n".join(filter(None, errors)), visible=any(errors)),
            **{
                side: gr.update(value=text, visible=bool(text))
                for side, text in zip(sides, [*texts, "", ""][:2], strict=True)
            },
            again: gr.update(
                visible=any(job.state in ("failed", "cancelled") for job in jobs)
                or bool(shown.problem and shown.of.kind == "exp" and shown.of.experiment is None)
            ),
            cancel: gr.update(visible=any(not job.is_over for job in jobs)),
        }

    return [problem, *sides, again, cancel], fill


def _side(layout: Layout) -> str:
    """The verdict on a mesh, or how far its plan is."""
    if layout.plan is not None:
        return plan_texts.summary(layout.plan)
    job = layout.job
    title = f"### {format_mesh(layout.experiment.mesh.sizes)}"
    if job is None or job.is_over:
        return f"{title}\n\n**✘ The plan {'failed' if job and job.state == 'failed' else 'was cancelled'}.**"
    state = "Waiting for another child process" if job.state == "waiting" else "Planning in a child process"
    return f"{title}\n\n{state}, {job.seconds:.0f} s so far ..."


def _again(site: Site, query: Query) -> None:
    """Restarts what failed or was cancelled: reading a recipe, and plans."""
    recipe = site.presets.job(query.get("exp", ""))
    if recipe is not None and recipe.is_over and recipe.state != "done":
        site.presets.job(query["exp"], again=True)
    for one in layouts(site, query, source(site, query), start=False):
        plan_job(site, one.experiment, one.device, start=True)


def _cancel(site: Site, query: Query) -> Done:
    """Cancels the running jobs."""
    for one in layouts(site, query, source(site, query), start=False):
        for jobs, compiled in ((site.jobs, False), (site.compiles, True)):
            job = plan_job(site, one.experiment, one.device, start=False, compiled=compiled)
            if job is not None:
                jobs.cancel(job.key)
    return Done("Ended.")


# What uses the memory


def _memory() -> Section:
    with gr.Column(visible=False) as group:
        gr.Markdown("## Memory of a device")
        plot = gr.Plot(show_label=False)
        parts = gr.Dataframe(label="Parts, and how they are computed", **_TABLE)
        with gr.Accordion("Details of the run", open=False):
            facts = gr.Dataframe(label="Facts", **_TABLE)
        with gr.Accordion("Sharding rules, in order", open=False):
            rules = gr.Dataframe(label="The first applicable rule wins", **_TABLE)
        with gr.Accordion("Activations with logical axes", open=False):
            flows = gr.Dataframe(label="Of one micro-batch", **_TABLE)

    def fill(shown: Shown) -> Updates:
        if not shown.plans:
            return {group: gr.update(visible=False)}
        return {
            group: gr.update(visible=True),
            plot: memory_bars(shown.plans, is_narrow=is_narrow(shown.query)),
            parts: memory_parts(shown.plans),
            facts: plan_texts.facts(shown.plans),
            rules: plan_texts.rules(shown.plans),
            flows: plan_texts.activations(shown.plans),
        }

    return [group, plot, parts, facts, rules, flows], fill


_TABLE: dict[str, Any] = {"interactive": False, "wrap": True}


# The compiler's report


def _compiler(site: Site, view: View) -> Section:
    with gr.Column(visible=False) as group:
        gr.Markdown("## Compiler check")
        words = gr.Markdown()
        with gr.Row():
            verify = gr.Button("Verify by compiling", size="sm", scale=0, min_width=200, visible=False)
            cancel = gr.Button("Cancel compilation", size="sm", scale=0, min_width=200, visible=False)
        labels = (
            "XLA's figures for one device",
            "Collectives of one step",
            "Sharding of activations after compilation",
        )
        tables = [gr.Dataframe(label=label, visible=False, **_TABLE) for label in labels]
    if not site.settings.read_only:
        view.does(verify.click, lambda query, client: _verify(site, query))
    view.does(cancel.click, lambda query, client: _cancel(site, query))

    def fill(shown: Shown) -> Updates:
        if not shown.plans:
            return {group: gr.update(visible=False)}
        first = shown.layouts[0]
        job = _compile_job(site, first)
        why = why_not_compiled(first.experiment, first.device)
        reports = [pd.DataFrame()] * len(tables)
        if job is not None and job.state == "done":
            text, reports = plan_texts.compiled(job.result), list(plan_texts.compiled_tables(job.result))
        elif job is not None and not job.is_over:
            text = f"Compiling in a child process, {job.seconds:.0f} s so far ..."
        elif why is not None:
            text = plain(why)
        elif site.settings.read_only:
            text = "This app is read-only; use `nnxdsl plan --compile` in a terminal."
        else:
            text = COMPILES
            if job is not None:
                text = f"**✘ {plain(job.error or 'The compilation was cancelled.')}**\n\n{text}"
        is_done = job is not None and job.state == "done"
        is_running = job is not None and not job.is_over
        return {
            group: gr.update(visible=True),
            words: text,
            verify: gr.update(visible=not (is_done or is_running or why or site.settings.read_only)),
            cancel: gr.update(visible=is_running),
            **{
                table: gr.update(value=report, visible=not report.empty)
                for table, report in zip(tables, reports, strict=True)
            },
        }

    return [group, words, verify, cancel, *tables], fill


def _compile_job(site: Site, layout: Layout) -> Job | None:
    return plan_job(site, layout.experiment, layout.device, start=False, compiled=True)


def _verify(site: Site, query: Query) -> None:
    """Starts ahead-of-time compilation of the step.

    Raises:
        RunError: there is no experiment, or it cannot be compiled for the device.
    """
    found = layouts(site, query, source(site, query), start=False)
    if not found:
        raise RunError("Choose an experiment first: a recipe, a run or a draft.")
    why = why_not_compiled(found[0].experiment, found[0].device)
    if why is not None:
        raise RunError(why)
    plan_job(site, found[0].experiment, found[0].device, start=True, compiled=True)


# The arrays


def _arrays(site: Site, view: View) -> Section:
    parts = [("all parts", ""), *((part, part) for part in layout_arrays.PARTS)]
    sorts = [(words, name) for name, words in layout_arrays.SORTS.items()]
    with gr.Column(visible=False) as group:
        gr.Markdown("## Sharding of each array")
        with gr.Row():
            words = view.control(
                "q", gr.Textbox(label="Arrays with", placeholder="kernel, float32, tensor ...", max_lines=1)
            )
            part = view.control("part", gr.Dropdown(parts, value="", label="Part"))
            order = view.control("sort", gr.Dropdown(sorts, value="", label="Order"))
        with gr.Row():
            count = gr.Markdown()
            save = gr.Button("Download CSV", link="#", size="sm", scale=0, min_width=160)
        table = gr.Dataframe(label="Arrays; select one to see where its blocks are", interactive=False, max_height=420)
    view.does(
        table.select,
        lambda query, client, event: _row_selected(site, query, event.row_value[0]),
        has_event=True,
    )

    def fill(shown: Shown) -> Updates:
        filters = {
            words: shown.query.get("q", ""),
            part: shown.query.get("part", ""),
            order: shown.query.get("sort", ""),
        }
        if not shown.plans:
            return {**filters, group: gr.update(visible=False)}
        first, *others = shown.plans
        text, found = layout_arrays.table(first, others[0] if others else None, shown.query)
        pinned = 0 if is_narrow(shown.query) else 2
        named = {name: value for name, value in shown.query.items() if not name.startswith("_")}
        return {
            **filters,
            group: gr.update(visible=True),
            count: text,
            table: gr.update(value=found, visible=not found.empty, pinned_columns=pinned),
            save: gr.update(link=link("/download", layout="arrays.csv", **named)),
        }

    return [group, words, part, order, count, table, save], fill


def _row_selected(site: Site, query: Query, number: Any) -> Done | None:
    found = layouts(site, query, source(site, query), start=False)
    plan = found[0].plan if found else None
    if plan is None or not str(number).isdecimal():
        return None
    array = layout_arrays.array_of_row(plan, query, int(number))
    return Done(query={"array": layout_arrays.name_of(array)}) if array is not None else None


def _selected_array() -> Section:
    with gr.Column(visible=False) as group:
        title = gr.Markdown()
        with gr.Row():
            sides = [_array_on_mesh() for _ in range(2)]

    def fill(shown: Shown) -> Updates:
        array = layout_arrays.selected(shown.plans[0]["arrays"], shown.query) if shown.plans else None
        if array is None:
            return {group: gr.update(visible=False)}
        values: Updates = {
            group: gr.update(visible=True),
            title: f"## {plain(array['path'])} ({plain(array['part'])})",
        }
        for index, (column, mesh, grid, rules) in enumerate(sides):
            plan = shown.plans[index] if index < len(shown.plans) else None
            values[column] = gr.update(visible=plan is not None)
            if plan is None:
                continue
            found = [one for one in plan["arrays"] if layout_arrays.name_of(one) == layout_arrays.name_of(array)]
            absent = "" if found else "\n\nThis array does not exist on this mesh."
            values[mesh] = f"### {format_mesh(plan['mesh'])}{absent}"
            values[grid] = drawing(found[0], plan["mesh"]) if found else ""
            tried = layout_arrays.why(found[0]) if found else pd.DataFrame()
            widths = NARROW_WIDTHS if is_narrow(shown.query) else WHY_WIDTHS
            values[rules] = gr.update(value=tried, visible=bool(found), column_widths=widths)
        return values

    return [group, title, *(component for side in sides for component in side)], fill


def _array_on_mesh() -> tuple[gr.Column, gr.Markdown, gr.HTML, gr.Dataframe]:
    with gr.Column(visible=False) as column:
        mesh = gr.Markdown()
        grid = device_grid()
        rules = gr.Dataframe(label="Why each dimension has its mesh axes", **_TABLE)
    return column, mesh, grid, rules


def _timer(site: Site) -> Section:
    """A timer that is active while a child process works for the page."""
    timer = gr.Timer(1, active=False)

    def fill(shown: Shown) -> Updates:
        jobs = [one.job for one in shown.layouts] + [_compile_job(site, one) for one in shown.layouts[:1]]
        return {timer: gr.Timer(active=shown.is_reading or any(job is not None and not job.is_over for job in jobs))}

    return [timer], fill


PAGE = Page(name="layout", path="/layout", title="Layout", build=build)
