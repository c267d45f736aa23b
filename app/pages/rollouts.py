"""The Rollouts page: prompts of a step, their groups of completions with rewards and advantages, rewards over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
import plotly.graph_objects as go

from ..components.plots import Chart, Line, Mark, figure
from ..markdown import plain
from ..page import Page
from ..state import Site
from ..store.index import Row
from ..store.rollouts import NAME
from ..store.series import not_finite, thinned
from ..view import Done, Query, Values, View, is_narrow
from ..words import whole

EMPTY = (
    "Shows what a run with online rewards samples: prompts, groups of completions, rewards and advantages. There is no "
    "such run yet. Start one with an objective that samples, for example `python experiments/grpo_gemma.py`; which "
    "steps and prompts are recorded is its setting `rollouts=RolloutLog(every_steps=10, prompts=4)`."
)
NONE_YET = "This run has recorded no rollouts: its objective does not sample, or it is before its first step."
CHARACTERS = 160
"""At most of a text in a table; below it is the whole text."""
RUNS = 60
SECONDS = 5
SAMPLED = ("frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio")
"""Metrics of completions that have a chart of their own, beside that of rewards."""

Group = Mapping[str, Any]


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Rollouts")
    with gr.Row():
        run = view.control("run", gr.Dropdown([], label="Run", info="Runs that sample, newest first", scale=2))
        step = view.control(
            "step", gr.Slider(0, 1, value=0, step=1, label="Step", info="Recorded ones; the last at first", scale=2)
        )
    words = gr.Markdown()
    prompts = gr.Dataframe(
        label="Prompts of the step; select one", interactive=False, visible=False, pinned_columns=1, max_height=260
    )
    prompt = gr.Textbox(label="Prompt", lines=1, max_lines=8, interactive=False, visible=False, buttons=["copy"])
    completions = gr.Dataframe(
        label="Its completions, the best first; select one",
        interactive=False,
        visible=False,
        pinned_columns=1,
        max_height=420,
    )
    completion = gr.Textbox(lines=2, max_lines=16, interactive=False, visible=False, buttons=["copy"])
    plot = gr.Plot(show_label=False, visible=False)
    timer = gr.Timer(SECONDS, active=False)
    view.does(prompts.select, _prompt_selected, has_event=True)
    view.does(completions.select, _completion_selected, has_event=True)

    def shown(query: Query) -> Values:
        offered = [row for row in site.index.rows() if (row.path / NAME).exists()][:RUNS]
        name = query.get("run") or (offered[0].id if offered else "")
        hidden = {one: gr.update(visible=False) for one in (step, prompts, prompt, completions, completion, plot)}
        choices = {run: gr.update(choices=[row.id for row in offered], value=name or None)}
        if not name:
            return {**choices, **hidden, words: EMPTY, timer: gr.Timer(active=False)}
        directory, row = site.run(name).path, site.index.row(name)
        live = {timer: gr.Timer(active=row is not None and row.is_live)}
        steps = site.rollouts.steps(directory / NAME)
        if not steps:
            return {**choices, **hidden, **live, words: NONE_YET}
        given = whole(query.get("step", ""))
        at = max((one for one in steps if given is None or one <= given), default=steps[0])
        groups = site.rollouts.groups(directory / NAME, at)
        group = _chosen(groups, query.get("group", ""))
        found: dict[Any, Any] = {
            **choices,
            **live,
            **hidden,
            step: _slider(steps, at),
            words: _words(row, at, groups),
            plot: gr.update(value=_curves(site, directory, at, 1 if is_narrow(query) else 2), visible=True),
        }
        if group is None:
            return found
        ranked = sorted(enumerate(group["completions"], 1), key=lambda one: -one[1]["reward"])
        place, text = next((one for one in ranked if str(one[0]) == query.get("completion")), ranked[0])
        return found | {
            prompts: gr.update(value=_prompts(groups), visible=True),
            prompt: gr.update(
                value=group["prompt"], label=f"Prompt {group['group'] + 1}: {group['row']}", visible=True
            ),
            completions: gr.update(value=_completions(ranked), visible=True),
            completion: gr.update(value=text["text"], label=f"Completion {place}", visible=True),
        }

    view.shows(shown, [run, step, words, prompts, prompt, completions, completion, plot, timer], every=timer)


def _prompt_selected(query: Query, client: str, event: gr.SelectData) -> Done:
    return Done(query={"group": str(event.row_value[0]), "completion": ""})


def _completion_selected(query: Query, client: str, event: gr.SelectData) -> Done:
    return Done(query={"completion": str(event.row_value[0])})


def _chosen(groups: Sequence[Group], name: str) -> Group | None:
    """The group of a number from 1, or else the first; None if there are none."""
    return next((group for group in groups if str(group["group"] + 1) == name), groups[0] if groups else None)


def _slider(steps: Sequence[int], at: int) -> Any:
    """A slider over the recorded steps; between two of them it shows the one before."""
    gap = math.gcd(*(step - steps[0] for step in steps)) or 1
    return gr.update(minimum=steps[0], maximum=max(steps[-1], steps[0] + 1), step=gap, value=at, visible=len(steps) > 1)


def _words(row: Row | None, step: int, groups: Sequence[Group]) -> str:
    count = sum(len(group["completions"]) for group in groups)
    objective = "" if row is None else f"{plain(row.facts.get('objective', ''))} · "
    return f"{objective}step **{step:,}** · {len(groups):,} prompts recorded, {count:,} completions"


def _prompts(groups: Sequence[Group]) -> pd.DataFrame:
    """Rewards of each group; their spread is the standard deviation (n - 1) that advantages are divided by."""
    lines: list[dict[str, Any]] = []
    for group in groups:
        members = group["completions"]
        rewards = [one["reward"] for one in members]
        lines.append(
            {
                "#": group["group"] + 1,
                "Prompt": _begins(group["prompt"]),
                "Mean reward": _rounded(statistics.fmean(rewards)),
                "Spread": _rounded(statistics.stdev(rewards) if len(rewards) > 1 else 0.0),
                "Best": _rounded(max(rewards)),
                "Mean tokens": _rounded(statistics.fmean(one["length"] for one in members)),
                "Truncated": f"{sum(one['truncated'] for one in members)} of {len(members)}",
            }
        )
    return pd.DataFrame(lines)


def _completions(ranked: Sequence[tuple[int, Mapping[str, Any]]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "#": place,
                "Completion": _begins(one["text"]),
                "Reward": _rounded(one["reward"]),
                **{f"rewards/{name}": _rounded(value) for name, value in one["rewards"].items()},
                "Advantage": _rounded(one["advantage"]),
                "Tokens": one["length"],
                "Ended": "truncated" if one["truncated"] else "by its end token",
            }
            for place, one in ranked
        ]
    )


def _rounded(value: float) -> float:
    """Four significant digits, as a number that tables sort."""
    return float(f"{value:.4g}")


def _begins(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"


def _curves(site: Site, directory: Path, step: int, columns: int) -> go.Figure:
    """Mean rewards over all prompts of a step, by function, and other metrics of completions."""
    series = site.series.of(directory / "metrics.jsonl").columns
    rewards = [name for name in series if name == "reward" or (name.startswith("rewards/") and name.endswith("/mean"))]
    charts = [("Mean reward", [*rewards, *(f"eval/{name}" for name in rewards if f"eval/{name}" in series)])]
    charts += [(name, [name]) for name in SAMPLED if name in series]
    drawn = [Chart(title, [_line(series, name, names) for name in names]) for title, names in charts if names]
    return figure(drawn, "step", columns, [Mark(step, f"step {step:,}")], own_legends=True)


def _line(series: Mapping[str, Any], name: str, names: Sequence[str]) -> Line:
    steps, values = series[name].arrays()
    colour = names.index(name.removeprefix("eval/"))
    missing = not_finite(steps, values)
    return Line(name, *thinned(steps, values), colour, is_dashed=name.startswith("eval/"), missing=missing)


PAGE = Page(name="rollouts", path="/rollouts", title="Rollouts", build=build)
