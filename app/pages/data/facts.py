"""What `nnxdsl data --json` tells of a source, as texts and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ...components.plots import COLOURS, ROW_PIXELS, styled
from ...markdown import plain

LENGTHS = ("min", "median", "p95", "max", "total")

Part = Mapping[str, Any]


def parts_of(found: Mapping[str, Any]) -> dict[str, Part]:
    """The parts of an answer by name: what a file has, training and held-out data, and the sources of a mixture."""
    parts: dict[str, Part] = {}
    for name, part in found.items():
        if isinstance(part, Mapping):
            parts[name] = part
            parts |= {f"{name}, {source['name']}": source for source in part.get("sources") or ()}
    return parts


def facts(part: Part) -> str:
    """Markdown of what a part is and how much of it is trained on."""
    lines = [f"**! Refused: {plain(part['refused'])}**"] if part.get("refused") else []
    if "report" not in part:
        read_as = part.get("kind") or "not recognised; name the columns with columns={'theirs': 'ours'}"
        lines.append(f"**{part['rows']:,} rows** of {plain(part['source'])}, read as {plain(read_as)}")
        lines += [f"Tokens: {plain(part['tokens'])}"] if part.get("tokens") else []
        lines += [
            f"- {plain(one['name'])}: in {one['rows']:,} rows, {plain(', '.join(one['kinds']))}, "
            f"{one['characters']:,} characters"
            for one in part["columns"]
        ]
        return "\n\n".join(lines)
    report, tokens, with_loss = part["report"], part["tokens"], part["tokens_with_loss"]
    lines.append(
        f"**{report['rows']:,} rows** of {plain(report['source'])}, {report['accepted']:,} accepted, "
        f"as {plain(part['kind'])}"
    )
    loss = "" if with_loss is None else f", {with_loss:,} of them with loss ({with_loss / max(1, tokens):.1%})"
    lines.append(f"{tokens:,} tokens{loss}")
    if part.get("share") is not None:
        lines.append(f"{part['share']:.1%} of the rows of a step, {part.get('epochs') or 0:.2f} epochs in the run")
    if padding := part.get("padding"):
        lines.append(f"{padding['share']:.1%} padding ({plain(padding['batching'])}, {padding['batch_size']:,} rows)")
    for label, text in (
        ("Layout", report["layout"]),
        ("Tokenizer", part.get("tokenizer")),
        ("Columns", part["columns"]),
    ):
        if text:
            lines.append(f"{label}: {plain(text if isinstance(text, str) else ', '.join(text))}")
    unread = ", ".join(f"{name} ({rows:,})" for name, rows in report["unread"].items())
    return "\n\n".join([*lines, *([f"Columns that are not read: {plain(unread)}"] if unread else [])])


def problems(part: Part) -> pd.DataFrame:
    """A table of the rows that are left out, odd or truncated: what became of them, why, how many, and the first."""
    report = part.get("report") or {
        "dropped": part.get("bad", {}),
        "odd": {},
        "cut": {},
        "first": part.get("first", {}),
    }
    rows = [
        {"rows": count, "what": what, "why": kind, "first": report["first"].get(kind, "")}
        for what, counts in (("left out", report["dropped"]), ("odd, accepted", report["odd"]))
        for kind, count in counts.items()
    ]
    rows += [{"rows": count, "what": "truncated", "why": name, "first": ""} for name, count in report["cut"].items()]
    return pd.DataFrame(rows, columns=["rows", "what", "why", "first"])


def lengths(part: Part) -> pd.DataFrame:
    """A table of the lengths of the parts of a row, in tokens."""
    return pd.DataFrame([{"part": name, **{key: own[key] for key in LENGTHS}} for name, own in part["lengths"].items()])


def lengths_plot(part: Part, columns: int) -> go.Figure:
    """A histogram of the tokens of each part of a row, in so many columns."""
    own = part["lengths"]
    rows = -(-len(own) // columns)
    drawn = make_subplots(rows=rows, cols=columns, subplot_titles=list(own), vertical_spacing=0.15 if rows > 1 else 0)
    for place, one in enumerate(own.values()):
        histogram = one["histogram"]
        width, counts = histogram["width"], histogram["counts"]
        starts = [histogram["start"] + index * width for index in range(len(counts))]
        drawn.add_trace(
            go.Bar(
                x=[start + (width - 1) / 2 for start in starts],
                y=counts,
                width=width,
                marker_color=COLOURS[0],
                customdata=[f"{start:,} to {start + width - 1:,}" if width > 1 else f"{start:,}" for start in starts],
                hovertemplate="%{customdata} tokens: %{y:,} rows<extra></extra>",
                showlegend=False,
            ),
            row=place // columns + 1,
            col=place % columns + 1,
        )
    drawn.update_yaxes(title_text="rows", col=1)
    drawn.update_xaxes(title_text="tokens", row=rows)
    return styled(drawn, rows * ROW_PIXELS + 60)
