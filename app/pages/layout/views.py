"""XLA's report on a compiled step, as HTML. Works on the plan's JSON only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...components.parts import table
from ...html import Child, Html, join, tag
from ...words import number, size
from .plan_words import TIGHT

FIGURES = {
    "arguments": "inputs of the step",
    "outputs": "outputs of the step",
    "aliased": "outputs in buffers of donated arguments",
    "temporaries": "temporary buffers within the step",
    "allocated": "arguments + outputs - aliased + temporaries",
    "host": "in host memory",
    "peak": "peak memory, as XLA reports it",
}


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
