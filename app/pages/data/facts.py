"""What `nnxdsl data --json` tells of a source, as texts, tables and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from nnxdsl.terminal.data_view import facts as data_facts
from nnxdsl.terminal.plan_format import pluralize
from nnxdsl.terminal.row_counts import row_counts

from ...components.plots import COLOURS, ROW_PIXELS, styled
from ...markup import Html, plain, tag

IN_TABLE = ("read", "left out", "held out", "trained on", "accepted", "odd, accepted", "truncated")
"""Facts that are shown otherwise."""
SHOWN = 4_000  # most characters of a run of tokens that are shown
LENGTHS = ("min", "median", "p95", "max", "total")

Part = Mapping[str, Any]


def parts_of(report: Mapping[str, Any]) -> dict[str, Part]:
    """The parts of an answer by name: what a file has, training and held-out data, and the sources of a mixture."""
    parts: dict[str, Part] = {}
    for name, part in report.items():
        if isinstance(part, Mapping):
            parts[name] = part
            parts |= {f"{name}, {source['name']}": source for source in part.get("sources") or ()}
    return parts


def facts(part: Part) -> str:
    """Markdown of what a part is and how much of it is trained on; `row_table` has all of its rows."""
    lines = [f"**! Refused: {plain(part['refused'])}**"] if part.get("refused") else []
    if "report" not in part:  # a file as it is, with its columns
        read_as = part.get("kind") or "not recognised; name the columns with columns={'theirs': 'ours'}"
        lines.append(f"**{part['rows']:,} rows** of {plain(part['source'])}, read as {plain(read_as)}")
        lines += [f"Tokens: {plain(part['tokens'])}"] if part.get("tokens") else []
        lines += [
            f"- {plain(one['name'])}: in {one['rows']:,} rows, {plain(', '.join(one['kinds']))}, "
            f"{one['characters']:,} characters"
            for one in part["columns"]
        ]
        return "\n\n".join(lines)
    report, data = part["report"], data_facts(part)
    rows = f"**{report['accepted']:,} rows {part['use']}** of {plain(report['source'])}"
    lines.append(f"{rows}, as {plain(part['kind'])}")
    if part.get("share") is not None:
        lines.append(f"{part['share']:.1%} of the rows of a step, {part.get('epochs') or 0:.2f} epochs in the run")
    lines += [f"{name.capitalize()}: {plain(text)}" for name, text in data if name not in IN_TABLE]
    return "\n\n".join(lines)


def row_table(part: Part) -> pd.DataFrame:
    """A table of the rows read, left out, held out and trained on, and of odd and truncated ones among them."""
    report = part.get("report")
    if report is None:  # a file as it is
        counts = [("left out", count, why, part["first"].get(why, "")) for why, count in part.get("bad", {}).items()]
    else:
        counts = [*map(tuple, row_counts(report, part["use"]))]
        counts += [("odd, accepted", count, why, report["first"].get(why, "")) for why, count in report["odd"].items()]
        counts += [("truncated", count, name, "") for name, count in report["cut"].items()]
    return pd.DataFrame(counts, columns=["what", "rows", "why", "first"])


def token_runs(examples: Sequence[Mapping[str, Any]]) -> Html:
    """Returns rows as `nnxdsl data --json` has them; the parts of a row stand beside each other."""
    rows = [
        tag("section", tag("b", one["row"]), tag("div", map(_token_run, one["runs"]), cls="parts")) for one in examples
    ]
    return tag("div", rows, cls="token-runs")


def _token_run(run: Mapping[str, Any]) -> Html:
    kind, name = ("truncated",) * 2 if run["cut"] else ("loss",) * 2 if run["loss"] else ("plain", "no loss")
    text, what = str(run["text"]), f"{run['part']}, {name}, {pluralize(int(run['tokens']), 'token')}"
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text) - SHOWN:,} more characters)"
    return tag("div", tag("span", what, cls="what"), tag("pre", shown.replace("\n", "↵\n")), cls=kind)


def lengths(part: Part) -> pd.DataFrame:
    """A table of the lengths of the parts of a row, in tokens."""
    return pd.DataFrame(
        [{"part": name, **{key: counts[key] for key in LENGTHS}} for name, counts in part["lengths"].items()]
    )


def lengths_plot(part: Part, columns: int) -> go.Figure:
    """A histogram of the tokens of each part of a row, in so many columns."""
    bars: list[dict[str, Any]] = []
    for name, counts in part["lengths"].items():
        width, first = counts["histogram"]["width"], counts["histogram"]["start"]
        for start, count in enumerate(counts["histogram"]["counts"]):
            low, high = first + start * width, first + (start + 1) * width - 1
            interval = f"{low:,} to {high:,} tokens" if width > 1 else f"{low:,} tokens"
            bars.append({"part": name, "tokens": (low + high) / 2, "rows": count, "told": interval})
    rows = -(-len(part["lengths"]) // columns)
    plot = px.bar(
        pd.DataFrame(bars, columns=["part", "tokens", "rows", "told"]),
        x="tokens",
        y="rows",
        facet_col="part",
        facet_col_wrap=columns,
        facet_row_spacing=0.15 if rows > 1 else 0,
        hover_name="told",
        hover_data={"part": False, "tokens": False},
        color_discrete_sequence=COLOURS,
    )
    plot.update_layout(bargap=0)
    plot.for_each_annotation(lambda title: title.update(text=title.text.removeprefix("part=")))
    plot.update_xaxes(matches=None, showticklabels=True)
    plot.update_yaxes(matches=None, showticklabels=True)
    return styled(plot, rows * ROW_PIXELS + 60)
