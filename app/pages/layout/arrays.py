"""The table of a plan's arrays: filters, sorting, grouping of equal arrays, applied rules; and its CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from nnxdsl.terminal.plan_format import applied_rules, format_axes, format_shape, format_spec

from ...html import Child, Html, join, link, tag
from ...words import size

SHOWN = 40
SORTS = {"": "model order", "device": "bytes per device", "bytes": "total bytes", "copies": "copies"}
PARTS = ("frozen", "trainable", "reference", "optimizer")
NUMERIC = ("Bytes", "Each device", "Copies", "Second: device")
CSV_COLUMNS = (
    "part", "path", "dtype", "shape", "bytes", "partition", "device_shape", "device_bytes", "replicas", "memory",
    "rules",
)  # fmt: skip

Array = Mapping[str, Any]


def name_of(array: Array) -> str:
    """Name of an array in URLs: its part and its path."""
    return f"{array['part']}:{array['path']}"


def filtered(arrays: Iterable[Array], query: Mapping[str, str]) -> list[Array]:
    """Arrays that match a query's `q` and `part`, sorted by its `sort`."""
    words, part, sort = query.get("q", "").lower().split(), query.get("part", ""), query.get("sort", "")
    matching = [
        array for array in arrays if (not part or array["part"] == part) and all(word in _text(array) for word in words)
    ]
    if sort == "copies":
        return sorted(matching, key=lambda array: -array["replicas"])
    if sort in ("device", "bytes"):
        key = {"device": "device_bytes", "bytes": "bytes"}[sort]
        totals: dict[str, int] = {}
        for array in matching:  # equal arrays of several layers are sorted by their sum
            totals[_kind(array)] = totals.get(_kind(array), 0) + array[key]
        return sorted(matching, key=lambda array: -totals[_kind(array)])
    return matching


def folded(arrays: Iterable[Array]) -> list[list[Array]]:
    """Groups arrays of different layers that have the same shape and sharding."""
    alike: dict[str, list[Array]] = {}
    for array in arrays:
        alike.setdefault(_kind(array), []).append(array)
    return list(alike.values())


def selected(arrays: Sequence[Array], query: Mapping[str, str]) -> Array | None:
    """The array that a query names; by default the one with the most bytes per device."""
    named = query.get("array", "")
    for array in arrays:
        if named in (name_of(array), array["path"]):
            return array
    return max(arrays, key=lambda array: (array["part"] != "optimizer", array["bytes"]), default=None)


def table(
    found: Mapping[str, Any], second: Mapping[str, Any] | None, query: Mapping[str, str], chosen: Array | None
) -> Html:
    """Returns the table, with the partitions on a second mesh if there is one."""
    matching = filtered(found["arrays"], query)
    rows = folded(matching)
    other = {name_of(array): array for array in second["arrays"]} if second else {}
    names = ["Array", "Shape", "Bytes", "Partition", "Block", "Each device", "Copies"]
    names += ["Second: partition", "Second: device"] if second else []
    names.append("Rule")
    limit = len(rows) if query.get("all") else SHOWN
    body = [_row(kind, other if second else None, query, chosen, number) for number, kind in enumerate(rows[:limit])]
    on_device = sum(array["device_bytes"] for array in matching)
    caption = (
        f"{len(matching):,} of {len(found['arrays']):,} arrays in {len(rows):,} rows; {size(on_device)} on each device"
    )
    heads = [tag("th", name, scope="col", cls="num" if name in NUMERIC else None) for name in names]
    whole = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", heads)), tag("tbody", body), cls="cards arrays"
    )
    more = None
    if len(rows) > limit:
        more = tag("a", f"Show all {len(rows):,} rows", href=link("/layout", **{**query, "all": "1"}), cls="button")
    save = tag(
        "a", "Download CSV", href=data_url(to_csv(matching)), download=f"{found['id']}-layout.csv", cls="button small"
    )
    return join(
        tag("div", _form(query), save, cls="row between"),
        tag("div", whole, cls="scroll", tabindex=0, role="region", aria_label="Arrays")
        if rows
        else tag("p", "No array matches: the filter looks at path, dtype, part and partition.", cls="empty"),
        tag("p", more) if more else None,
    )


def _form(query: Mapping[str, str]) -> Html:
    def options(names: Mapping[str, str], chosen: str) -> list[Html]:
        return [tag("option", text, value=value, selected=value == chosen) for value, text in names.items()]

    parts = {"": "all parts", **{part: part for part in PARTS}}
    return tag(
        "form",
        tag(
            "input",
            type="search",
            name="q",
            id="layout-q",
            value=query.get("q", ""),
            placeholder="kernel, float32, tensor ...",
            aria_label="Arrays with",
        ),
        tag("select", options(parts, query.get("part", "")), name="part", id="layout-part", aria_label="Part"),
        tag(
            "label",
            "Order ",
            tag("select", options(SORTS, query.get("sort", "")), name="sort", id="layout-sort"),
        ),
        cls="row controls",
        role="search",
        data_query=True,
    )


def _row(
    kind: list[Array], other: Mapping[str, Array] | None, query: Mapping[str, str], chosen: Array | None, number: int
) -> Html:
    array, many = kind[0], len(kind)
    is_chosen = chosen is not None and any(one is chosen for one in kind)
    path = array["path"] if many == 1 else array["group"]
    away = "" if array["memory"] == "device" else ", in host memory"
    cells: list[tuple[str, Child, str]] = [
        (
            "Array",
            tag(
                "div",
                tag(
                    "a",
                    path,
                    href=link("/layout", **{**query, "array": name_of(array)}),
                    cls="mono",
                    aria_current="true" if is_chosen else None,
                ),
                tag("div", f"{array['part']}{f', {many} equal' if many > 1 else ''}{away}", cls="small muted"),
            ),
            "name",
        ),
        (
            "Shape",
            tag("div", format_shape(array["shape"]), tag("div", array["dtype"], cls="small muted")),
            "nowrap",
        ),
        ("Bytes", size(sum(one["bytes"] for one in kind)), "num nowrap"),
        ("Partition", _partition(array), ""),
        ("Block", format_shape(array["device_shape"]), "nowrap"),
        ("Each device", size(sum(one["device_bytes"] for one in kind)), "num nowrap"),
        ("Copies", tag("span", f"×{array['replicas']}", cls="replicas"), "num"),
    ]
    if other is not None:
        there = [other[name_of(one)] for one in kind if name_of(one) in other]
        changed = bool(there) and there[0]["spec"] != array["spec"]
        cells += [
            ("Second: partition", (_partition(there[0]), " ≠" if changed else "") if there else "-", ""),
            ("Second: device", size(sum(one["device_bytes"] for one in there)), "num nowrap"),
        ]
    cells.append(("Rule", _why(array, f"why-{number}-{array['part']}-{array['path']}"), "why"))
    return tag(
        "tr",
        [tag("td", value, cls=cls or None, data_label=label) for label, value, cls in cells],
        cls="chosen" if is_chosen else None,
    )


def _partition(array: Array) -> Html:
    """Logical axis of each dimension, with the mesh axes that shard it."""
    if not array["shape"]:
        return tag("span", "scalar", cls="muted")
    pieces = [
        tag(
            "span",
            f"{logical or '·'}",
            tag("b", f"→{format_axes(entry)}") if entry else None,
            cls="chip over" if entry else "chip",
        )
        for logical, entry in zip(array["axes"], array["spec"], strict=True)
    ]
    return tag("span", pieces, cls="chips", title=format_spec(array["spec"]))


def _why(array: Array, name: str) -> Html:
    if not array["why"]:
        return tag("span", "no rule applies: replicated", cls="muted")
    lines = [
        tag(
            "li",
            tag("b", f"{one['dimension']} {one['logical'] or '-'} "),
            "" if one["rule"] is None else f"#{one['rule']} ",
            f"{format_axes(one['axes'])} ",
            _outcome(one["outcome"]),
            tag("span", f": {one['why']}", cls="muted"),
        )
        for one in sorted(array["why"], key=lambda one: one["dimension"])
    ]
    return tag(
        "details", tag("summary", ", ".join(applied_rules(array))), tag("ul", lines, cls="plain why-list"), id=name
    )


def _outcome(outcome: str) -> Html:
    sign = {"taken": "✔ ", "indivisible": "! "}.get(outcome, "")
    return tag("span", f"{sign}{outcome}", cls="ok nowrap" if outcome == "taken" else "muted nowrap")


def to_csv(arrays: Iterable[Array]) -> str:
    """Returns CSV with one row per array."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for array in arrays:
        writer.writerow(
            [
                guarded(array["part"]),
                guarded(array["path"]),
                guarded(array["dtype"]),
                format_shape(array["shape"]),
                array["bytes"],
                f"({format_spec(array['spec'])})",
                format_shape(array["device_shape"]),
                array["device_bytes"],
                array["replicas"],
                array["memory"],
                guarded("; ".join(applied_rules(array))),
            ]
        )
    return out.getvalue()


def guarded(text: object) -> str:
    """Escapes a cell that a spreadsheet would run as a formula."""
    words = str(text)
    return f"'{words}" if words.startswith(("=", "+", "-", "@", "\t", "\r")) else words


def data_url(text: str, kind: str = "text/csv") -> str:
    """Returns a `data:` URL of a small file."""
    return f"data:{kind};charset=utf-8,{quote(text)}"


def _text(array: Array) -> str:
    return f"{array['path']} {array['part']} {array['dtype']} {format_spec(array['spec'])}".lower()


def _kind(array: Array) -> str:
    names = ("part", "group", "shape", "dtype", "axes", "spec", "device_shape", "replicas", "memory", "why")
    return json.dumps([array[name] for name in names])
