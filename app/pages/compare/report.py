"""A report of runs as one HTML file that opens anywhere: settings, last and best values, and curves that zoom."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import plotly.io

from ...html import Child, Html, join, tag
from ...view import Query
from .curves import curves
from .export import lines, words
from .groups import Group
from .runs import Compared

SPREAD = "Values of several runs are mean ± sample standard deviation (number of runs)."
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;margin:1rem 0}"
    "th,td{border:1px solid #ddd;padding:.25rem .6rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}th,td{border-color:#444}}"
)


def to_html(groups: Sequence[Group], query: Query) -> str:
    """Returns an HTML document with the script that draws its curves; it requests nothing.

    Args:
        groups: What is compared.
        query: Smoothing, axes and bands of the curves, as in the page's URL.
    """
    runs = [run for group in groups for run in group.runs]
    title = ", ".join(group.name for group in groups)
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    drawn = curves({**query, "all": "1"}, groups)
    charts = "" if drawn is None else plotly.io.to_html(drawn, include_plotlyjs=True, full_html=False)
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'),
        tag("title", f"{title} · nnxdsl"),
        Html(f"<style>{STYLE}</style>"),
    )
    facts = [("Objective", "objective"), ("Model", "model"), ("Trained", "adapter"), ("Devices", "mesh")]
    about = [(name, [_fact(group, key) for group in groups]) for name, key in facts]
    body = join(
        tag("h1", title),
        tag("p", f"Written by nnxdsl at {made}."),
        _table(groups, about),
        tag("h2", "Metrics, and settings that differ" if len(groups) > 1 else "Metrics"),
        tag("p", SPREAD) if len(runs) > len(groups) else None,
        _table(
            groups, [(name, ["" if one is None else words(one) for one in values]) for name, values in lines(groups)]
        ),
        tag("h2", "Curves"),
        Html(charts or "<p>No step has finished.</p>"),
        [_settings(run) for run in runs],
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _fact(group: Group, key: str) -> str:
    return ", ".join(dict.fromkeys(run.row.facts.get(key, "") for run in group.runs))


def _settings(run: Compared) -> Html:
    rows = [tag("tr", tag("td", path), tag("td", words(value))) for path, value in run.config.items()]
    return tag("details", tag("summary", f"All settings of {run.row.id}"), tag("table", tag("tbody", rows)))


def _table(groups: Sequence[Group], rows: Sequence[tuple[str, Sequence[Child]]]) -> Html:
    head = tag("tr", tag("th"), [tag("th", group.name, scope="col") for group in groups])
    body = [tag("tr", tag("th", name, scope="row"), [tag("td", value) for value in values]) for name, values in rows]
    return tag("table", tag("thead", head), tag("tbody", body))
