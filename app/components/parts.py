"""HTML components that several pages share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..html import Child, Html, link, tag
from ..store.index import Row

SIGNS = {
    "queued": "◷", "starting": "◌", "compiling": "◌", "running": "▶", "stopping": "◼", "silent": "?",
    "stopped": "◼", "finished": "✔", "failed": "✘", "lost": "✘", "refused": "✘", "damaged": "!",
}  # fmt: skip
"""Symbol of each state: colour is never the only indicator."""


def state_badge(state: str) -> Html:
    """Returns a state as text, symbol and colour."""
    look = {"refused": "failed"}.get(state, state)
    return tag("span", tag("span", SIGNS.get(state, "·"), aria_hidden="true"), state, cls=f"badge {look}")


def progress(step: int | None, total: int | None, label: str) -> Html:
    """Returns a progress bar."""
    share = 0.0 if not total else min(1.0, (step or 0) / total)
    return tag(
        "div",
        tag("div", cls="done", style=f"width:{share:.1%}"),
        cls="progress",
        role="progressbar",
        aria_label=label,
        aria_valuenow=step or 0,
        aria_valuemin=0,
        aria_valuemax=total or 0,
    )


def facts(rows: Mapping[str, Child] | Iterable[tuple[str, Child]]) -> Html:
    """Returns names and values as a description list."""
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in pairs], cls="facts")


def tabs(path: str, query: Mapping[str, str], names: Mapping[str, str], current: str, label: str) -> Html:
    """Returns links that look like tabs; the open one is in the query."""
    first = next(iter(names))
    links = [
        tag(
            "a",
            text,
            href=link(path, **{**query, "tab": "" if name == first else name}),
            aria_current="true" if name == current else None,
        )
        for name, text in names.items()
    ]
    return tag("nav", links, cls="tabs", aria_label=label)


def run_link(row: Row) -> Html:
    """Returns a link to a run's page."""
    return tag("a", row.id, href=link("/run", id=row.id), cls="mono")


def tag_link(word: str) -> Html:
    """Returns a link from a tag to its runs."""
    return tag("a", word, href=link("/", tag=word), cls="tag")


def copy_button(target: str, text: str = "Copy") -> Html:
    """Returns a button that copies the text of the element with id `target`."""
    return tag("button", text, cls="button small", type="button", data_copy=target)


def field_path(path: str) -> Html:
    """Returns a dotted path that wraps only after its dots."""
    *parents, last = path.split(".")
    return tag("span", [(f"{part}.", tag("wbr")) for part in parents], last, cls="mono path")


def action(text: str, do: str, look: str = "", **data: object) -> Html:
    """Returns a button that calls an action of a page, with `data_...` as its payload."""
    return tag("button", text, cls=f"button {look}".strip(), type="button", data_do=do, **data)


def table(names: Iterable[str], rows: Iterable[Iterable[Child]], caption: str, numeric: Iterable[str] = ()) -> Html:
    """Returns a table in a horizontally scrolling box; columns in `numeric` are right-aligned."""
    names, right = list(names), set(numeric)
    head = tag("tr", [tag("th", name, scope="col", cls="num" if name in right else None) for name in names])
    body = [
        tag(
            "tr", [tag("td", cell, cls="num" if name in right else None) for name, cell in zip(names, row, strict=True)]
        )
        for row in rows
    ]
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body))
    return tag("div", whole, cls="scroll", tabindex=0, role="region", aria_label=caption)
