"""A report of runs as one HTML file that opens anywhere: settings, last and best values, and curves that zoom."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import pandas as pd
import plotly.io

from ...html import Html, join, tag
from ...view import Query
from .curves import curves
from .runs import Group
from .tables import figures, words

SPREAD = "Values of several runs are mean ± sample standard deviation (number of runs)."
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;margin:1rem 0}"
    "th,td{border:1px solid #ddd;padding:.25rem .6rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}th,td{border-color:#444}}"
)
FACTS = {"Objective": "objective", "Model": "model", "Trained": "adapter", "Devices": "mesh"}


def to_html(groups: Sequence[Group], query: Query) -> str:
    """Returns an HTML document with the script that draws its curves; it requests nothing.

    Args:
        groups: What is compared.
        query: Smoothing, axes and bands of the curves, as in the page's URL.
    """
    runs = [run for group in groups for run in group.runs]
    title = ", ".join(group.name for group in groups)
    drawn = curves({**query, "all": "1"}, groups)
    charts = "" if drawn is None else plotly.io.to_html(drawn, include_plotlyjs=True, full_html=False)
    head = join(
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width">'),
        tag("title", f"{title} · nnxdsl"),
        Html(f"<style>{STYLE}</style>"),
    )
    facts = {
        name: [", ".join(dict.fromkeys(run.row.facts.get(key, "") for run in group.runs)) for group in groups]
        for name, key in FACTS.items()
    }
    about = pd.DataFrame.from_dict(facts, orient="index", columns=[group.name for group in groups])
    body = join(
        tag("h1", title),
        tag("p", f"Written by nnxdsl at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."),
        _table(about),
        tag("h2", "Metrics, and settings that differ" if len(groups) > 1 else "Metrics"),
        tag("p", SPREAD) if len(runs) > len(groups) else None,
        _table(figures(groups).map(words)),
        tag("h2", "Curves"),
        Html(charts or "<p>No step has finished.</p>"),
        [
            tag("details", tag("summary", f"All settings of {run.row.id}"), _table(pd.Series(run.config).to_frame("")))
            for run in runs
        ],
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def _table(table: pd.DataFrame) -> Html:
    with pd.option_context("display.max_colwidth", None):
        return Html(table.to_html(border=0, escape=True))
