"""The tab of a run's experiment as Python, and its differences from a recipe or another run."""

from __future__ import annotations

import gradio as gr
import pandas as pd

from nnxdsl import Experiment
from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import diff, get
from nnxdsl.errors import NnxdslError
from nnxdsl.runs.run_dir import RunDirectory

from ...html import link
from ...markdown import plain
from ...state import Site
from ...store.experiments import stored
from ...store.index import Row
from ...view import Query, Values, View, if_any
from .files import RunTab

SAVED = ("experiment.py", "experiment.json", "metrics.jsonl", "metrics.csv")
OTHERS = 50
FOREIGN = "It names classes of another package, which the app does not import; this is the stored file."


class Config(RunTab):
    """The run's experiment as Python, its files, and what differs from a recipe or another run."""

    def __init__(self, view: View) -> None:
        """Adds the components."""
        with gr.Row(elem_classes=["buttons"]):
            self.saves = {name: gr.Button(name, link="#", size="sm", scale=0) for name in SAVED}
        self.other = view.control("with", gr.Dropdown([("nothing", "")], value="", label="Differences from"))
        self.note = gr.Markdown()
        self.table = gr.Dataframe(interactive=False, wrap=True, visible=False, label="Differences")
        self.code = gr.Code(language="python", interactive=False, label="Python")

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Shows the experiment, or its stored file if the app cannot read it."""
        links = {save: gr.update(link=link("/download", run=row.id, file=name)) for name, save in self.saves.items()}
        experiment = stored(directory.path / "experiment.json")
        if experiment is None:
            source = (directory.path / "experiment.py").read_text(encoding="utf-8")[:200_000]
            hidden = gr.update(visible=False)
            return {**links, self.other: hidden, self.note: FOREIGN, self.table: hidden, self.code: source}
        choices = {"": "nothing"} | {f"preset:{name}": f"recipe {name}" for name in site.presets.names()}
        choices |= {f"run:{one.id}": f"run {one.id}" for one in site.index.rows()[:OTHERS] if one.id != row.id}
        chosen = query.get("with", "")
        note, changes = _differences(site, chosen, experiment)
        listed = [(text, value) for value, text in choices.items()]
        return {
            **links,
            self.other: gr.update(choices=listed, value=chosen if chosen in choices else "", visible=True),
            self.note: plain(note),
            self.table: if_any(changes),
            self.code: to_python(experiment),
        }


def _differences(site: Site, compared: str, experiment: Experiment) -> tuple[str, pd.DataFrame]:
    """Text on the differences from a recipe or run, and a table of them."""
    kind, _, name = compared.partition(":")
    none = pd.DataFrame()
    if not name:
        return "", none
    try:
        if kind == "preset":
            other, job = site.presets.experiment(name), site.presets.job(name)
            missing = job.error if job is not None and job.error else "The recipe is still being read."
        else:
            other, missing = stored(site.run(name).path / "experiment.json"), f"{name} cannot be read by the app."
        if other is None:
            return missing, none
        changes = diff(other, experiment)
    except NnxdslError as error:
        return str(error), none
    if not changes:
        return f"No differences from {name}.", none
    rows = [(path, render(get(other, path)), render(value)) for path, value in changes.items()]
    return f"{len(rows)} differences from {name}", pd.DataFrame(rows, columns=["Field", name, "this run"])
