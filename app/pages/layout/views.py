"""Panels of a plan: verdict, memory, warnings, XLA's report. Works on the plan's JSON only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.terminal.plan_format import format_mesh
from nnxdsl.terminal.plan_view import facts as plan_facts

from ...components.parts import facts, table
from ...html import Child, Html, join, tag
from ...words import duration, number, size
from .plan_words import TIGHT, verdict_of

COLOURS = (
    "frozen weights",
    "trainable weights",
    "optimizer",
    "frozen weights, again",
    "gradients",
    "activations",
    "workspace",
    "teacher",
    "reference copy",
)
"""Parts of the memory bar with a fixed colour each; all others share one colour."""

FIGURES = {
    "arguments": "inputs of the step",
    "outputs": "outputs of the step",
    "aliased": "outputs in buffers of donated arguments",
    "temporaries": "temporary buffers within the step",
    "allocated": "arguments + outputs - aliased + temporaries",
    "host": "in host memory",
    "peak": "peak memory, as XLA reports it",
}


def summary(found: Mapping[str, Any], name: str) -> Html:
    """Returns the verdict, the memory per device, warnings and facts.

    Args:
        found: Output of `nnxdsl plan --json`.
        name: Letter of this plan among several, for element ids.
    """
    return tag(
        "section",
        tag("h2", format_mesh(found["mesh"]), cls="mono"),
        _verdict(found),
        _memory(found, name),
        warnings(found),
        _more(found, name),
        cls="panel layout-summary",
    )


def _verdict(found: Mapping[str, Any]) -> Html:
    verdict, device = found["verdict"], found["device"]
    if not verdict:
        where = device["description"] if device else "no device selected"
        words = f"{size(found['bytes_per_device'])} on each device; the device's memory is unknown ({where})"
        return tag("p", words, cls="notice")
    return verdict_of(found)


def _memory(found: Mapping[str, Any], name: str) -> Html:
    device, total = found["device"], found["bytes_per_device"]
    here = [part for part in found["memory"] if part["memory"] == "device" and part["bytes"]]
    there = [part for part in found["memory"] if part["memory"] != "device" and part["bytes"]]
    has = device["memory"] if device and device["memory"] else 0
    whole = max(total, has, 1)
    pieces = [_piece(part["name"], part["bytes"], whole, _colour(part)) for part in here]
    usable_words = None
    if has:
        usable = min(device["usable"], has)
        pieces.append(_piece("free", max(usable - total, 0), whole, "free"))
        pieces.append(_piece("not usable by the program", has - max(usable, min(total, has)), whole, "kept"))
        usable_words = f"{size(total)} of {size(usable)} usable; the bar is {size(whole)} long"
    spoken = ", ".join(f"{part['name']} {size(part['bytes'])}" for part in here)
    rows: list[Html] = []
    for index, part in enumerate(here):
        rows.append(_part(part, total, _colour(part), f"part-{name}-{index}"))
    for index, part in enumerate(there):
        rows.append(_part(part, found["host_bytes_per_device"], "host", f"host-{name}-{index}"))
    small = None
    if has and total < whole / 8 and here:  # its parts are too small to distinguish in the long bar
        close = [_piece(part["name"], part["bytes"], max(total, 1), _colour(part)) for part in here]
        small = join(
            tag("p", f"the same {size(total)}, drawn larger", cls="muted small"),
            tag("div", close, cls="memory-bar", aria_hidden="true"),
        )
    return join(
        tag("div", pieces, cls="memory-bar", role="img", aria_label=f"Memory of a device: {spoken}"),
        tag("p", usable_words or f"{size(total)} on each device", cls="muted small"),
        small,
        tag("div", rows, cls="memory-parts"),
    )


def _piece(name: str, count: float, whole: float, cls: str) -> Html | None:
    if count <= 0:
        return None
    return tag("div", cls=f"piece {cls}", style=f"width:{count / whole:.3%}", title=f"{name}: {size(count)}")


def _part(part: Mapping[str, Any], total: float, cls: str, name: str) -> Html:
    where = " (host's memory)" if part["memory"] != "device" else ""
    return tag(
        "details",
        tag(
            "summary",
            tag("i", cls=f"swatch-box {cls}"),
            tag("span", f"{part['name']}{where}", cls="grow"),
            tag("span", part["tag"], cls="muted small"),
            tag("b", size(part["bytes"])),
            tag("span", _share(part["bytes"] / max(1, total)), cls="share"),
        ),
        tag("p", part["how"], cls="muted small"),
        id=name,
    )


def _colour(part: Mapping[str, Any]) -> str:
    return f"m{COLOURS.index(part['name']) if part['name'] in COLOURS else len(COLOURS)}"


def _share(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def warnings(found: Mapping[str, Any]) -> Html | None:
    """Returns the plan's warnings."""
    if not found["warnings"]:
        is_tight = found["verdict"] and found["verdict"]["share"] > TIGHT  # the verdict is a warning already
        return None if is_tight else tag("p", "✔ no warnings", cls="muted")
    shown = [
        tag("li", tag("b", f"! {one['kind']} "), tag("code", one["path"]), f" {one['message']}")
        for one in found["warnings"]
    ]
    many = len(shown)
    return tag(
        "div",
        tag("h3", f"{many} {'warning' if many == 1 else 'warnings'}"),
        tag("ul", shown, cls="plain"),
        cls="notice warn-box",
    )


def _more(found: Mapping[str, Any], name: str) -> Html:
    rows: list[tuple[str, Child]] = [(label, text) for label, text in plan_facts(found)]
    if found["activations"]:
        policies = ", ".join(f"{policy} {size(count)}" for policy, count in found["activations"].items())
        rows.append(("activations by policy", policies))
        rows.append(("policy", f"{found['remat']}: {found['remat_why']}"))
    seconds = found["step_seconds"]
    if seconds:
        parts = ", ".join(f"{label} {_seconds(seconds[key])}" for key, label in _STEP.items())
        rows.append(("estimated step time, for ranking", f"{_seconds(seconds['step'])}: {parts}"))
    flows = [
        (
            ", ".join(axis or "-" for axis in flow["axes"]),
            "x".join(map(str, flow["shape"])),
            _spec(flow["spec"]),
            "x".join(map(str, flow["device_shape"])),
        )
        for flow in found.get("flows") or ()
    ]
    rules = [(position, logical, _entry(axes)) for position, (logical, axes) in enumerate(found["rules"])]
    return join(
        tag("details", tag("summary", "Details of the run"), facts(rows), id=f"facts-{name}"),
        tag(
            "details",
            tag("summary", f"Sharding rules, in order ({len(rules)})"),
            table(("#", "Logical axis", "Mesh axes"), rules, "The first applicable rule wins", ("#",)),
            id=f"rules-{name}",
        ),
        tag(
            "details",
            tag("summary", f"Activations with logical axes ({len(flows)})"),
            table(("Axes", "Shape", "Partition", "Each device"), flows, "Of one micro-batch"),
            id=f"flows-{name}",
        )
        if flows
        else None,
    )


_STEP = {"compute": "compute", "memory": "memory", "links": "communication"}


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{number(value)} s" if value >= 0.01 else f"{value * 1000:.3g} ms"


def _entry(entry: Any) -> str:
    return entry if isinstance(entry, str) else "+".join(entry or ()) or "-"


def _spec(spec: Any) -> str:
    return ", ".join(map(_entry, spec)) or "-"


def compiled(found: Mapping[str, Any]) -> Html:
    """Returns XLA's report on the compiled step, compared with the plan."""
    report = found["compiled"]
    if not report:
        return tag("p", "XLA returned no report.", cls="notice")
    if report["problem"]:
        return tag("p", f"✘ {report['problem']}", cls="notice bad")
    parts: list[Child] = []
    memory = report["memory"]
    if memory:
        planned, needs = found["bytes_per_device"], memory["allocated"]
        off = f"; the plan estimates {size(planned)}, {planned / needs - 1:+.1%}" if needs else ""
        fits = report["usable"] is None or needs <= report["usable"]
        of = f" of {size(report['usable'])} usable" if report["usable"] else ""
        is_tight = fits and report["usable"] is not None and needs > TIGHT * report["usable"]
        sign = "⚠ it fits, with little room" if is_tight else "✔ it fits" if fits else "✘ it does not fit"
        look = "warn-box" if is_tight else "verdict fits" if fits else "bad"
        parts.append(tag("p", f"{sign}: XLA needs {size(needs)}{of}{off}.", cls=f"notice {look}"))
        rows = [(key, size(memory[key]), words) for key, words in FIGURES.items() if memory.get(key) is not None]
        parts.append(table(("Figure", "Bytes", "Meaning"), rows, "XLA's figures for one device", ("Bytes",)))
    else:
        parts.append(tag("p", "The step compiles. XLA reports no memory figures on this platform.", cls="notice"))
    if report["collectives"]:
        lines = [
            (
                one["kind"],
                one["group"] or "-",
                f"{'in a loop' if one['in_loop'] else ''}{' in a branch: at most' if one['conditional'] else ''}"
                or "-",
                number(one["count"]),
                size(one["bytes"]),
            )
            for one in report["collectives"]
        ]
        names = ("Collective", "Devices", "Where", "Times", "Bytes")
        parts.append(table(names, lines, "Collectives of one step", ("Devices", "Times", "Bytes")))
    elif report["collectives"] is not None:
        parts.append(tag("p", "No collectives.", cls="muted"))
    flows = [
        (", ".join(axis or "-" for axis in flow["axes"]), "x".join(map(str, flow["shape"])), _spec(flow["spec"]))
        for flow in report.get("flows") or ()
    ]
    if flows:
        parts.append(table(("Axes", "Shape", "Partition"), flows, "Sharding of activations after compilation"))
    took = f"lowered in {_or_dash(report['lower_seconds'])}, compiled in {_or_dash(report['compile_seconds'])}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    note = " (cached report)" if report["cached"] else ""
    words = f"{report['count']} x {report['device']}, {report['topology']}; {took}{note}; {versions}"
    parts.append(tag("p", words, cls="muted small"))
    return join(parts)


def _or_dash(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.1f} s"
