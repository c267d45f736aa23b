"""Charts of metrics: which of them share one, and how a page's query has them drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import gradio as gr

from ..store.series import Columns
from ..view import Part, Query, Values, View
from .axes import OVER, offered

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
