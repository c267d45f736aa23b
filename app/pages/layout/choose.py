"""The form of the Layout page: recipe or run, device, mesh, sharding rules."""

from __future__ import annotations

from collections.abc import Mapping

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.errors import SpecError
from nnxdsl.sharding import hardware
from nnxdsl.terminal.plan_format import format_mesh

from ...html import Html, join, link, tag
from ...page import Ask
from ...state import Site
from .request import (
    DEVICE,
    NO_DEVICE,
    NONE,
    Source,
    array_rules_text,
    mesh_of,
    rules_text,
)

MESHES = ("data:1", "fsdp:8", "fsdp:4,tensor:2", "data:2,fsdp:8", "fsdp:16,tensor:8", "fsdp:64,tensor:4")
"""Mesh sizes that are offered as links."""

SIZES = (*MESH_AXES, "slices")
QUERY_FIELDS = ("run", "exp", "draft", "device", "mesh", "mesh2", "rules", "arrays")
ARRAYS_HELP = (
    "Rules for arrays with matching paths only, applied before all others: *.mlp.down.kernel | mlp: tensor, embed: -"
)
HELP = "The first applicable rule of a dimension wins. One per line: embed: fsdp, mlp: tensor, vocab: -"


def choice(site: Site) -> Html:
    """Returns the choice of an experiment: recipes, runs, pasted text."""
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
    demo = tag("a", "Start with the demo", href=link("/new", demo=1))
    none = tag("p", f"There is no recipe in {site.presets.place}. ", demo, cls="empty")
    paste = tag(
        "form",
        tag("label", "Python as ", tag("code", "nnxdsl show FILE --python"), " prints it, or JSON", for_="layout-text"),
        tag("textarea", rows=8, name="text", id="layout-text", spellcheck="false"),
        tag("div", tag("button", "Show its layout", type="submit", cls="button primary"), cls="row end"),
        cls="panel",
        data_do="layout.load",
    )
    return join(
        tag("h1", "Layout"),
        tag(
            "p",
            "Shows whether an experiment fits on given devices, what uses their memory, and the rule of each sharding. "
            "The devices need not be present: nothing is trained.",
        ),
        tag("h2", "Recipes"),
        tag("div", cards, cls="grid") if cards else none,
        join(tag("h2", "Runs"), tag("ul", runs, cls="plain panel")) if runs else None,
        None if site.settings.read_only else join(tag("h2", "Python or JSON"), paste),
    )


def fields_of(site: Site, ask: Ask, of: Source, experiment: Experiment) -> Html:
    """Returns the form, filled in from the query."""
    here = f"{of.kind}:{of.name}"
    names = {here: of.words}
    names |= {f"exp:{name}": f"experiments/{name}.py" for name in site.presets.names()}
    names |= {f"run:{row.id}": f"run {row.id}" for row in site.index.rows()[:60]}
    limit = site.settings.limits.mesh_devices
    try:
        text = ask.query.get("mesh", "")
        sizes = mesh_of(text, limit) if text else {**experiment.mesh.sizes, "slices": experiment.mesh.slices}
    except SpecError:
        sizes = dict.fromkeys(SIZES, 1)
    devices = {name: _device_words(entry) for name, entry in hardware.DEVICES.items()}
    devices[NO_DEVICE] = "no device (no memory check)"
    rules = _text(ask, "rules", rules_text(experiment.mesh.rules))
    arrays = _text(ask, "arrays", array_rules_text(experiment.mesh.array_rules))
    kind, _, memory = (ask.query.get("device", "") or DEVICE).partition(":")
    shown = tag("h1", "Layout of ", tag("span", of.words, cls="mono"))
    fields = [
        _labelled("Experiment", _select("of", names, here), cls="wide"),
        _labelled("Device", _select("device", devices, kind), cls="wide"),
    ]
    numbers = [
        _labelled(
            axis,
            tag("input", type="number", name=f"size-{axis}", id=f"size-{axis}", value=sizes[axis], min=1, max=limit),
            cls="size",
        )
        for axis in SIZES
    ]
    second = _labelled(
        "Compare with mesh",
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
    own = _labelled(
        "Memory per device (GiB)",
        tag(
            "input",
            type="number",
            name="memory",
            id="layout-memory",
            value=memory,
            min=1,
            step="any",
            placeholder="catalogue value",
        ),
        cls="memory",
    )
    count = len(rules.splitlines()) + len(arrays.splitlines())
    editor = tag(
        "details",
        tag("summary", "Custom rules", f" ({count})" if count else ""),
        tag("label", HELP, for_="layout-rules", cls="muted small"),
        tag("textarea", rules, name="rules", id="layout-rules", rows=5, spellcheck="false"),
        tag("input", type="hidden", name="rules-were", value=rules_text(experiment.mesh.rules)),
        tag("label", ARRAYS_HELP, for_="layout-arrays", cls="muted small"),
        tag("textarea", arrays, name="arrays", id="layout-arrays", rows=3, spellcheck="false"),
        tag("input", type="hidden", name="arrays-were", value=array_rules_text(experiment.mesh.array_rules)),
        id="layout-rules-editor",
    )
    values = {name: ask.query.get(name) for name in (*QUERY_FIELDS, "array", "q", "part", "sort")}
    quick = [
        tag("a", format_mesh(_long(text)), href=link("/layout", **{**values, "mesh": text}), cls="counter")
        for text in MESHES
    ]
    return join(
        shown,
        tag(
            "form",
            tag("div", fields, own, second, cls="layout-fields"),
            tag("div", numbers, tag("button", "Show", type="submit", cls="button primary"), cls="layout-sizes"),
            editor,
            cls="panel layout-form",
            data_do="layout.choose",
            aria_label="Layout settings",
        ),
        tag("nav", quick, cls="counters", aria_label="Other meshes"),
    )


def _text(ask: Ask, name: str, own: str) -> str:
    """Rules of the query, or the experiment's own."""
    given = ask.query.get(name, own)
    return "" if given == NONE else given


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
