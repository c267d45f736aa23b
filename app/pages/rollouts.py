"""The Rollouts page: prompts of a step, their groups of completions with rewards and advantages, rewards over steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
import pandas as pd
import plotly.graph_objects as go

from ..components.metrics import title_of
from ..components.plots import Chart, Line, figure
from ..formatting import rounded, shortened, whole
from ..markup import plain
from ..page import Page
from ..state import Site
from ..store.index import Row
from ..store.rollouts import NAME
from ..view import Done, Query, Values, is_narrow

EMPTY = (
    "Shows what a run with online rewards samples: prompts, groups of completions, rewards and advantages. There is no "
    "such run yet. Start one with an objective that samples, for example `python experiments/grpo_gemma.py`; which "
    "steps and prompts are recorded is its setting `rollouts=RolloutLog(every_steps=10, prompts=4)`."
)
NONE_YET = "This run has recorded no rollouts: its objective does not sample, or it is before its first step."
CHARACTERS = 160  # at most of a text in a table; below it is the whole text
RUNS = 60
SECONDS = 5
SAMPLED = ("frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio")
"""Metrics of completions that have a chart of their own, beside that of rewards."""

Group = Mapping[str, Any]


class Rollouts(Page):
    """Prompts of a step, and the completions of one of them."""

    name, path, title = "rollouts", "/rollouts", "Rollouts"

    def build(self) -> None:
        gr.Markdown("# Rollouts")
        with gr.Row():
            run = gr.Dropdown([], label="Run", info="Runs that sample, newest first", scale=2)
            step = gr.Slider(0, 1, value=0, step=1, label="Step", info="Recorded ones; the last at first", scale=2)
            self.run, self.step = self.view.control("run", run), self.view.control("step", step)
        self.about = gr.Markdown()
        hidden: dict[str, Any] = {"interactive": False, "visible": False}
        table, text = {**hidden, "pinned_columns": 1}, {**hidden, "buttons": ["copy"]}
        self.prompts = gr.Dataframe(label="Prompts of the step; select one", max_height=260, **table)
        self.prompt = gr.Textbox(label="Prompt", lines=1, max_lines=8, **text)
        self.completions = gr.Dataframe(label="Its completions, the best first; select one", max_height=420, **table)
        self.completion = gr.Textbox(lines=2, max_lines=16, **text)
        self.plot = gr.Plot(show_label=False, visible=False)
        self.timer = gr.Timer(SECONDS, active=False)
        self.view.on(self.prompts.select, partial(_selected, "group"), has_event=True)
        self.view.on(self.completions.select, partial(_selected, "completion"), has_event=True)

    def fill(self, query: Query) -> Values:
        """Shows a step of a run, by default the last one of the newest run that samples."""
        site = self.site
        offered = [row.id for row in site.index.rows() if (row.path / NAME).exists()][:RUNS]
        name = query.get("run") or next(iter(offered), "")
        results = (self.step, self.prompts, self.prompt, self.completions, self.completion, self.plot)
        values: dict[Any, Any] = dict.fromkeys(results, gr.update(visible=False))
        row = site.index.row(name)
        values[self.run] = gr.update(choices=offered, value=name or None)
        values[self.timer] = gr.update(active=row is not None and row.is_live)
        if row is None:
            return {**values, self.about: f"There is no run {plain(name)}." if name else EMPTY}
        file = site.run(name).path / NAME
        steps = site.rollouts.steps(file)
        if not steps:
            return {**values, self.about: NONE_YET}
        step = whole(query.get("step", ""))
        shown_step = max((one for one in steps if step is None or one <= step), default=steps[0])
        groups = site.rollouts.groups(file, shown_step)
        values |= {
            self.step: _slider(steps, shown_step),
            self.about: _about(row, shown_step, groups),
            self.plot: gr.update(
                value=_curves(site, file.parent, shown_step, 1 if is_narrow(query) else 2), visible=True
            ),
        }
        group = next((one for one in groups if str(one["group"] + 1) == query.get("group")), next(iter(groups), None))
        if group is None:
            return values
        rewards = [math.inf if one["reward"] is None else -one["reward"] for one in group["completions"]]
        ranked = sorted(enumerate(group["completions"], 1), key=lambda one: rewards[one[0] - 1])
        place, chosen = next((one for one in ranked if str(one[0]) == query.get("completion")), ranked[0])
        label = f"Prompt {group['group'] + 1}: {group['row']}"
        return values | {
            self.prompts: gr.update(value=_prompts(groups), visible=True),
            self.prompt: gr.update(value=group["prompt"], label=label, visible=True),
            self.completions: gr.update(value=_completions(ranked), visible=True),
            self.completion: gr.update(value=_episode(chosen), label=f"Completion {place}", visible=True),
        }


def _selected(part: str, query: Query, event: gr.SelectData) -> Done:
    return Done(query={"completion": "", part: str(event.row_value[0])})


def _slider(steps: Sequence[int], current: int) -> Any:
    """A slider over the recorded steps; between two of them it shows the one before."""
    gap = math.gcd(*(step - steps[0] for step in steps)) or 1
    return gr.update(
        minimum=steps[0], maximum=max(steps[-1], steps[0] + 1), step=gap, value=current, visible=len(steps) > 1
    )


def _about(row: Row, step: int, groups: Sequence[Group]) -> str:
    count = sum(len(group["completions"]) for group in groups)
    recorded = f"step **{step:,}** · {len(groups):,} prompts recorded, {count:,} completions"
    return f"{plain(row.facts.get('objective', ''))} · {recorded}"


def _prompts(groups: Sequence[Group]) -> pd.DataFrame:
    """Rewards of each group; their spread is the standard deviation (n - 1) that advantages are divided by."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        each: Any = pd.DataFrame(group["completions"]).astype({"reward": float})
        rows.append(
            {
                "#": group["group"] + 1,
                "Prompt": shortened(group["prompt"], CHARACTERS),
                "Mean reward": rounded(each["reward"].mean()),
                "Spread": rounded(each["reward"].std() if each["reward"].count() > 1 else 0.0),
                "Best": rounded(each["reward"].max()),
                "Mean tokens": rounded(each["length"].mean()),
                "Truncated": f"{each['truncated'].sum()} of {len(each)}",
            }
        )
    return pd.DataFrame(rows)


def _completions(ranked: Sequence[tuple[int, Mapping[str, Any]]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "#": place,
                "Completion": shortened(one["text"], CHARACTERS),
                "Reward": rounded(one["reward"]),
                **{f"rewards/{name}": rounded(value) for name, value in one["rewards"].items()},
                **({} if one["advantage"] is None else {"Advantage": rounded(one["advantage"])}),
                "Tokens": one["length"],
                "Ended": "truncated" if one["truncated"] else "by its end token",
                **{
                    f"extra/{name}": shortened(value, CHARACTERS) if isinstance(value, str) else value
                    for name, value in one.get("extra", {}).items()
                },
            }
            for place, one in ranked
        ]
    )


def _episode(completion: Mapping[str, Any]) -> str:
    """The text of a completion, or of all turns of an episode."""
    turns: list[str] = []
    for message in completion.get("turns") or ():
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [f"{function['name']}({json.dumps(function['arguments'])})" for function in functions]
        text = "\n".join(filter(None, (message["content"], *calls)))
        turns.append(f"{message['role']}: {text}")
    return "\n\n".join(turns) or completion["text"]


def _curves(site: Site, directory: Path, step: int, columns: int) -> go.Figure:
    """Mean rewards over all prompts of a step, by function, and other metrics of completions."""
    series = site.series.of(directory / "metrics.jsonl").columns
    rewards = [name for name in series if name == "reward" or (name.startswith("rewards/") and name.endswith("/mean"))]

    def lines(*names: str) -> list[Line]:
        both = [(one, colour) for colour, name in enumerate(names) for one in (name, f"eval/{name}") if one in series]
        return [
            Line.of(one, *series[one].arrays(), colour=index, is_dashed=one.startswith("eval/")) for one, index in both
        ]

    charts = [Chart("Mean reward", lines(*rewards)), *(Chart(title_of(name), lines(name)) for name in SAMPLED)]
    charts = [chart for chart in charts if chart.lines]
    return figure(charts, "step", columns, [(step, f"step {step:,}")], own_legends=True)
