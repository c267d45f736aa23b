"""Charts of metrics: which of them share one, over which axis, and how a page's query has them drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import gradio as gr
import numpy as np

from ..store.series import Columns
from ..view import Part, Query, Values, View

GROUPED = {
    "Loss": ("loss",),
    "Reward": ("reward",),
    "Rewards": ("rewards/chosen", "rewards/rejected"),
    "Margin": ("rewards/margins",),
    "Accuracy": ("rewards/accuracies", "mean_token_accuracy"),
    "KL divergence": ("kl",),
    "Completion length": ("completions/mean_length",),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("learning_rate",),
    "Tokens per second": ("tokens/s",),
    "Memory, GiB": ("peak_memory_gib",),
}
"""Metrics of training that share a chart, each with its held-out one."""
LOGARITHMIC = ("Loss", "Gradient norm", "Learning rate", "Tokens per second")
NOT_ALONE = {"num_tokens", "pairs/s", "samples/s"}
SMOOTHING = ("0", "0.6", "0.9", "0.97")
OVER = ("step", "tokens", "time")
UNITS = (("hours", 3600.0, 2 * 3600.0), ("minutes", 60.0, 120.0), ("seconds", 1.0, 0.0))
"""A time unit, its length in seconds, and the shortest duration for which it is used."""


class ChartOptions(Part):
    """Smoothing, horizontal axis, logarithms, and whether all metrics are drawn."""

    def __init__(self, view: View) -> None:
        with gr.Group() as self.group:
            with gr.Row():
                smooth = gr.Dropdown(list(SMOOTHING), value="0", label="Smoothing", info="Exponential moving average")
                axis = gr.Dropdown(list(OVER), value="step", label="X axis", info="Of all charts")
            with gr.Row():
                log = gr.Checkbox(label="Log scale", info="Loss, gradient norm, rates", min_width=140)
                more = gr.Checkbox(label="All metrics", info="Also those without a chart", min_width=140)
        view.control("smooth", smooth, "0")
        view.control("log", log)
        self.axis, self.more = view.control("x", axis, "step"), view.control("all", more)

    def fill(self, runs: Sequence[Mapping[str, Columns]]) -> Values:
        """Offers the axes that the metrics of all runs allow."""
        return {self.axis: gr.update(choices=list(offered(runs)))}


def smoothing(query: Query) -> float:
    """The weight of the moving average in a query; 0 without smoothing."""
    return float(query["smooth"]) if query.get("smooth") in SMOOTHING else 0.0


def is_log(query: Query, title: str) -> bool:
    """Whether a chart has a logarithmic axis."""
    return query.get("log") == "1" and title in LOGARITHMIC


def charted(columns: Collection[str], query: Query, *, is_one_each: bool = False) -> tuple[dict[str, list[str]], int]:
    """Returns metrics by the title of their chart, and how many more charts a query for all metrics has.

    With `is_one_each` a chart has one metric of training, beside its held-out one.
    """
    groups: dict[str, list[str]] = {}
    for title, names in GROUPED.items():
        parts = {title_of(name): (name,) for name in names} if is_one_each and len(names) > 1 else {title: names}
        for heading, part in parts.items():
            here = [one for name in part for one in (name, f"eval/{name}") if one in columns]
            if "rewards/accuracies" in here:
                here = [name for name in here if "token" not in name]
            groups |= {heading: here} if here else {}
    used = NOT_ALONE.union(*groups.values())
    rest = sorted({name.removeprefix("eval/") for name in columns if name not in used})
    if query.get("all") == "1":
        groups |= {title_of(name): [one for one in (name, f"eval/{name}") if one in columns] for name in rest}
    return groups, len(rest)


def title_of(name: str) -> str:
    """Title of the chart of one metric, such as `Rewards chosen`."""
    return name.replace("/", " ").replace("_", " ").capitalize()


@attrs.frozen(eq=False)
class Axis:
    """The positions of ascending steps on a horizontal axis; without steps, a position is the step itself."""

    name: str
    steps: np.ndarray = attrs.field(factory=lambda: np.zeros(0))
    places: np.ndarray = attrs.field(factory=lambda: np.zeros(0))

    def values_at(self, steps: np.ndarray) -> np.ndarray:
        """Positions of steps, linearly interpolated."""
        return np.interp(steps, self.steps, self.places) if len(self.steps) else steps


def offered(runs: Sequence[Mapping[str, Columns]]) -> tuple[str, ...]:
    """Axes that are available for runs in shared charts."""
    needed = {"step": set(), "tokens": {"num_tokens"}, "time": {"num_tokens", "tokens/s"}}
    return tuple(over for over in OVER if all(needed[over] <= run.keys() for run in runs))


def axes(over: str, runs: Sequence[Mapping[str, Columns]]) -> list[Axis]:
    """Returns one axis per run, all in the same unit; falls back to steps if a run lacks the metric.

    Time is the sum over steps of tokens / (tokens/s): it excludes evaluations and gaps between attempts, and includes
    compilation, in the step that triggered it.
    """
    if over not in offered(runs) or over == "step":
        return [Axis("step") for _ in runs]
    if over == "tokens":
        return [Axis("tokens", *run["num_tokens"].arrays()) for run in runs]
    timed = [_seconds(run) for run in runs]
    longest = max((float(places[-1]) for _, places in timed if len(places)), default=0.0)
    unit, length = next((name, length) for name, length, least in UNITS if longest >= least)
    return [Axis(f"{unit} of steps", steps, places / length) for steps, places in timed]


def _seconds(run: Mapping[str, Columns]) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the training seconds until the end of each."""
    steps, tokens = run["num_tokens"].arrays()
    paces_at, paces = run["tokens/s"].arrays()
    valid = np.isfinite(paces) & (paces > 0)
    if not len(steps) or not valid.any():
        return np.zeros(0), np.zeros(0)
    pace = np.interp(steps, paces_at[valid], paces[valid])
    each = np.diff(tokens, prepend=0.0)
    return steps, np.cumsum(np.maximum(each, 0.0) / pace)
