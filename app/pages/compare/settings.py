"""Settings of the compared runs: those that differ, or all."""

from __future__ import annotations

from collections.abc import Sequence

from ...components.parts import field_path
from ...html import Html, join, link, tag
from ...page import Ask
from .config import ABSENT, NAMES, brief, differing, paths
from .runs import Compared


def settings(ask: Ask, runs: Sequence[Compared], base: Compared) -> Html:
    """Returns the table of settings."""
    whole = ask.query.get("config") == "all"
    configs = [run.config for run in runs]
    changed = [path for path in differing(configs) if path not in NAMES]
    shown = paths(configs) if whole else brief(configs, changed)
    heads = [tag("th", tag("i", cls=f"swatch s{run.colour}"), run.row.id, scope="col", cls="id") for run in runs]
    different = set(changed)
    body = [
        tag(
            "tr",
            tag("th", "≠ " if whole and path in different else None, field_path(path), scope="row"),
            [_setting(run, base, path) for run in runs],
            cls="differs" if whole and path in different else None,
        )
        for path in shown
    ]
    caption = f"{len(changed)} of {len(paths(configs))} settings differ, not counting names and notes"
    if len(shown) < len(changed):
        caption += "; an earlier experiment that only some runs have is shown by its name"
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", tag("th", "Field", scope="col"), heads)),
        tag("tbody", body),
        cls="settings-table",
    )
    switch = tag(
        "nav",
        tag(
            "a",
            "Differing settings",
            href=link("/compare", **{**ask.query, "config": ""}),
            aria_current=None if whole else "true",
        ),
        tag(
            "a",
            "All settings",
            href=link("/compare", **{**ask.query, "config": "all"}),
            aria_current="true" if whole else None,
        ),
        cls="tabs",
        aria_label="Which settings",
    )
    none = tag("p", "The settings are equal, except for names and notes.", cls="empty")
    region = tag("div", table, cls="scroll", tabindex=0, role="region", aria_label="Settings")
    return join(tag("h2", "Settings"), switch, region if body else none)


def _setting(run: Compared, base: Compared, path: str) -> Html:
    value = run.config.get(path, ABSENT)
    same = run is not base and value == base.config.get(path, ABSENT)
    return tag("td", value[:2_000], cls="mono muted" if same else "mono")
