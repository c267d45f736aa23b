"""The Layout page: sharding of every array on one or two meshes, memory per device, and the applied rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, SpecError
from nnxdsl.terminal.plan_format import format_mesh

from ...components.parts import action
from ...html import Child, Html, join, link, tag
from ...page import Action, Answer, Ask, Page
from ...processes.jobs import Job
from ...state import Site
from ...store.experiments import from_text
from ..new import form_texts
from . import arrays as layout_arrays
from . import views as layout_views
from .choose import SIZES, choice, fields_of
from .compile import verified
from .grid import drawing
from .request import (
    NO_DEVICE,
    NONE,
    SOURCES,
    Source,
    array_rules_of,
    device_of,
    mesh_of,
    mesh_text,
    plan_job,
    rules_of,
    source,
    why_not_compiled,
    with_placement,
)


@attrs.frozen
class Side:
    """One of the layouts on the page.

    Attributes:
        experiment: The experiment with its mesh.
        job: Job that computes its plan; None before it was started.
    """

    experiment: Experiment
    job: Job | None

    @property
    def found(self) -> Mapping[str, Any] | None:
        """The plan; None before it is computed."""
        return self.job.result if self.job is not None and self.job.state == "done" else None


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the page for the layouts in the query."""
    return _answer(site, ask, start=True)


def ticked(site: Site, ask: Ask) -> Answer:
    """Updates the results; form fields are sent again only if their choices have changed."""
    return _answer(site, ask, start=True)


def choose(site: Site, ask: Ask) -> Answer:
    """Writes the form's fields to the URL.

    Raises:
        SpecError: invalid fields, all at once.
    """
    given = ask.fields
    max_devices = site.settings.limits.mesh_devices
    sizes = mesh_of(",".join(f"{axis}:{given.get(f'size-{axis}', '').strip() or 1}" for axis in SIZES), max_devices)
    mesh2 = given.get("mesh2", "").strip()
    query = {name: ask.query.get(name, "") for name in ("array", "q", "part", "sort")}
    kind, _, name = given.get("of", "").partition(":")
    if kind in SOURCES:
        query[kind] = name
    else:
        query |= {kind: ask.query.get(kind, "") for kind in SOURCES}
    device, memory = given.get("device", ""), given.get("memory", "").strip()
    query["device"] = f"{device}:{memory}" if memory and device != NO_DEVICE else device
    query["mesh"] = mesh_text(sizes)
    query["mesh2"] = mesh_text(mesh_of(mesh2, max_devices)) if mesh2 else ""
    for field, check in (("rules", rules_of), ("arrays", array_rules_of)):
        text = given.get(field, "").strip()
        check(text)
        query[field] = (text or NONE) if text != given.get(f"{field}-were", "").strip() else ""
    device_of(query)
    return Answer(goto=link("/layout", **query))


def load(site: Site, ask: Ask) -> Answer:
    """Creates a draft from a pasted text, and writes its id to the URL."""
    try:
        experiment = from_text(ask.fields.get("text", ""))
    except SpecError as error:
        listed = "\n".join(map(str, error.problems[:20]))
        return Answer(notice=f"This could not be loaded:\n{listed}", bad=True)
    texts = form_texts.texts_of(experiment)
    draft = site.drafts.new(texts, to_dict(experiment), "pasted text")
    return Answer(goto=link("/layout", draft=draft.id))


def again(site: Site, ask: Ask) -> Answer:
    """Restarts jobs that failed or were cancelled."""
    for one in _experiments(site, ask, source(site, ask.query)):
        plan_job(site, one, device_of(ask.query), start=True)
    return _answer(site, ask, start=True)


def reread(site: Site, ask: Ask) -> Answer:
    """Retries a recipe that could not be read."""
    site.presets.job(ask.query.get("exp", ""), again=True)
    return _answer(site, ask, start=True)


def cancel(site: Site, ask: Ask) -> Answer:
    """Cancels the running jobs."""
    for one in _experiments(site, ask, source(site, ask.query)):
        for compiled in (False, True):
            job = plan_job(site, one, device_of(ask.query), start=False, compiled=compiled)
            if job is not None:
                (site.compiles if compiled else site.jobs).cancel(job.key)
    answer = _answer(site, ask, start=False)
    return Answer(answer.regions, notice="Ended.")


def verify(site: Site, ask: Ask) -> Answer:
    """Starts ahead-of-time compilation of the step."""
    experiments = _experiments(site, ask, source(site, ask.query))
    if not experiments:
        return Answer(notice="Choose an experiment first: a recipe, a run or a draft.", bad=True)
    first = experiments[0]
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
            return Answer({"choose": choice(site), **nothing})
        if of.experiment is None:
            waiting = tag("p", f"Reading {of.words} ...", cls="empty", data_tick="0.5")
            return Answer({"choose": tag("h1", "Layout"), **nothing, "result": waiting})
        device = device_of(ask.query)
    except NnxdslError as error:
        reread = action("Retry", "layout.reread") if ask.query.get("exp") else None
        back = tag("p", tag("a", "Choose another experiment", href="/layout", cls="button"), " ", reread)
        head = join(tag("h1", "Layout"), tag("p", str(error), cls="notice bad", role="alert"), back)
        return Answer({"choose": head, **nothing})
    head = fields_of(site, ask, of, of.experiment)
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
        heading = tag("h2", "Sharding of each array")
        regions["arrays"] = join(heading, layout_arrays.table(found, second, ask.query, chosen))
        if chosen is not None:
            regions["drawing"] = _drawings(chosen, [side.found for side in sides if side.found is not None])
    return Answer(regions)


def _experiments(site: Site, ask: Ask, of: Source) -> list[Experiment]:
    """Returns the experiment with the query's mesh, and with its second mesh if there is one."""
    if of.experiment is None:
        return []
    max_devices = site.settings.limits.mesh_devices
    meshes = [ask.query.get("mesh", ""), *filter(None, [ask.query.get("mesh2", "")])]
    return [with_placement(of.experiment, ask.query, mesh, max_devices) for mesh in meshes]


def _job(site: Site, experiment: Experiment, device: str, *, start: bool) -> Job | None:
    """Returns the existing job even if it failed: it is restarted on request only."""
    job = plan_job(site, experiment, device, start=False)
    return plan_job(site, experiment, device, start=True) if job is None and start else job


# Results


def _result(site: Site, ask: Ask, sides: list[Side], device: str) -> Html:
    columns = [_side(side, "ab"[index]) for index, side in enumerate(sides)]
    checked = verified(site, sides[0].experiment, device, "layout") if sides[0].found is not None else None
    return join(tag("div", columns, cls=f"layouts n{len(columns)}"), checked)


def _side(side: Side, name: str) -> Html:
    job = side.job
    if side.found is not None:
        return layout_views.summary(side.found, name)
    words = tag("h2", format_mesh(side.experiment.mesh.sizes), cls="mono")
    if job is None or job.state in ("cancelled", "failed"):
        wrong = job.error if job is not None and job.error else "The computation was cancelled."
        body: Child = (
            tag("pre", wrong, cls="error", role="alert"),
            tag("div", action("Try again", "layout.again"), cls="row"),
        )
    else:
        state = "Waiting for another child process" if job.state == "waiting" else "Planning in a child process"
        body = (
            tag("p", f"{state}, {job.seconds:.0f} s so far ...", cls="muted", data_tick="0.7"),
            tag("div", action("Cancel", "layout.cancel"), cls="row"),
        )
    return tag("section", words, body, cls="panel layout-summary")


def _drawings(chosen: Mapping[str, Any], plans: list[Mapping[str, Any]]) -> Html:
    columns: list[Html] = []
    for found in plans:
        name = layout_arrays.name_of(chosen)
        array = next((one for one in found["arrays"] if layout_arrays.name_of(one) == name), None)
        heading = tag("h3", format_mesh(found["mesh"]), cls="mono") if len(plans) > 1 else None
        body = (
            drawing(array, found)
            if array is not None
            else tag("p", "This array does not exist on this mesh.", cls="muted")
        )
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
        "reread": reread,
        "cancel": cancel,
        "load": Action(load, writes=True),
        "verify": Action(verify, writes=True),
    },
)
