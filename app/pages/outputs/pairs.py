"""Held-out pairs: rewards, margins, accuracy with a confidence interval, correlation with length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...components.parts import facts, table
from ...html import Child, Html, join, link, tag
from ...words import number
from .charts import histogram, scatter
from .request import Chosen
from .stats import Group, correlation, margin, recorded_difference, reward, wilson

Row = Mapping[str, Any]
SHOWN = 100
SIDES = ("chosen", "rejected")
ROUGH = {"float32": 1e-4, "bfloat16": 0.5}
"""Tolerance, in nats per token, for rounding differences between two equal models."""

CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Tolerance for differences to the run's own metrics: relative to max(|metric|, 1)."""

SORTS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "": ("worst first", lambda row: _or_nan(margin(row))),
    "best": ("best first", lambda row: -_or_nan(margin(row))),
    "long": ("longest first", lambda row: -max(row["chosen_tokens"], row["rejected_tokens"])),
    "file": ("as in the file", lambda row: 0.0),
}


def pairs(here: Chosen, key: str, result: Mapping[str, Any], query: Mapping[str, str]) -> Html:
    """Returns the summary, checks and charts of the pairs, then the table."""
    rows: list[Row] = result["rows"]
    sort = query.get("sort", "")
    sort = sort if sort in SORTS else ""
    margins = [value for row in rows if (value := margin(row)) is not None]
    notes: list[Child] = []
    if len(rows) < result["total"]:
        notes.append(tag("p", f"The first {len(rows):,} of {result['total']:,} held-out pairs.", cls="muted"))
    if result.get("is_feedback"):
        notes.append(
            tag("p", "Unpaired answers with a label: each is shown next to one of another prompt.", cls="muted")
        )
    drawn = [histogram("Margins", margins, "reward margin"), _lengths(rows)]
    return join(
        notes,
        tag("div", _summary(rows, result), _checks(rows, result), drawn, cls="duo"),
        _table(here, rows, sort, query),
        _saved(key),
    )


def _summary(rows: Sequence[Row], result: Mapping[str, Any]) -> Html:
    whole = Group.of(rows)
    low, high = wilson(whole.right, whole.count)
    figures: list[tuple[str, Child]] = [("Pairs", f"{whole.count:,}")]
    if whole.accuracy is not None:
        figures.append(("Accuracy", f"{whole.accuracy:.1%} (95 % interval {low:.1%} to {high:.1%})"))
        figures.append(("Mean margin", number(whole.margin)))
    longer = [row for row in rows if row["chosen_tokens"] > row["rejected_tokens"]]
    shorter = [row for row in rows if row["chosen_tokens"] < row["rejected_tokens"]]
    for name, group in (("Chosen is longer", Group.of(longer)), ("Chosen is shorter", Group.of(shorter))):
        if group.accuracy is not None:
            figures.append((name, f"{group.accuracy:.1%} of {group.count:,}, mean margin {number(group.margin)}"))
    title = f"{str(result['objective']).rpartition('.')[2]}: step {result['step']:,} against {result['against']}"
    return tag("section", tag("h2", title), facts(figures), cls="panel")


def _checks(rows: Sequence[Row], result: Mapping[str, Any]) -> Html:
    first = result["first"]
    limit = ROUGH.get(first["compute"], 0.5)
    largest = first["largest"]
    if first["expected"]:
        is_good = largest <= limit
        message = (
            f"{'✔' if is_good else '✘'} {number(largest)} nats is the largest per-token difference of the initial "
        )
        message += f"policy and the reference, over {first['rows']:,} pairs; "
        message += "they are equal up to rounding." if is_good else f"more than {limit:g}: they are not the same model."
        step_0 = tag("p", message, cls="check ok" if is_good else "check bad")
    else:
        message = f"The initial policy differs by up to {number(largest)} nats from {result['against']}, another model."
        step_0 = tag("p", message, cls="check")
    recorded = _compared(rows, result)
    return tag(
        "section",
        tag("h2", "Checks"),
        tag("h3", "Step 0"),
        step_0,
        tag("h3", "Metrics of the run"),
        recorded,
        cls="panel",
    )


def _compared(rows: Sequence[Row], result: Mapping[str, Any]) -> Html:
    if len(rows) < result["total"]:
        return tag("p", "Compared only if all held-out pairs are computed: raise Max pairs.", cls="check muted")
    difference = recorded_difference(rows, result["recorded"])
    if not difference:
        return tag(
            "p", "The run was not evaluated at this step: there are no metrics to compare with.", cls="check muted"
        )
    name, largest = max(difference.items(), key=lambda item: abs(item[1]))
    scale = max(1.0, abs(result["recorded"][name]))
    is_good = abs(largest) <= CLOSE.get(result["first"]["compute"], 2e-2) * scale
    words = f"{'✔' if is_good else '✘'} The means here and the run's metrics at this step differ by at most "
    words += f"{number(abs(largest))} ({name.removeprefix('eval/')})."
    if not is_good:
        words += " The held-out file or the initial weights may have changed since."
    return tag("p", words, cls="check ok" if is_good else "check bad")


def _lengths(rows: Sequence[Row]) -> Html:
    groups: list[tuple[str, list[float], list[float]]] = []
    for side in SIDES:
        here = [(float(row[f"{side}_tokens"]), value) for row in rows if (value := reward(row, side)) is not None]
        both = correlation([x for x, _ in here], [y for _, y in here])
        name = f"{side}, correlation {'-' if both is None else f'{both:+.2f}'}"
        groups.append((name, [x for x, _ in here], [y for _, y in here]))
    return scatter("Reward by length", groups, "tokens", "reward")


def _table(here: Chosen, rows: Sequence[Row], sort: str, query: Mapping[str, str]) -> Html:
    name, by = SORTS[sort]
    ordered = sorted(rows, key=by)
    shown = ordered if query.get("all") == "1" else ordered[:SHOWN]
    names = ("Row", "Prompt", "Chosen", "Rejected", "Reward chosen", "Reward rejected", "Margin", "Right?")
    names = (*names, "Tokens", "Per token")
    lines: list[list[Child]] = []
    for row in shown:
        value = margin(row)
        target = link("/outputs", **here.query, tab="tokens", row=row["row"])
        where = tag("a", str(row["row"]).rpartition(":")[2], href=target, title="token by token")
        right = "-" if value is None else "✔ right" if value > 0 else "✘ wrong"
        lines.append(
            [
                where,
                *(tag("div", row[part], cls="cut", title=row[part]) for part in ("prompt", *SIDES)),
                *(number(reward(row, side)) for side in SIDES),
                number(value),
                tag("span", right, cls="nowrap ok" if value is not None and value > 0 else "nowrap bad"),
                f"{row['chosen_tokens']} / {row['rejected_tokens']}",
                f"{_per_token(row, 'chosen')} / {_per_token(row, 'rejected')}",
            ]
        )
    links = [
        tag(
            "a",
            text,
            href=link("/outputs", **{**query, "sort": one}),
            cls="button small",
            aria_current="true" if one == sort else None,
        )
        for one, (text, _) in SORTS.items()
    ]
    more = None
    if len(shown) < len(ordered):
        more = tag("a", f"Show all {len(ordered):,}", href=link("/outputs", **{**query, "all": "1"}), cls="button")
    numeric = ("Row", "Reward chosen", "Reward rejected", "Margin", "Tokens", "Per token")
    caption = f"{len(shown):,} of {len(rows):,} pairs, {name}; a row's number opens its tokens. Tokens and rewards per "
    caption += "token: chosen / rejected."
    return join(tag("div", "Order: ", links, cls="row sorts"), table(names, lines, caption, numeric), more)


def _per_token(row: Row, side: str) -> str:
    value = reward(row, side)
    return number(None if value is None else float(f"{value / max(row[f'{side}_tokens'], 1):.2g}"))


def _or_nan(value: float | None) -> float:
    return float("inf") if value is None else value


def _saved(key: str) -> Html:
    kinds = (("csv", "Save as CSV"), ("jsonl", "Save as JSONL"))
    links = [
        tag("a", text, href=link("/download", outputs=key, format=kind), download=True, cls="button small")
        for kind, text in kinds
    ]
    return tag("p", links, cls="row")
