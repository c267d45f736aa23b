"""A plan, as `nnxdsl plan --json` prints it, for people; knows the plan's plain values alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.terminal.plan_view import facts as plan_facts

from .html import Child, Html, join, tag
from .parts import facts, table
from .words import size


def plan_words(found: Mapping[str, Any]) -> Html:
    """What a run takes: the facts, the memory part by part, what is worth a word."""
    device, verdict, total = found["device"], found["verdict"], found["bytes_per_device"]
    parts: list[Child] = []
    if verdict:
        look = "notice" if verdict["fits"] else "notice bad"
        sign = "✔ " if verdict["fits"] else "✘ "
        words = f"{sign}{verdict['message']}; {verdict['share']:.0%} of what is usable on {device['description']}"
        parts.append(tag("p", words, cls=look))
    for warning in found["warnings"]:
        parts.append(tag("p", tag("code", warning["path"]), f" {warning['message']}", cls="notice warn-box"))
    parts.append(facts([(name, text) for name, text in plan_facts(found)]))
    here = [part for part in found["memory"] if part["memory"] == "device" and part["bytes"]]
    parts.append(memory_bar(here, total))
    rows = [
        (part["name"], size(part["bytes"]), f"{part['bytes'] / max(1, total):.0%}", f"{part['tag']}: {part['how']}")
        for part in here
    ]
    rows.append((tag("b", "all of it"), tag("b", size(total)), "", ""))
    parts.append(
        table(
            ("Part", "Bytes", "Share", "How it is known"), rows, "Memory of each device, estimated", ("Bytes", "Share")
        )
    )
    return join(parts)


def memory_bar(parts: list[Mapping[str, Any]], total: float) -> Html:
    """What fills a device, to scale."""
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
