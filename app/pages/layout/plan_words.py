"""Formats the output of `nnxdsl plan --json` as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.terminal.plan_view import facts as plan_facts

from ...components.parts import facts, table
from ...html import Child, Html, join, tag
from ...words import size

TIGHT = 0.9
"""Fraction of usable memory above which a plan that fits gets a warning: estimates are accurate to 10 %."""

SEARCH = (
    "Try a mesh with more devices, a device with more memory, a smaller micro-batch, an adapter or quantization; in a "
    "terminal, `nnxdsl plan FILE --device NAME --count N --search` lists meshes on which it fits."
)


def plan_words(found: Mapping[str, Any]) -> Html:
    """Returns a plan's facts, memory by part, and warnings."""
    total = found["bytes_per_device"]
    parts: list[Child] = [verdict_of(found)] if found["verdict"] else []
    for warning in found["warnings"]:
        parts.append(tag("p", tag("code", warning["path"]), f" {warning['message']}", cls="notice warn-box"))
    parts.append(facts([(name, text) for name, text in plan_facts(found)]))
    here = [part for part in found["memory"] if part["memory"] == "device" and part["bytes"]]
    parts.append(memory_bar(here, total))
    rows = [
        (part["name"], size(part["bytes"]), f"{part['bytes'] / max(1, total):.0%}", f"{part['tag']}: {part['how']}")
        for part in here
    ]
    rows.append((tag("b", "total"), tag("b", size(total)), "", ""))
    parts.append(table(("Part", "Bytes", "Share", "Basis"), rows, "Estimated memory per device", ("Bytes", "Share")))
    return join(parts)


def verdict_of(found: Mapping[str, Any]) -> Html:
    """Returns whether a plan fits, with a warning if the margin is smaller than the error of the estimate."""
    verdict, device = found["verdict"], found["device"]
    share, (message, _, remedy) = verdict["share"], verdict["message"].partition("; ")
    words = f" {share:.1%} of the usable memory of {device['description']}."
    if not verdict["fits"]:
        sign, look = "✘", "bad"
        words += f" {remedy[:1].upper()}{remedy[1:]}." if remedy and not remedy.startswith("--") else f" {SEARCH}"
    elif share > TIGHT:
        sign, look = "⚠", "warn-box"
        words += " That is tight: the memory of activations is an estimate, accurate to 10 %."
    else:
        sign, look = "✔", "fits"
    return tag("p", tag("b", f"{sign} {message}"), tag("br"), tag("span", words), cls=f"notice verdict {look}")


def memory_bar(parts: list[Mapping[str, Any]], total: float) -> Html:
    """Returns a stacked bar of the memory parts."""
    pieces = [
        tag(
            "div",
            cls=f"piece f{index % 6}",
            style=f"width:{part['bytes'] / max(1.0, total):.2%}",
            title=f"{part['name']}: {size(part['bytes'])}",
        )
        for index, part in enumerate(parts)
    ]
    named = ", ".join(f"{part['name']} {size(part['bytes'])}" for part in parts)
    return tag("div", pieces, cls="memory-bar", role="img", aria_label=f"Memory: {named}")
