"""What is offered to begin with: recipes, earlier runs, and in an empty home a small DPO run."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import gradio as gr

from nnxdsl import Adapter, Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, Weights
from nnxdsl.config.core.codegen import to_python
from nnxdsl.storage.jsonl import replace

from ..markup import link, markdown_link, plain
from ..page import Part
from ..processes import demo_data
from ..state import Site
from ..view import Done, Values, View

NAME = "the app's demo"
DEMO = link("/new", demo=1)
RUNS, MOST_RUNS = 8, 60  # latest runs that are offered as links, and in a dropdown
START = "Start a tiny DPO run on this machine"
RUN = (
    "A run is one training of an experiment: a directory with its config, metrics, log and checkpoints. Runs appear "
    "here automatically, whether they were started here or in a terminal. The demo is a small model that learns to be "
    "polite; it takes a few minutes on two CPU cores."
)


def experiment(place: Path) -> Experiment:
    """Returns an experiment: a tiny Gemma 3 trained from random weights by SFT, then by DPO."""
    learnt = Experiment(
        name="demo-sft",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="assistant"),
        data=Data.Conversations(str(place / "instructions.jsonl"), max_length=96),
        optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3, warmup_ratio=0.1)),
        batch_size=16,
        steps=200,
    )

    def pairs(name: str) -> Data:
        return Data.Preferences(str(place / f"{name}.jsonl"), max_prompt_length=64, max_completion_length=48)

    return Experiment(
        name="demo-dpo",
        model=Model.Gemma3("tiny", weights=Weights.From(learnt)),
        adapter=Adapter.LoRA(rank=8, alpha=16.0, targets=("attention", "mlp")),
        objective=Objective.DPO(beta=0.1),
        data=pairs("preferences"),
        optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=4e-4, warmup_ratio=0.1)),
        batch_size=8,
        steps=40,
        evaluation=Evaluation(
            every_steps=10, data=pairs("preferences_held_out"), prompts=demo_data.PROMPTS, max_new_tokens=48
        ),
    )


def written(site: Site) -> tuple[Experiment, Path]:
    """Writes the app's demo with its data, and returns its experiment and file."""
    place = site.settings.demo
    demo_data.write(place)
    made, file = experiment(place), place / "dpo_demo.py"
    text = to_python(made).encode()
    if not file.exists() or file.read_bytes() != text:
        replace(file, text)
    return made, file


def choices(site: Site) -> list[tuple[str, str]]:
    """Recipes and the latest runs for a dropdown, with the values `exp:NAME` and `run:ID`."""
    recipes = [(f"experiments/{name}.py", f"exp:{name}") for name in site.presets.names()]
    return recipes + [(f"run {row.id}", f"run:{row.id}") for row in site.index.rows()[:MOST_RUNS]]


def beginnings(site: Site, path: str, recipe: str, run: str) -> str:
    """Recipes and the latest runs as Markdown, with links to a page whose query has these parts for their names."""
    recipes = [
        f"- {markdown_link(name, path, **{recipe: name})}: "
        + plain(site.presets.summary(name).replace("`", "") or f"experiments/{name}.py")
        for name in site.presets.names()
    ] or [
        f"There is no recipe in {plain(str(site.presets.place))}. {markdown_link('Start with the demo', DEMO)}, a tiny "
        "DPO run with its own data; it takes a few minutes."
    ]
    runs = [f"- {markdown_link(row.id, path, **{run: row.id})}" for row in site.index.rows()[:RUNS]]
    return "\n".join(["## Recipes", "", *recipes, *(["", "## Earlier runs", "", *runs] if runs else [])])


def recipe(site: Site) -> str | None:
    """Name of the project's first DPO recipe; None without one."""
    return next((name for name in site.presets.names() if name.startswith("dpo")), None)


class Offer(Part):
    """What an empty page shows: what a run is, a button that starts the demo, and the command that does the same."""

    def __init__(self, site: Site, view: View) -> None:
        self.site, self._parts = site, list[Any]()
        with gr.Column(visible=False, elem_classes=["empty-state"]) as self._column:
            gr.Markdown(f"## No runs yet\n\n{RUN}")
            if not site.settings.read_only:
                with gr.Row(elem_classes=["buttons"]):
                    view.button(START, lambda query: begin(site), variant="primary", min_width=300)
                    review = view.button("Review and edit it first", link="#", min_width=210)
                    view.button("Choose another experiment", link="/new", min_width=220)
                command = gr.Code(label="The same in a terminal", language="shell", interactive=False)
                self._parts = [review, command]
            gr.Markdown(f"Runs are read from {plain(str(site.settings.home))}")

    def fill(self, *, is_empty: bool) -> Values:
        """Returns the updates of the components; nothing is written or read while there are runs."""
        column = {self._column: gr.update(visible=is_empty)}
        if not is_empty or not self._parts:
            return column
        name = recipe(self.site)
        file = f"experiments/{name}.py" if name is not None else str(written(self.site)[1])
        change = DEMO if name is None else link("/new", preset=name)
        command = f"python {shlex.quote(file)} --home {shlex.quote(str(self.site.settings.home))}"
        return {**column, **dict(zip(self._parts, (gr.update(link=change), command), strict=True))}


def begin(site: Site) -> Done:
    """Starts the demo run, once its recipe has been read, and opens it; a RunError says why it was refused."""
    name = recipe(site)
    made = written(site)[0] if name is None else site.presets.experiment(name, math.inf)
    assert made is not None  # reading it ends, if only for its time
    site.launcher.launch(made, name or "")
    return Done(goto=link("/run", id=made.id))
