"""Where every array of an experiment lies on a mesh, what fills a device, and why; two meshes side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from nnxdsl.program import hardware
from nnxdsl.run.plan_view import mesh_words
from nnxdsl.spec.errors import NnxdslError, SpecError
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.placement import MESH_AXES
from nnxdsl.spec.tree import to_dict

from . import form, layout_arrays, layout_views
from .experiments import from_text
from .html import Child, Html, join, link, tag
from .jobs import Job
from .layout_grid import drawing
from .layout_request import (
    DEVICE,
    NO_DEVICE,
    SOURCES,
    Source,
    asked,
    device_of,
    mesh_of,
    mesh_text,
    plan_job,
    rules_of,
    rules_text,
    source,
    why_not_compiled,
)
from .page import Action, Answer, Ask, Page
from .parts import action
from .state import Site

MESHES = ("data:1", "fsdp:8", "fsdp:4,tensor:2", "data:2,fsdp:8", "fsdp:16,tensor:8", "fsdp:64,tensor:4")
"""Offered with one click."""

SIZES = (*MESH_AXES, "slices")
KEPT = ("run", "exp", "draft", "device", "mesh", "mesh2", "rules")
HELP = "The first rule that names a dimension and can be followed wins. One a line: embed: fsdp, mlp: tensor, vocab: -"


@attrs.frozen
class Side:
    """One of the layouts that are shown.

    Attributes:
        experiment: On its mesh.
        job: What plans it; None before it was started.
    """

    experiment: Experiment
    job: Job | None

    @property
    def found(self) -> Mapping[str, Any] | None:
        """The plan, once it is there."""
        return self.job.result if self.job is not None and self.job.state == "done" else None


def opened(site: Site, ask: Ask) -> Answer:
    """The layouts that the query asks for."""
    return _answer(site, ask, start=True)


def ticked(site: Site, ask: Ask) -> Answer:
    """What is being worked out; fields are not sent again as long as what may be chosen stays the same."""
    return _answer(site, ask, start=True)


def choose(site: Site, ask: Ask) -> Answer:
    """The fields go into the URL.

    Raises:
        SpecError: with everything that is wrong with them.
    """
    given = ask.fields
    most = site.settings.limits.mesh_devices
    sizes = mesh_of(",".join(f"{axis}:{given.get(f'size-{axis}', '').strip() or 1}" for axis in SIZES), most)
    mesh2 = given.get("mesh2", "").strip()
    query = {name: ask.query.get(name, "") for name in ("array", "q", "part", "sort")}
    kind, _, name = given.get("of", "").partition(":")
    if kind in SOURCES:
        query[kind] = name
    else:
        query |= {kind: ask.query.get(kind, "") for kind in SOURCES}
    query["device"] = given.get("device", "")
    query["mesh"] = mesh_text(sizes)
    query["mesh2"] = mesh_text(mesh_of(mesh2, most)) if mesh2 else ""
    rules = given.get("rules", "").strip()
    rules_of(rules)
    query["rules"] = rules if rules != given.get("rules-were", "").strip() else ""
    device_of(query)
    return Answer(goto=link("/layout", **query))


def take_in(site: Site, ask: Ask) -> Answer:
    """A pasted text becomes a draft, which the URL then names."""
    try:
        experiment = from_text(ask.fields.get("text", ""))
    except SpecError as error:
        listed = "\n".join(map(str, error.problems[:20]))
        return Answer(notice=f"This was not taken in:\n{listed}", bad=True)
    texts = form.texts_of(experiment)
    draft = site.drafts.new(texts, to_dict(experiment), "what was pasted")
    return Answer(goto=link("/layout", draft=draft.id))


def again(site: Site, ask: Ask) -> Answer:
    """Works out once more what failed or was ended."""
    for one in _experiments(site, ask, source(site, ask.query)):
        plan_job(site, one, device_of(ask.query), start=True)
    return _answer(site, ask, start=True)


def cancel(site: Site, ask: Ask) -> Answer:
    """Ends what is being worked out."""
    for one in _experiments(site, ask, source(site, ask.query)):
        for compiled in (False, True):
            job = plan_job(site, one, device_of(ask.query), start=False, compiled=compiled)
            if job is not None:
                site.jobs.cancel(job.key)
    answer = _answer(site, ask, start=False)
    return Answer(answer.regions, notice="Ended.")


def verify(site: Site, ask: Ask) -> Answer:
    """Has XLA compile the step."""
    first = _experiments(site, ask, source(site, ask.query))[0]
    device = device_of(ask.query)
    why = why_not_compiled(first, device)
    if why is not None:
        return Answer(notice=why, bad=True)
    plan_job(site, first, device, start=True, compiled=True)
    answer = _answer(site, ask, start=True)
    return Answer(answer.regions, query=link("", **{**ask.query, "verify": "1"}).lstrip("?"))


# The whole page


def _answer(site: Site, ask: Ask, *, start: bool) -> Answer:
    nothing = {"result": join(), "arrays": join(), "drawing": join()}
    try:
        of = source(site, ask.query)
        if not of.kind:
            return Answer({"choose": _choice(site), **nothing})
        if of.experiment is None:
            waiting = tag("p", f"Reading {of.words} ...", cls="empty", data_tick="0.5")
            return Answer({"choose": tag("h1", "Layout"), **nothing, "result": waiting})
        device = device_of(ask.query)
    except NnxdslError as error:
        back = tag("p", tag("a", "Choose another", href="/layout", cls="button"))
        head = join(tag("h1", "Layout"), tag("p", str(error), cls="notice bad", role="alert"), back)
        return Answer({"choose": head, **nothing})
    head = _head(site, ask, of, of.experiment)
    try:
        experiments = _experiments(site, ask, of)
    except SpecError as error:
        wrong = tag("p", "\n".join(map(str, error.problems[:20])), cls="notice bad", role="alert")
        return Answer({"choose": head, **nothing, "result": wrong})
    sides = [Side(one, _job(site, one, device, start=start)) for one in experiments]
    regions = {"choose": head, "result": _result(site, ask, sides, device), "arrays": join(), "drawing": join()}
    found = sides[0].found
    if found is not None:
        second = sides[1].found if len(sides) > 1 else None
        chosen = layout_arrays.selected(found["arrays"], ask.query)
        heading = tag("h2", "Where each array lies")
        regions["arrays"] = join(heading, layout_arrays.table(found, second, ask.query, chosen))
        if chosen is not None:
            regions["drawing"] = _drawings(chosen, [side.found for side in sides if side.found is not None])
    return Answer(regions)


def _experiments(site: Site, ask: Ask, of: Source) -> list[Experiment]:
    """The experiment on the mesh of the query, and on the second one if there is one."""
    if of.experiment is None:
        return []
    most = site.settings.limits.mesh_devices
    meshes = [ask.query.get("mesh", ""), *filter(None, [ask.query.get("mesh2", "")])]
    return [asked(of.experiment, ask.query, mesh, most) for mesh in meshes]


def _job(site: Site, experiment: Experiment, device: str, *, start: bool) -> Job | None:
    """The job there is, even if it failed: its cause stays what it was, until somebody asks again."""
    job = plan_job(site, experiment, device, start=False)
    return plan_job(site, experiment, device, start=True) if job is None and start else job


# Choosing


def _choice(site: Site) -> Html:
    cards = [
        tag(
            "a",
            tag("b", name),
            tag("span", f"experiments/{name}.py", cls="muted small"),
            href=link("/layout", exp=name),
            cls="panel card",
        )
        for name in site.presets.names()
    ]
    runs = [
        tag("li", tag("a", row.id, href=link("/layout", run=row.id), cls="mono"), " ", row.facts.get("mesh", ""))
        for row in site.index.rows()[:8]
    ]
    none = tag("p", f"There is no {site.presets.place}; start the app in the directory of your project.", cls="empty")
    paste = tag(
        "form",
        tag("label", "Python as ", tag("code", "nnxdsl show FILE --python"), " prints it, or JSON", for_="layout-text"),
        tag("textarea", rows=8, name="text", id="layout-text", spellcheck="false"),
        tag("div", tag("button", "Show its layout", type="submit", cls="button primary"), cls="row end"),
        cls="panel",
        data_do="layout.take_in",
    )
    return join(
        tag("h1", "Layout"),
        tag(
            "p",
            "Whether an experiment fits on some devices, what fills them, and which rule put each array where it lies. "
            "The devices need not be here: nothing is trained.",
        ),
        tag("h2", "Recipes"),
        tag("div", cards, cls="grid") if cards else none,
        join(tag("h2", "Runs"), tag("ul", runs, cls="plain panel")) if runs else None,
        None if site.settings.read_only else join(tag("h2", "Python or JSON"), paste),
    )


def _head(site: Site, ask: Ask, of: Source, experiment: Experiment) -> Html:
    here = f"{of.kind}:{of.name}"
    names = {here: of.words}
    names |= {f"exp:{name}": f"experiments/{name}.py" for name in site.presets.names()}
    names |= {f"run:{row.id}": f"run {row.id}" for row in site.index.rows()[:60]}
    most = site.settings.limits.mesh_devices
    try:
        text = ask.query.get("mesh", "")
        sizes = mesh_of(text, most) if text else {**experiment.mesh.sizes, "slices": experiment.mesh.slices}
    except SpecError:
        sizes = dict.fromkeys(SIZES, 1)
    devices = {name: _device_words(entry) for name, entry in hardware.DEVICES.items()}
    devices[NO_DEVICE] = "no device: no verdict"
    rules = ask.query.get("rules", rules_text(experiment.mesh.rules))
    shown = tag("h1", "Layout of ", tag("span", of.words, cls="mono"))
    fields = [
        _labelled("Of", _select("of", names, here), cls="wide"),
        _labelled("On", _select("device", devices, ask.query.get("device", "") or DEVICE), cls="wide"),
    ]
    numbers = [
        _labelled(
            axis,
            tag("input", type="number", name=f"size-{axis}", id=f"size-{axis}", value=sizes[axis], min=1, max=most),
            cls="size",
        )
        for axis in SIZES
    ]
    second = _labelled(
        "Beside it",
        tag(
            "input",
            type="text",
            name="mesh2",
            id="layout-mesh2",
            value=ask.query.get("mesh2", ""),
            placeholder="a second mesh, fsdp:4,tensor:2",
            spellcheck="false",
        ),
        cls="wide",
    )
    editor = tag(
        "details",
        tag("summary", "Rules of its own", f" ({len(rules.splitlines())})" if rules else ""),
        tag("label", HELP, for_="layout-rules", cls="muted small"),
        tag("textarea", rules, name="rules", id="layout-rules", rows=5, spellcheck="false"),
        tag("input", type="hidden", name="rules-were", value=rules_text(experiment.mesh.rules)),
        id="layout-rules-editor",
    )
    kept = {name: ask.query.get(name) for name in (*KEPT, "array", "q", "part", "sort")}
    quick = [
        tag("a", mesh_words(_long(text)), href=link("/layout", **{**kept, "mesh": text}), cls="counter")
        for text in MESHES
    ]
    return join(
        shown,
        tag(
            "form",
            tag("div", fields, second, cls="layout-fields"),
            tag("div", numbers, tag("button", "Show", type="submit", cls="button primary"), cls="layout-sizes"),
            editor,
            cls="panel layout-form",
            data_do="layout.choose",
            aria_label="What is laid out",
        ),
        tag("nav", quick, cls="counters", aria_label="Other meshes"),
    )


def _long(text: str) -> dict[str, int]:
    sizes = mesh_of(text, 10**9)
    return {axis: sizes[axis] for axis in MESH_AXES}


def _device_words(entry: hardware.Device) -> str:
    return f"{entry.description}{f', {entry.memory / 2**30:.0f} GiB' if entry.memory else ''}"


def _labelled(text: str, field: Html, cls: str) -> Html:
    return tag("label", tag("span", text), field, cls=cls)


def _select(name: str, names: Mapping[str, str], chosen: str) -> Html:
    options = [tag("option", text, value=value, selected=value == chosen) for value, text in names.items()]
    return tag("select", options, name=name, id=f"layout-{name}")


# What was found


def _result(site: Site, ask: Ask, sides: list[Side], device: str) -> Html:
    columns = [_side(side, "ab"[index]) for index, side in enumerate(sides)]
    checked = _verified(site, sides[0].experiment, device) if sides[0].found is not None else None
    return join(tag("div", columns, cls=f"layouts n{len(columns)}"), checked)


def _side(side: Side, name: str) -> Html:
    job = side.job
    if side.found is not None:
        return layout_views.summary(side.found, name)
    words = tag("h2", mesh_words(side.experiment.mesh.sizes), cls="mono")
    if job is None or job.state in ("cancelled", "failed"):
        wrong = job.error if job is not None and job.error else "It was ended before it was worked out."
        body: Child = (
            tag("pre", wrong, cls="error", role="alert"),
            tag("div", action("Try again", "layout.again"), cls="row"),
        )
    else:
        state = "Waiting for another child process" if job.state == "waiting" else "Working it out in a child process"
        body = (
            tag("p", f"{state}, {job.seconds:.0f} s so far ...", cls="muted", data_tick="0.7"),
            tag("div", action("Cancel", "layout.cancel"), cls="row"),
        )
    return tag("section", words, body, cls="panel layout-summary")


def _verified(site: Site, experiment: Experiment, device: str) -> Html:
    job = plan_job(site, experiment, device, start=False, compiled=True)
    why = why_not_compiled(experiment, device)
    about = "XLA compiles the step ahead of time for these devices, which need not be here; it takes up to minutes."
    body: Child
    if job is not None and job.state == "done":
        body = layout_views.compiled(job.result)
    elif job is not None and not job.is_over:
        body = (
            tag("p", f"Compiling in a child process, {job.seconds:.0f} s so far ...", cls="muted", data_tick="1"),
            tag("div", action("Cancel", "layout.cancel"), cls="row"),
        )
    elif why is not None:
        body = tag("p", why, cls="muted")
    elif site.settings.read_only:
        body = tag("p", "This app is read only; `nnxdsl plan --compile` does it in a terminal.", cls="muted")
    else:
        wrong = tag("pre", job.error, cls="error", role="alert") if job is not None and job.error else None
        body = (
            wrong,
            tag(
                "div", action("Verify by compiling", "layout.verify"), tag("span", about, cls="muted small"), cls="row"
            ),
        )
    return tag("section", tag("h2", "Checked by the compiler"), body, cls="panel")


def _drawings(chosen: Mapping[str, Any], plans: list[Mapping[str, Any]]) -> Html:
    columns: list[Html] = []
    for found in plans:
        name = layout_arrays.name_of(chosen)
        array = next((one for one in found["arrays"] if layout_arrays.name_of(one) == name), None)
        heading = tag("h3", mesh_words(found["mesh"]), cls="mono") if len(plans) > 1 else None
        body = drawing(array, found) if array is not None else tag("p", "It is not there on this mesh.", cls="muted")
        columns.append(tag("div", heading, body))
    return tag(
        "section",
        tag("h2", tag("span", chosen["path"], cls="mono"), tag("span", f" · {chosen['part']}", cls="muted")),
        tag("div", columns, cls=f"layouts n{len(columns)}"),
        cls="panel",
        id="layout-drawing-panel",
    )


PAGE = Page(
    name="layout",
    path="/layout",
    title="Layout",
    regions=("choose", "result", "drawing", "arrays"),
    actions={
        "open": opened,
        "tick": ticked,
        "choose": choose,
        "again": again,
        "cancel": cancel,
        "take_in": Action(take_in, writes=True),
        "verify": Action(verify, writes=True),
    },
)
