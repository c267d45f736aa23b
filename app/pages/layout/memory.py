"""The memory of a device: a bar of its parts for each plan, and a table with the formula of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from nnxdsl.terminal.plan_format import format_mesh

from ...components.plots import styled
from ...formatting import size
from .arrays import Plan, unit_of

COLOURS = {
    "frozen weights": "#2f6fed",
    "trainable weights": "#d9480f",
    "optimizer": "#2b8a3e",
    "frozen weights, transposed": "#91a7ff",
    "gradients": "#ffa94d",
    "activations": "#9c36b5",
    "workspace": "#868e96",
    "teacher": "#c2255c",
    "reference copy": "#087f8b",
}
OTHER = "#5f3dc4"
"""Colour of parts that have none of their own."""


def memory_bars(plans: Sequence[Plan], *, is_narrow: bool = False) -> go.Figure:
    """Draws a bar for each plan, of what is in a device's memory; the end of its memory is marked where it is near."""
    plot = go.Figure()
    totals = [plan["bytes_per_device"] for plan in plans]
    unit, divisor = unit_of(totals)
    parts = [[part for part in plan["memory"] if part["memory"] == "device" and part["bytes"]] for plan in plans]
    for name in dict.fromkeys(part["name"] for each in parts for part in each):
        rows = [(index, part) for index, each in enumerate(parts) for part in each if part["name"] == name]
        texts = [
            [size(part["bytes"]), f"{part['bytes'] / max(1, totals[index]):.1%}", part["tag"], escape(part["formula"])]
            for index, part in rows
        ]
        plot.add_bar(
            x=[part["bytes"] / divisor for _, part in rows],
            y=[index for index, _ in rows],
            customdata=texts,
            name=escape(name),
            orientation="h",
            width=0.6,
            marker={"color": COLOURS.get(name, OTHER), "line": {"width": 0}},
            hovertemplate="<b>%{fullData.name}</b> %{customdata[0]}, %{customdata[1]}<br>"
            "%{customdata[2]}: %{customdata[3]}<extra></extra>",
        )
    device, end, label = plans[0]["device"], max(totals) / divisor, f"{unit} on each device"
    if device and device["memory"]:
        usable = device["usable"] / divisor
        label += f", of which {size(device['usable'])} is usable"
        if end > usable / 8:  # else the parts would be too small to be told apart
            end = max(end, device["memory"] / divisor)
            line = {"width": 2, "dash": "dash", "color": "#c92a2a"}
            plot.add_vline(usable, line=line, annotation_text="usable", annotation_position="top left")
    names = [format_mesh(plan["mesh"]).partition(" (")[0].replace(" x ", "<br>") for plan in plans]
    legend = 160 if is_narrow else 50  # pixels
    styled(plot, legend + 70 + 60 * len(plans))
    plot.update_layout(barmode="stack", margin={"t": legend, "b": 60}, legend={"traceorder": "normal"})
    plot.update_xaxes(title=label.replace(", ", ",<br>") if is_narrow else label, range=[0, end * 1.02])
    plot.update_yaxes(tickvals=list(range(len(plans))), ticktext=names, autorange="reversed", automargin=True)
    return plot


def memory_parts(plans: Sequence[Plan]) -> pd.DataFrame:
    """Returns a row for each part: its bytes in each plan, whether that is exact, and how it is computed."""
    parts = [{(part["name"], part["memory"]): part for part in plan["memory"] if part["bytes"]} for plan in plans]
    rows: list[dict[str, str]] = []
    for key in dict.fromkeys(key for each in parts for key in each):
        name, memory = key
        values: list[Mapping[str, Any]] = [each[key] for each in parts if key in each]
        row = {"part": name if memory == "device" else f"{name} (host's memory)"}
        for column, each, plan in zip(("memory", "second mesh"), parts, plans, strict=False):
            total = plan["bytes_per_device" if memory == "device" else "host_bytes_per_device"]
            share = each[key]["bytes"] / max(1, total) if key in each else 0
            percent = "<1%" if share < 0.005 else f"{share:.0%}"
            row[column] = f"{size(each[key]['bytes'])}, {percent}" if key in each else "-"
        row["basis"] = " / ".join(dict.fromkeys(part["tag"] for part in values))
        row["formula"] = "; on the second mesh: ".join(dict.fromkeys(part["formula"] for part in values))
        rows.append(row)
    return pd.DataFrame(rows)
