"""The first screen of a new run: model, data, method and a few numbers, of which an experiment is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import gradio as gr
import pandas as pd

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Reward, Weights
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.serialization import evolve
from nnxdsl.errors import NnxdslError, RunError

from ...markup import markdown_link, plain
from ...page import Part
from ...processes.jobs import Job
from ...state import Site
from ...view import Query, Values, View, if_any
from ..data.facts import facts
from ..data.page import rows_job
from ..layout.request import CONFIG, models_in, project_files, within
from ..outputs.request import with_checkpoints

TINY = "Gemma 3 tiny, random weights"  # a model without files, to try things out
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
DATA_FILES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".csv", ".arrow")
RUN = "run:"
LORA = Adapter.LoRA(rank=16)


@attrs.frozen
class Method:
    """A way to train: its objective and adapter, the rows that it reads, and what it is for."""

    about: str
    objective: Objective
    data: type[Any]
    adapter: Adapter | None = LORA


METHODS = {
    "LoRA DPO": Method(
        "learns which of two answers is better, from rows with `prompt`, `chosen` and `rejected`",
        Objective.DPO(),
        Data.Preferences,
    ),
    "LoRA SFT": Method(
        "learns to answer as in rows with `messages`, or `prompt` and `completion`", Objective.SFT(), Data.Conversations
    ),
    "SFT": Method("the same with all weights: more memory", Objective.SFT(), Data.Conversations, adapter=None),
    "LoRA KTO": Method(
        "learns from single answers, liked or not: `prompt`, `completion` and `label`", Objective.KTO(), Data.Feedback
    ),
    "LoRA ORPO": Method("as DPO, without a reference model", Objective.ORPO(), Data.Preferences),
    "LoRA SimPO": Method("as DPO, by mean log-probabilities alone", Objective.SimPO(), Data.Preferences),
    "LoRA GRPO": Method(
        "samples answers to each `prompt`, and rewards those that equal the row's `answer`",
        Objective.GRPO(rewards=(Reward("exact_answer"),)),
        Data.Prompts,
    ),
}
BY_KIND = {"Data.Feedback": "LoRA KTO", "Data.Conversations": "LoRA SFT", "Data.Text": "LoRA SFT"}
BY_KIND |= {"Data.Prompts": "LoRA GRPO"}
"""The method of rows of a kind, if none is chosen; else the first."""
NUMBERS = {"lr": "Learning rate", "epochs": "Epochs", "batch": "Batch size", "length": "Max length"}


class Basics(Part):
    """The components of the screen."""

    def __init__(self, site: Site, view: View) -> None:
        self.site = site
        with gr.Row(visible=False) as self.row:
            with gr.Column(scale=11, min_width=320):
                typed: dict[str, Any] = {"allow_custom_value": True, "value": None}
                hint = "A directory of the project, a run, or a name on the Hub such as google/gemma-3-1b-it"
                self._model = view.control("model", gr.Dropdown([], label="Model", info=hint, **typed))
                hint = "A file, folder or glob in the project, or hf://NAME of a dataset on the Hub"
                self._data = view.control("data", gr.Dropdown([], label="Data", info=hint, **typed))
                self._method = view.control("method", gr.Dropdown(list(METHODS), label="Method"))
                self._purpose = gr.Markdown()
                with gr.Row(elem_classes=["fields"]):
                    box: dict[str, Any] = {"min_width": 120, "max_lines": 1, "placeholder": "default"}
                    self._numbers = {
                        name: view.control(name, gr.Textbox(label=label, **box)) for name, label in NUMBERS.items()
                    }
            with gr.Column(scale=10, min_width=320):
                self._about = gr.Markdown()
                options: dict[str, Any] = {"interactive": False, "wrap": True, "buttons": [], "show_search": "none"}
                self._rows = gr.Dataframe(label="First rows", visible=False, max_height=300, **options)
                with gr.Accordion("Python", open=False, visible=False) as self._code:
                    self._python = gr.Code(show_label=False, label="Python", language="python", interactive=False)

    def fill(self, query: Query) -> tuple[Values, str, bool]:
        """Returns the values of a query, what is missing for a launch, and whether the rows are being read."""
        site, made, problem, job, is_reading = self.site, None, "", None, False
        about, part = "Choose a data file to see its columns and first rows.", {}
        try:
            job = data_job(site, query)
            is_reading = job is not None and not job.is_over
            about, part = (about, part) if job is None else _file_facts(job)
        except NnxdslError as error:
            about = f"**!** Not checked: {plain(str(error))}"
        kind = str(part.get("kind") or "")
        name = method_of(query, kind)
        wanted = METHODS[name]
        if job is not None and not is_reading and not part:
            problem = "Data cannot be read"
        elif part.get("refused"):
            problem = f"Data: {part['refused']}"
        elif kind and not _reads(wanted, kind):
            fitting = BY_KIND.get(kind, next(iter(METHODS)))
            to = markdown_link(fitting, "/new", **{**_values(query), "method": fitting})
            about = f"**! {name} does not read such rows**; {to} does.\n\n{about}"
        try:
            made = experiment(site, query, kind)
        except NnxdslError as error:
            problem = problem or str(error)
        runs = [(f"run {row.id}", RUN + row.id) for row in with_checkpoints(site)]
        models = [(TINY, TINY), *((one, one) for one in models_in(site.settings.project)), *runs]
        files = project_files(site.settings, DATA_FILES)
        shown: dict[Any, Any] = {
            self.row: gr.update(visible=True),
            self._model: gr.update(choices=_with(models, query.get("model")), value=query.get("model")),
            self._data: gr.update(
                choices=_with([(one, one) for one in files], query.get("data")), value=query.get("data")
            ),
            self._method: gr.update(value=name),
            self._purpose: f"{name} {wanted.about}.",
            self._about: about,
            self._rows: if_any(
                rows := first_rows(job), column_widths=[f"{100 // max(1, rows.shape[1])}%"] * rows.shape[1]
            ),
            self._code: gr.update(visible=made is not None),
            self._python: "" if made is None else to_python(made),
        }
        defaults = _defaults(wanted)
        shown |= {
            box: gr.update(value=query.get(one, ""), placeholder=defaults[one]) for one, box in self._numbers.items()
        }
        return shown, problem, is_reading


# An experiment from a query


def method_of(query: Query, kind: str = "") -> str:
    """Name of the chosen method, or of the one for rows of a kind (`Data.Preferences`)."""
    first = next(iter(METHODS))
    return query["method"] if query.get("method") in METHODS else BY_KIND.get(kind, first)


def experiment(site: Site, query: Query, kind: str | None = None) -> Experiment:
    """Returns the experiment of a query; an `NnxdslError` says what is missing or wrong."""
    if kind is None:
        job = data_job(site, query, is_checked=False)
        kind = str(_file_facts(job)[1].get("kind") or "") if job is not None else ""
    name, path = method_of(query, kind), query.get("data", "").strip()
    method, model = METHODS[name], model_of(site, query.get("model", "").strip())
    if not path:
        raise RunError("Choose the data.")
    data, objective = method.data, method.objective
    if kind == "Data.Text" and data is Data.Conversations:
        data, objective = Data.Text, Objective.SFT(loss_on="all")
    if length := _number(query, "length", int):
        half = {"max_prompt_length": length // 2, "max_completion_length": length - length // 2}
        rows = data(path, **({"max_length": length} if "max_length" in data.length_fields else half))
    else:
        rows = data(path)
    more = {"epochs": _number(query, "epochs", float), "batch_size": _number(query, "batch", int)}
    made = Experiment(
        name=_name(name, path),
        model=model,
        adapter=method.adapter,
        objective=objective,
        data=rows,
        **{field: value for field, value in more.items() if value is not None},
    )
    lr = _number(query, "lr", float)
    return made if lr is None else evolve(made, {"optimizer.schedule.peak_lr": lr})


def model_of(site: Site, text: str) -> Model:
    """Returns the model of a directory of the project, of a run, or of a name on the Hub; raises for any other text."""
    if not text:
        raise RunError("Choose a model.")
    if text == TINY:
        return Model.Gemma3("tiny")
    if text.startswith(RUN):
        run = text.removeprefix(RUN)
        model, path = site.experiment(run).model, site.run(run).path
        return attrs.evolve(model, weights=Weights.Checkpoint(str(path)))
    if Path(text).is_absolute() or (within(site.settings, text) / CONFIG).is_file() or HUB_NAME.fullmatch(text):
        return Model.HF(text)
    raise RunError(
        f"Model: {text[:200]} is no directory with a {CONFIG}, and no name on the Hub such as google/gemma-3-1b-it"
    )


def _name(method: str, path: str) -> str:
    stem = re.sub(r"[^a-z0-9._-]+", "-", re.sub(r"\.\w+(\.\w+)?$", "", path.rstrip("/*").rpartition("/")[2].lower()))
    return f"{method.lower().replace(' ', '-')}-{stem.strip('-') or 'data'}"[:64].rstrip("-._")


def _number(query: Query, name: str, kind: type[Any]) -> Any:
    text = query.get(name, "").strip()
    try:
        return kind(text) if text else None
    except ValueError:
        example = "1e-5" if name == "lr" else "8"
        raise RunError(f"{NUMBERS[name]}: expected a number such as {example}, got {text[:40]!r}") from None


def _defaults(method: Method) -> dict[str, str]:
    """The numbers of an experiment that gives none."""
    rows = method.data("data.jsonl")
    made = Experiment(
        name="x", model=Model.Gemma3("tiny"), adapter=method.adapter, objective=method.objective, data=rows
    )
    length = sum(getattr(rows, name) for name in method.data.length_fields)
    lr = made.optimizer.schedule.peak_lr
    return {"lr": f"{lr:g}", "epochs": f"{made.epochs:g}", "batch": str(made.batch_size), "length": str(length)}


def _values(query: Query) -> dict[str, str]:
    return {name: query[name] for name in ("model", "data", *NUMBERS) if query.get(name)}


def _with(choices: list[tuple[str, str]], value: str | None) -> list[tuple[str, str]]:
    """Choices, and a typed value beside them."""
    return choices if value is None or any(value == one for _, one in choices) else [*choices, (value, value)]


def _reads(method: Method, kind: str) -> bool:
    """Whether the rows of a method are of a kind, or read as such."""
    more = {Data.Feedback: {"Data.Preferences"}, Data.Conversations: {"Data.Text"}}
    return kind in {f"Data.{method.data.__name__}", *more.get(method.data, ())} or method.data is Data.Prompts


# Its rows


def data_job(site: Site, query: Query, *, is_checked: bool = True) -> Job | None:
    """The child process that reads the data, with the tokenizer of a local model; None if none is named.

    If it `is_checked`, data outside of the project raises a `RunError`.
    """
    if not query.get("data"):
        return None
    model, tokenizer = query.get("model", ""), ""
    try:
        place = within(site.settings, model) if model and model != TINY else None
        if place is not None and any((place / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
            tokenizer = model
        return rows_job(site, {"file": query["data"], "tokenizer": tokenizer})
    except RunError:
        if is_checked:
            raise
        return None


def _file_facts(job: Job) -> tuple[str, dict[str, Any]]:
    """Facts of the data as Markdown, and as `nnxdsl data --json` has them."""
    if not job.is_over:
        return "Reading the rows ...", {}
    if job.result is None:
        return f"**✘ {plain(job.error or job.state)}**", {}
    source = job.result["source"]
    return facts(source), source


def first_rows(job: Job | None) -> pd.DataFrame:
    """The texts of the first rows by part, such as `chosen`; empty if they are not read."""
    rows: list[dict[str, str]] = []
    for example in () if job is None or job.result is None else job.result.get("data", {}).get("examples", ()):
        row: dict[str, str] = {}
        for run in example["runs"]:
            row[run["part"]] = f"{row.get(run['part'], '')}{run['text']}"[:300]
        rows.append(row)
    return pd.DataFrame(rows)


def templates() -> str:
    """The methods as Markdown, with links that choose them."""
    lines = [
        f"- {markdown_link(f'{name} from my file', '/new', method=name)}: {one.about}" for name, one in METHODS.items()
    ]
    return "\n".join(["## Templates", "", *lines])
