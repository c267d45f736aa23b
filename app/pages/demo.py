"""The small DPO run that is offered in an empty home: the project's own recipe, or the app's demo."""

from __future__ import annotations

import shlex
from pathlib import Path

from nnxdsl import Adapter, Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, Weights
from nnxdsl.config.core.codegen import to_python
from nnxdsl.storage.jsonl import replace

from ..components.parts import action
from ..html import Child, Html, join, link, tag
from ..page import Answer, Ask
from ..processes import demo_data
from ..state import Site

NAME = "the app's demo"


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
    place = site.settings.own / "demo"
    demo_data.write(place)
    made, file = experiment(place), place / "dpo_demo.py"
    text = to_python(made).encode()
    if not file.exists() or file.read_bytes() != text:
        replace(file, text)
    return made, file


def recipe(site: Site) -> str | None:
    """Name of the project's first DPO recipe; None without one."""
    return next((name for name in site.presets.names() if name.startswith("dpo")), None)


def offered(site: Site, do: str) -> Html:
    """Returns a button that starts the demo and the equivalent command, or the reason why it cannot be started yet.

    Args:
        site: State of the app.
        do: Action of the page that calls `start`.
    """
    if site.settings.read_only:
        return join()
    name = recipe(site)
    job = None if name is None else site.presets.job(name)
    is_ready = name is None or (job is not None and job.state == "done")
    file = f"experiments/{name}.py" if name is not None else str(written(site)[1])
    button = action("Start a tiny DPO run on this machine", do, "primary", disabled=not is_ready)
    note = "a small model that learns to be polite; takes a few minutes on two CPU cores"
    wrong: Child = None
    if job is not None and job.is_over and job.state != "done":
        wrong = tag("pre", f"{file} cannot be read: {job.error or job.state}", cls="error", role="alert")
    change = link("/new", preset=name) if name is not None else link("/new", demo=1)
    words = f"python {shlex.quote(file)} --home {shlex.quote(str(site.settings.home))}"
    return join(
        tag("p", button, " ", tag("span", note, cls="muted")),
        wrong,
        tag(
            "p",
            tag("a", "Review and edit it first", href=change),
            tag("span", ", or ", cls="muted"),
            tag("a", "choose another experiment", href="/new"),
        ),
        tag("p", "In a terminal:", cls="muted"),
        tag(
            "div",
            tag("code", words, id="demo-command"),
            " ",
            tag("button", "Copy", cls="button small", type="button", data_copy="demo-command"),
        ),
    )


def start(site: Site, ask: Ask) -> Answer:
    """Starts the demo run."""
    name = recipe(site)
    made = written(site)[0] if name is None else site.presets.experiment(name)
    if made is None:
        return Answer(notice="The recipe is still being read; try again in a moment.", bad=True)
    site.launcher.launch(made, ask.client, name or "")
    return Answer(goto=link("/run", id=made.id))
