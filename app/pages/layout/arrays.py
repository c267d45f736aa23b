"""The table of a plan's arrays: filters, sorting, grouping of equal arrays, applied rules; and its CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from nnxdsl.terminal.array_selection import array_name, by_layout
from nnxdsl.terminal.plan_format import applied_rules, format_axes, format_shape, format_spec

from ...formatting import rounded, size

SORTS = {"": "model order", "device": "bytes per device", "bytes": "total bytes", "copies": "copies"}
PARTS = ("frozen", "trainable", "reference", "optimizer")
SIGNS = {"taken": "✔ ", "indivisible": "! "}
CSV_COLUMNS = (
    "part", "path", "dtype", "shape", "bytes", "partition", "device_shape", "device_bytes", "replicas", "memory",
    "rules",
)  # fmt: skip

Array = Mapping[str, Any]
Plan = Mapping[str, Any]  # output of `nnxdsl plan --json`

_ORDERS: dict[str, Callable[[Sequence[Array]], int]] = {
    "copies": lambda kind: kind[0]["replicas"],
    "device": lambda kind: sum(array["device_bytes"] for array in kind),
    "bytes": lambda kind: sum(array["bytes"] for array in kind),
}
"""What sorts are by, of equal arrays of all layers; the largest comes first."""


def name_of(array: Array) -> str:
    """Name of an array in URLs: its part and its path."""
    return f"{array['part']}:{array['path']}"


def folded(arrays: Iterable[Array]) -> list[list[Array]]:
    """Groups arrays of different layers that have the same shape and sharding."""
    return by_layout(list(arrays), lambda array: array["part"])


def filtered(arrays: Iterable[Array], query: Mapping[str, str]) -> list[Array]:
    """Arrays that match a query's `q` and `part`, sorted by its `sort`."""
    terms, part, order = query.get("q", "").lower().split(), query.get("part", ""), _ORDERS.get(query.get("sort", ""))
    matching: list[Array] = []
    for array in arrays:
        text = f"{array['path']} {array['part']} {array['dtype']} {format_spec(array['spec'])}".lower()
        matching += [array] if part in ("", array["part"]) and all(word in text for word in terms) else []
    if order is None:
        return matching
    return [array for kind in sorted(folded(matching), key=order, reverse=True) for array in kind]


def selected(arrays: Sequence[Array], query: Mapping[str, str]) -> Array | None:
    """The array that a query names; by default the one with the most bytes."""
    named = query.get("array", "")
    largest = max(arrays, key=lambda array: (array["part"] != "optimizer", array["bytes"]), default=None)
    return next((array for array in arrays if named in (name_of(array), array["path"])), largest)


def table(plan: Plan, second: Plan | None, query: Mapping[str, str]) -> tuple[str, pd.DataFrame]:
    """Returns what the table has, and the table: a row for equal arrays of all layers, as a query filters and sorts."""
    matching = filtered(plan["arrays"], query)
    kinds = folded(matching)
    if not kinds:
        return "No array matches: the filter looks at path, dtype, part and partition.", pd.DataFrame()
    other = {name_of(array): array for array in second["arrays"]} if second else {}
    unit, divisor = unit_of(map(_ORDERS["bytes"], kinds))
    rows = []
    for number, kind in enumerate(kinds):
        array = kind[0]
        row = {
            "#": number,
            "array": array_name(kind),
            "part": array["part"] + ("" if array["memory"] == "device" else " (host memory)"),
            "arrays": len(kind),
            "shape": format_shape(array["shape"]),
            "dtype": array["dtype"],
            unit: rounded(_ORDERS["bytes"](kind) / divisor),
            "partition": format_spec(array["spec"]),
            "on a device": format_shape(array["device_shape"]),
            f"{unit} on a device": rounded(_ORDERS["device"](kind) / divisor),
            "copies": array["replicas"],
        }
        if second:
            others = [other[name_of(one)] for one in kind if name_of(one) in other]
            differs = bool(others) and others[0]["spec"] != array["spec"]
            row["second partition"] = f"{format_spec(others[0]['spec'])}{' ≠' if differs else ''}" if others else "none"
            row[f"second {unit} on a device"] = rounded(_ORDERS["device"](others) / divisor)
        rows.append({**row, "rules": ", ".join(applied_rules(array)) or "no rule applies: replicated"})
    caption = f"{len(matching):,} of {len(plan['arrays']):,} arrays in {len(kinds):,} rows"
    return f"{caption}; {size(_ORDERS['device'](matching))} on each device", pd.DataFrame(rows)


def array_of_row(plan: Plan, query: Mapping[str, str], number: int) -> Array | None:
    """Returns the first array of a row of the table, by the row's `#`."""
    kinds = folded(filtered(plan["arrays"], query))
    return kinds[number][0] if 0 <= number < len(kinds) else None


def why(array: Array) -> pd.DataFrame:
    """Returns the rules that were tried for each dimension of an array, and what became of them."""
    rows = [
        {
            "dim": one["dimension"],
            "logical axis": one["logical"] or "-",
            "rule": "" if one["rule"] is None else f"#{one['rule']}",
            "mesh axes": format_axes(one["axes"]),
            "outcome": f"{SIGNS.get(one['outcome'], '')}{one['outcome']}",
            "why": one["why"],
        }
        for one in sorted(array["why"], key=lambda one: one["dimension"])
    ]
    return pd.DataFrame(rows)


def unit_of(counts: Iterable[float]) -> tuple[str, int]:
    """Returns the unit for a column of byte counts, so that it sorts as numbers, and the unit's bytes."""
    largest = max(counts, default=0)
    power = next((power for power in (3, 2, 1) if largest >= 1024**power), 0)
    return ("bytes", "KiB", "MiB", "GiB")[power], 1024**power


def to_csv(arrays: Iterable[Array]) -> str:
    """Returns CSV with one row per array."""
    rows = [
        {
            **array,
            "shape": format_shape(array["shape"]),
            "partition": f"({format_spec(array['spec'])})",
            "device_shape": format_shape(array["device_shape"]),
            "rules": "; ".join(applied_rules(array)),
        }
        for array in arrays
    ]
    return pd.DataFrame(rows, columns=CSV_COLUMNS).map(guarded).to_csv(index=False)


def guarded(cell: Any) -> Any:
    """Escapes a text that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell
