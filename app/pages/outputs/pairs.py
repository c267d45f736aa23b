"""The Pairs tab: rewards and margins of held-out pairs, accuracy with its interval, correlation with length, checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr
import pandas as pd
import plotly.graph_objects as go

from ...html import link
from ...markdown import plain
from ...processes.outputs_worker import Request
from ...state import Site
from ...view import Done, Query, Values, View
from ...words import number
from .charts import histogram, scatter
from .forms import Form, number_fields, save_buttons, saved
from .request import MOST_PAIRS, Chosen
from .stats import Group, correlation, margin, recorded_difference, reward, wilson

Row = Mapping[str, Any]
SIDES = ("chosen", "rejected")
CHARACTERS = 160
"""At most of a text in the table; a selected row shows the whole texts."""

ROUGH = {"float32": 1e-4, "bfloat16": 0.5}
"""Tolerance, in nats per token, for rounding differences between two equal models."""

CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Tolerance for differences to the run's own metrics: relative to max(|metric|, 1)."""

SORTS: dict[str, Callable[[Row], float]] = {
    "worst first": lambda row: _or_inf(margin(row)),
    "best first": lambda row: -_or_inf(margin(row)),
    "longest first": lambda row: -max(row["chosen_tokens"], row["rejected_tokens"]),
    "as in the file": lambda row: 0.0,
}
TEXTS = {"row": 80, "prompt": 210, "chosen": 170, "rejected": 170, "right?": 100}
NUMBERS = {"reward chosen": 150, "reward rejected": 160, "margin": 100}
LENGTHS = {"tokens chosen": 150, "tokens rejected": 160, "per token chosen": 170, "per token rejected": 180}
COLUMNS = ("row", "prompt", *SIDES, *NUMBERS, "right?", *LENGTHS)
"""Columns of the table; their widths are above."""


class Pairs:
    """Components of the tab."""

    def __init__(self, site: Site, view: View) -> None:
        """Adds the components."""
        self._site = site
        gr.Markdown("Rewards and margins of the held-out pairs, computed as in the run's own evaluation.")
        fields = number_fields(("limit", "Max pairs", f"The first ones of the held-out data; at most {MOST_PAIRS:,}"))
        self.form = Form(site, view, "pairs", "Compute", fields)
        with gr.Column(visible=False) as self.found:
            with gr.Row():
                with gr.Column(min_width=320):
                    self._summary, self._margins = gr.Markdown(), gr.Plot(show_label=False)
                with gr.Column(min_width=320):
                    self._checks, self._lengths = gr.Markdown(), gr.Plot(show_label=False)
            first, *_ = SORTS
            self._order = view.control("sort", gr.Dropdown(list(SORTS), value=first, label="Order"), first)
            self._table = gr.Dataframe(
                datatype=["str" if name in TEXTS else "number" for name in COLUMNS],
                interactive=False,
                show_search="filter",
                pinned_columns=1,
                column_widths=[{**TEXTS, **NUMBERS, **LENGTHS}[name] for name in COLUMNS],
                max_height=520,
            )
            view.does(self._table.select, _selected, has_event=True)
            with gr.Group(visible=False) as self._pair:
                labels = ("Prompt", "Chosen", "Rejected")
                self._texts = [gr.Textbox(label=label, lines=1, max_lines=12, interactive=False) for label in labels]
                self._open = gr.Button("Token by token", link="#")
            self._saves = save_buttons("csv", "jsonl")
        self.outputs = [
            *(self.found, self._summary, self._checks, self._margins, self._lengths, self._order, self._table),
            *(self._pair, *self._texts, self._open, *self._saves.values()),
        ]

    def values(self, here: Chosen, requests: Sequence[Request], query: Query) -> Values:
        """What a result shows."""
        (found,) = requests
        assert found.result is not None
        rows: list[Row] = found.result["rows"]
        margins = [value for row in rows if (value := margin(row)) is not None]
        first, *_ = SORTS
        sort = query["sort"] if query.get("sort") in SORTS else first
        return {
            self.found: gr.update(visible=True),
            self._summary: _summary(rows, found.result),
            self._checks: _checks(rows, found.result),
            self._margins: histogram("Margins", margins, "reward margin"),
            self._lengths: _lengths(rows),
            self._order: sort,
            self._table: gr.update(value=_table(sorted(rows, key=SORTS[sort])), label=_caption(rows, found.result)),
            **self._selected_pair(here, rows, query.get("pair", "")),
            **saved(self._site, self._saves, found),
        }

    def _selected_pair(self, here: Chosen, rows: Sequence[Row], name: str) -> Values:
        names = _short_names(rows)
        row = next((row for row in rows if name and names[str(row["row"])] == name), None)
        if row is None:
            return {self._pair: gr.update(visible=False)}
        tokens = self._site.settings.root + link("/outputs", **here.query, tab="tokens", row=row["row"])
        return {
            self._pair: gr.update(visible=True),
            **{box: str(row[part]) for box, part in zip(self._texts, ("prompt", *SIDES), strict=True)},
            self._open: gr.update(value=f"Row {name}, token by token", link=tokens),
        }


def _selected(query: Query, client: str, event: gr.SelectData) -> Done:
    return Done(query={"pair": str(event.row_value[0])})


def _summary(rows: Sequence[Row], result: Mapping[str, Any]) -> str:
    whole = Group.of(rows)
    low, high = wilson(whole.right, whole.count)
    objective = str(result["objective"]).rpartition(".")[2]
    lines = [
        f"### {plain(objective)}: step {result['step']:,} against {plain(str(result['against']))}",
        f"- Pairs: {whole.count:,}",
    ]
    if whole.accuracy is not None:
        lines.append(f"- Accuracy: **{whole.accuracy:.1%}** (95 % interval {low:.1%} to {high:.1%})")
        lines.append(f"- Mean margin: {number(whole.margin)}")
    longer = [row for row in rows if row["chosen_tokens"] > row["rejected_tokens"]]
    shorter = [row for row in rows if row["chosen_tokens"] < row["rejected_tokens"]]
    for name, group in (("Chosen is longer", Group.of(longer)), ("Chosen is shorter", Group.of(shorter))):
        if group.accuracy is not None:
            lines.append(f"- {name}: {group.accuracy:.1%} of {group.count:,}, mean margin {number(group.margin)}")
    if len(rows) < result["total"]:
        lines.append(f"- The first {len(rows):,} of {result['total']:,} held-out pairs")
    if result.get("is_feedback"):
        lines.append("- Unpaired answers with a label: each is shown next to one of another prompt")
    return "\n".join(lines)


def _checks(rows: Sequence[Row], result: Mapping[str, Any]) -> str:
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
    return f"### Checks\n- Step 0: {step_0}\n- Metrics of the run: {_compared(rows, result)}"


def _compared(rows: Sequence[Row], result: Mapping[str, Any]) -> str:
    if len(rows) < result["total"]:
        return "compared only if all held-out pairs are computed: raise Max pairs."
    difference = recorded_difference(rows, result["recorded"])
    if not difference:
        return "the run was not evaluated at this step: there are no metrics to compare with."
    name, largest = max(difference.items(), key=lambda item: abs(item[1]))
    scale = max(1.0, abs(result["recorded"][name]))
    is_good = abs(largest) <= CLOSE.get(result["first"]["compute"], 2e-2) * scale
    words = f"{_sign(is_good)} the means here and the run's metrics at this step differ by at most "
    words += f"{number(abs(largest))} ({plain(name.removeprefix('eval/'))})."
    return words if is_good else f"{words} The held-out file or the initial weights may have changed since."


def _sign(is_good: bool) -> str:
    return "✔" if is_good else "✘"


def _lengths(rows: Sequence[Row]) -> go.Figure:
    groups: list[tuple[str, list[float], list[float], list[str]]] = []
    names = _short_names(rows)
    for side in SIDES:
        here = [(row, value) for row in rows if (value := reward(row, side)) is not None]
        lengths, rewards = [float(row[f"{side}_tokens"]) for row, _ in here], [value for _, value in here]
        both = correlation(lengths, rewards)
        name = f"{side}, correlation {'-' if both is None else f'{both:+.2f}'}"
        groups.append((name, lengths, rewards, [f"row {plain(names[str(row['row'])])}" for row, _ in here]))
    return scatter("Reward by length", groups, "tokens", "reward")


def _table(rows: Sequence[Row]) -> pd.DataFrame:
    lines, names = [], _short_names(rows)
    for row in rows:
        value = margin(row)
        rewards = [reward(row, side) for side in SIDES]
        counts = [row[f"{side}_tokens"] for side in SIDES]
        each = [None if one is None else one / max(count, 1) for one, count in zip(rewards, counts, strict=True)]
        lines.append(
            [
                names[str(row["row"])],
                *(_begins(row[part]) for part in ("prompt", *SIDES)),
                *map(_rounded, (*rewards, value)),
                "-" if value is None else "✔ right" if value > 0 else "✘ wrong",
                *counts,
                *map(_rounded, each),
            ]
        )
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _caption(rows: Sequence[Row], result: Mapping[str, Any]) -> str:
    return f"{len(rows):,} of {result['total']:,} held-out pairs; select a row for its texts and tokens"


def _begins(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _short_names(rows: Sequence[Row]) -> dict[str, str]:
    """By the name of each row: its line, if all are of one file."""
    names = [str(row["row"]) for row in rows]
    is_one_file = len({name.rpartition(":")[0] for name in names}) == 1
    return {name: name.rpartition(":")[2] if is_one_file else name for name in names}


def _or_inf(value: float | None) -> float:
    return float("inf") if value is None else value
