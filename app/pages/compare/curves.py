"""Charts that overlay several runs, one colour each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...components.axes import Axis, axes, offered
from ...components.charts import Line, chart
from ...html import Html, join, link, tag
from ...page import Ask
from ...store.series import not_finite, smoothed, thinned
from ..run.charts import LOGARITHMIC, SMOOTHING, TOGETHER
from .runs import Compared


def curves(ask: Ask, runs: Sequence[Compared]) -> Html:
    """Returns all charts and their controls."""
    weight = float(ask.query["smooth"]) if ask.query.get("smooth") in SMOOTHING else 0.0
    log, every = ask.query.get("log") == "1", ask.query.get("all") == "1"
    shared = axes(ask.query.get("x", "step"), [run.columns for run in runs])
    columns = {name for run in runs for name in run.columns}
    if not columns:
        return join()
    drawn: list[Html] = []
    used: set[str] = {"num_tokens", "pairs/s", "samples/s"}
    for title, names in TOGETHER:
        trained = [name for name in names if not name.startswith("eval/")]
        for name in trained:
            both = [one for one in (name, f"eval/{name}") if one in columns]
            used |= {name, f"eval/{name}"}
            if both:
                heading = title if len(trained) == 1 else _heading(name)
                drawn.append(_chart(heading, both, runs, shared, weight, log and title in LOGARITHMIC))
    rest = sorted({name.removeprefix("eval/") for name in columns - used})
    for name in rest if every else []:
        both = [one for one in (name, f"eval/{name}") if one in columns]
        drawn.append(_chart(name, both, runs, shared, weight, log=False))
    more = tag(
        "a",
        "Show fewer" if every else f"Show {len(rest)} more",
        href=link("/compare", **{**ask.query, "all": "" if every else "1"}),
        cls="button",
    )
    dashed = "Dashed: on held-out rows." if any(name.startswith("eval/") for name in columns) else None
    return join(
        tag("h2", "Curves"),
        _controls(ask, offered([run.columns for run in runs]), weight, log),
        tag("p", dashed, cls="muted small") if dashed else None,
        tag("div", drawn, cls="grid charts"),
        more if rest else None,
    )


def _heading(name: str) -> str:
    words = name.replace("/", " ").replace("_", " ")
    return words[:1].upper() + words[1:]


def _chart(
    title: str, names: list[str], runs: Sequence[Compared], shared: Sequence[Axis], weight: float, log: bool
) -> Html:
    lines: list[Line] = []
    for run, axis in zip(runs, shared, strict=True):
        for name in names:
            if name not in run.columns:
                continue
            steps, values = run.columns[name].arrays()
            is_held_out = name.startswith("eval/")
            steps = axis.at(steps)
            missing = not_finite(steps, values)
            if weight and not is_held_out:
                values = smoothed(values, weight)
            x, y = thinned(steps, values)
            lines.append(
                Line(
                    f"{run.row.id}{', held out' if is_held_out else ''}",
                    x,
                    y,
                    colour=run.colour,
                    dashed=is_held_out,
                    dots=is_held_out,
                    missing=missing,
                )
            )
    return chart(title, lines, log=log, x_name=shared[0].name)


def _controls(ask: Ask, names: Sequence[str], weight: float, log: bool) -> Html:
    def options(values: Iterable[str], chosen: str, none: str) -> list[Html]:
        return [tag("option", value or none, value=value, selected=value == chosen) for value in values]

    smooth = options(["", *SMOOTHING[1:]], ask.query.get("smooth", "") if weight else "", "none")
    over = options(["", *names[1:]], ask.query.get("x", ""), "step")
    return tag(
        "form",
        tag("label", "Smoothing ", tag("select", smooth, name="smooth", id="compare-smooth")),
        tag("label", "Over ", tag("select", over, name="x", id="compare-x")),
        tag(
            "label",
            tag("input", type="checkbox", name="log", id="compare-log", checked=log),
            " Logarithmic",
            cls="row",
        ),
        cls="row controls",
        data_query=True,
    )
