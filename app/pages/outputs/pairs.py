"""The Pairs tab: rewards and margins of held-out pairs, accuracy with its interval, correlation with length, checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr
import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ...components.plots import COLOURS, styled
from ...formatting import number, rounded, shortened
from ...markup import link, plain
from ...processes.outputs_worker import Request
from ...view import Done, Query, Values, View
from .interval import wilson
from .request import Chosen
from .tab import Tab, save_buttons, saved

Row = Mapping[str, Any]
SIDES = ("chosen", "rejected")
CHARACTERS = 160  # at most of a text in the table; a selected row shows the whole texts
BINS = 20
ZERO = {"width": 1, "dash": "dot", "color": "#888"}
ROUGH = {"float32": 1e-4, "bfloat16": 0.5}
"""Tolerance, in nats per token, for rounding differences between two equal models."""

CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Tolerance for differences to the run's own metrics: relative to max(|metric|, 1)."""

SORTS = ("worst first", "best first", "longest first", "as in the file")
COLUMNS = {
    "row": 80, "prompt": 210, "chosen": 170, "rejected": 170, "reward chosen": 150, "reward rejected": 160,
    "margin": 100, "right?": 100, "tokens chosen": 150, "tokens rejected": 160, "per token chosen": 170,
    "per token rejected": 180,
}  # fmt: skip
"""Columns of the table with their widths, in pixels."""

RECORDED = {
    "eval/rewards/chosen": "reward chosen",
    "eval/rewards/rejected": "reward rejected",
    "eval/rewards/margins": "margin",
    "eval/logps/chosen": "logps chosen",
    "eval/logps/rejected": "logps rejected",
}
"""Metrics of the run that are means of columns."""

TEXTS = ("row", "prompt", *SIDES, "right?")  # those that are no numbers


class Pairs(Tab):
    """Rewards and margins of held-out pairs."""

    name = "pairs"
    title, button = "Pairs", "Compute"
    needs = "held-out pairs"
    hint = "Press Compute to see rewards and margins of every held-out pair, computed as in the run's own evaluation."

    def _add_result(self, view: View) -> None:
        with gr.Row():
            with gr.Column(min_width=320):
                self._summary, self._margins = gr.Markdown(), gr.Plot(show_label=False)
            with gr.Column(min_width=320):
                self._checks, self._lengths = gr.Markdown(), gr.Plot(show_label=False)
        self._order = view.control("sort", gr.Dropdown(list(SORTS), value=SORTS[0], label="Order"), SORTS[0])
        self._table = gr.Dataframe(
            datatype=["str" if name in TEXTS else "number" for name in COLUMNS],
            interactive=False,
            show_search="filter",
            pinned_columns=1,
            column_widths=list(COLUMNS.values()),
            max_height=520,
        )
        view.on(self._table.select, _selected, has_event=True)
        with gr.Group(visible=False) as self._pair:
            labels = ("Prompt", "Chosen", "Rejected")
            self._texts = [gr.Textbox(label=label, lines=1, max_lines=12, interactive=False) for label in labels]
            self._open = gr.Button("Token by token", link="#")
        self._saves = save_buttons("csv", "jsonl")

    def _values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        result = requests[0].result
        assert result is not None
        rows: list[Row] = result["rows"]
        sort = query["sort"] if query.get("sort") in SORTS else SORTS[0]
        table = _table(rows)
        caption = f"{len(rows):,} of {result['total']:,} held-out pairs; select a row for its texts and tokens"
        values: dict[Any, Any] = {
            self._summary: _summary(table, result),
            self._checks: _checks(table, result),
            self._margins: _margins(table),
            self._lengths: _lengths(table),
            self._order: sort,
            self._table: gr.update(value=_sorted(table, sort), label=caption),
            self._pair: gr.update(visible=False),
            **saved(self.site, self._saves, requests[0]),
        }
        name = query.get("pair", "")
        for row in (row for row, short in zip(rows, table["row"], strict=True) if name and short == name):
            tokens = self.site.settings.root + link("/outputs", **here.query, tab="tokens", row=row["row"])
            values[self._pair] = gr.update(visible=True)
            values |= {box: str(row[part]) for box, part in zip(self._texts, ("prompt", *SIDES), strict=True)}
            values[self._open] = gr.update(value=f"Row {name}, token by token", link=tokens)
        return values


def _selected(query: Query, event: gr.SelectData) -> Done:
    return Done(query={"pair": str(event.row_value[0])})


def _table(rows: Sequence[Row]) -> pd.DataFrame:
    """A line for each pair; a row is named by its line in the file, if all are of one.

    Rewards are implicit ones, and log-ratios if the objective has no rewards.
    """
    cells = [{name: str(row[name]) for name in ("row", "prompt", *SIDES)} for row in rows]
    table = pd.DataFrame(cells, columns=["row", "prompt", *SIDES], dtype=str)
    for index, side in enumerate(SIDES):
        table[f"tokens {side}"] = [row[f"{side}_tokens"] for row in rows]
        table[f"logps {side}"] = [row["policy"][index] for row in rows]
    for name in (*SIDES, "margins"):
        table[f"reward {name}"] = pd.Series([row["rewards"].get(name) for row in rows], dtype=float)
    for side in SIDES:
        table[f"per token {side}"] = table[f"reward {side}"] / table[f"tokens {side}"].clip(lower=1)
    table = table.rename(columns={"reward margins": "margin"})
    table["right?"] = ["-" if np.isnan(one) else "✔ right" if one > 0 else "✘ wrong" for one in table["margin"]]
    if len({row.rpartition(":")[0] for row in table["row"]}) == 1:
        table["row"] = table["row"].str.rpartition(":")[2]
    return table


def _sorted(table: Any, sort: str) -> pd.DataFrame:
    """The table in an order, with beginnings of texts, and numbers of four significant digits."""
    if sort == "longest first":
        lengths = table[[f"tokens {side}" for side in SIDES]].max(axis=1)
        table = table.loc[lengths.sort_values(ascending=False, kind="stable").index]
    elif sort != "as in the file":
        table = table.sort_values("margin", ascending=sort == "worst first", kind="stable")

    def shown(name: str) -> Any:
        column: Any = table[name]
        if name in TEXTS:
            return column.map(lambda text: shortened(text, CHARACTERS))
        return column.map(rounded) if column.dtype == float else column

    return pd.DataFrame({name: shown(name) for name in COLUMNS})


def _summary(table: Any, result: Mapping[str, Any]) -> str:
    objective, margins = str(result["objective"]).rpartition(".")[2], table["margin"].dropna()
    lines = [
        f"### {plain(objective)}: step {result['step']:,} against {plain(str(result['against']))}",
        f"- Pairs: {len(margins):,}",
    ]
    if len(margins):
        low, high = wilson(int((margins > 0).sum()), len(margins))
        lines.append(f"- Accuracy: **{(margins > 0).mean():.1%}** (95 % interval {low:.1%} to {high:.1%})")
        lines.append(f"- Mean margin: {number(margins.mean())}")
    more = (table["tokens chosen"] - table["tokens rejected"])[margins.index]
    for name, part in (("longer", margins[more > 0]), ("shorter", margins[more < 0])):
        if len(part):
            text = f"{(part > 0).mean():.1%} of {len(part):,}, mean margin {number(part.mean())}"
            lines.append(f"- Chosen is {name}: {text}")
    if len(table) < result["total"]:
        lines.append(f"- The first {len(table):,} of {result['total']:,} held-out pairs")
    if result.get("is_feedback"):
        lines.append("- Unpaired answers with a label: each is shown next to one of another prompt")
    return "\n".join(lines)


def _checks(table: Any, result: Mapping[str, Any]) -> str:
    """That the initial policy is the reference, and that the means are those which the run wrote."""
    first, largest = result["first"], result["first"]["largest"]
    limit = ROUGH.get(first["compute"], 0.5)
    if first["expected"]:
        is_good = largest <= limit
        step_0 = f"{_sign(is_good)} {number(largest)} nats is the largest per-token difference of the initial policy "
        step_0 += f"and the reference, over {first['rows']:,} pairs; "
        step_0 += "they are equal up to rounding." if is_good else f"more than {limit:g}: they are not the same model."
    else:
        step_0 = f"The initial policy differs by up to {number(largest)} nats from {plain(str(result['against']))}, "
        step_0 += "another model."
    return f"### Checks\n- Step 0: {step_0}\n- Metrics of the run: {_compared(table, result)}"


def _compared(table: Any, result: Mapping[str, Any]) -> str:
    if len(table) < result["total"]:
        return "compared only if all held-out pairs are computed: raise Max pairs."
    recorded = pd.Series(result["recorded"], dtype=float)
    means = table[list(RECORDED.values())].mean(skipna=False).set_axis(list(RECORDED))
    differences = (means - recorded).dropna()
    if differences.empty:
        return "the run was not evaluated at this step: there are no metrics to compare with."
    name = differences.abs().idxmax()
    is_good = abs(differences[name]) <= CLOSE.get(result["first"]["compute"], 2e-2) * max(1.0, abs(recorded[name]))
    text = f"{_sign(is_good)} the means here and the run's metrics at this step differ by at most "
    text += f"{number(abs(differences[name]))} ({plain(str(name).removeprefix('eval/'))})."
    return text if is_good else f"{text} The held-out file or the initial weights may have changed since."


def _sign(is_good: bool) -> str:
    return "✔" if is_good else "✘"


def _margins(table: Any) -> go.Figure:
    """A histogram of margins; 0 is the edge of a bin, and bars below it are hatched."""
    margins = table["margin"].dropna()
    low, high = min([0.0, *margins]), max([0.0, *margins])
    width = (high - low) / BINS or 1.0
    edges = np.arange(np.floor(low / width), np.ceil(high / width + 1e-9) + 1) * width
    middles, counts = edges[:-1] + width / 2, np.histogram(margins, edges)[0]
    plot = go.Figure()
    for name, colour, shape, part in (("right", COLOURS[0], "", middles > 0), ("wrong", COLOURS[1], "/", middles < 0)):
        marker = {"color": colour, "pattern": {"shape": shape}}
        about = f"%{{x:.4g}} ± {width / 2:.4g}: %{{y}} pairs"
        plot.add_bar(
            x=middles[part], y=counts[part], width=width, name=name, marker=marker, hovertemplate=about, showlegend=True
        )
    return _styled(plot.add_vline(0, line=ZERO), "Margins", "reward margin", "pairs")


def _lengths(table: Any) -> go.Figure:
    """Rewards over lengths, with their Pearson correlation."""
    plot = go.Figure()
    for side, symbol, colour in zip(SIDES, ("circle", "x"), COLOURS, strict=False):
        part = table.dropna(subset=[f"reward {side}"])
        tokens, rewards = part[f"tokens {side}"], part[f"reward {side}"]
        both = tokens.corr(rewards) if len(part) > 2 else np.nan
        plot.add_scatter(
            x=tokens,
            y=rewards,
            mode="markers",
            marker={"symbol": symbol, "color": colour},
            name=f"{side}, correlation {'-' if np.isnan(both) else f'{both:+.2f}'}",
            text=part["row"],
        )
    return _styled(plot.add_hline(0, line=ZERO), "Reward by length", "tokens", "reward")


def _styled(plot: go.Figure, title: str, x: str, y: str) -> go.Figure:
    plot.update_layout(title={"text": title, "font": {"size": 13}, "x": 0.5, "y": 0.88}, barmode="overlay")
    return styled(plot.update_xaxes(title=x).update_yaxes(title=y))
