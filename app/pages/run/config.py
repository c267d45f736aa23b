"""The experiment of a run as Python, and its differences from a recipe or another run."""

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
from ...view import Query, Values, View

SAVED = ("experiment.py", "experiment.json", "metrics.jsonl", "metrics.csv")
OTHERS = 50
FOREIGN = "It names classes of another package, which the app does not import; this is the stored file."


class Config:
    """The tab of the config.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, view: View) -> None:
        """Adds the components."""
        with gr.Row(elem_classes=["buttons"]):
            self._saves = [gr.Button(name, link="#", size="sm", scale=0) for name in SAVED]
        self._other = view.control("with", gr.Dropdown([("nothing", "")], value="", label="Differences from"))
        self._note = gr.Markdown()
        self._table = gr.Dataframe(interactive=False, wrap=True, visible=False, label="Differences")
        self._code = gr.Code(language="python", interactive=False, label="Python")
        self.outputs = [*self._saves, self._other, self._note, self._table, self._code]

    def shown(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Returns the Python of the run, and its differences from what the query names."""
        found: Values = {
            save: gr.update(link=link("/download", run=row.id, file=name))
            for save, name in zip(self._saves, SAVED, strict=True)
        }
        experiment = stored(directory.path / "experiment.json")
        if experiment is None:
            source = (directory.path / "experiment.py").read_text(encoding="utf-8")[:200_000]
            hidden = gr.update(visible=False)
            return {**found, self._other: hidden, self._note: FOREIGN, self._table: hidden, self._code: source}
        recipes = [(f"recipe {name}", f"preset:{name}") for name in site.presets.names()]
        runs = [(f"run {one.id}", f"run:{one.id}") for one in site.index.rows()[:OTHERS] if one.id != row.id]
        choices = [("nothing", ""), *recipes, *runs]
        other = query.get("with", "")
        note, table = _differences(site, other, experiment)
        return {
            **found,
            self._other: gr.update(
                choices=choices, value=other if other in [value for _, value in choices] else "", visible=True
            ),
            self._note: plain(note),
            self._table: gr.update(value=table, visible=not table.empty),
            self._code: to_python(experiment),
        }


def _differences(site: Site, compared: str, experiment: Experiment) -> tuple[str, pd.DataFrame]:
    """Words on the differences from a recipe or run, and a table of them."""
    kind, _, name = compared.partition(":")
    none = pd.DataFrame()
    if not name:
        return "", none
    try:
        if kind == "preset":
            other = site.presets.experiment(name)
            if other is None:
                job = site.presets.job(name)
                return (job.error if job is not None and job.error else "The recipe is still being read."), none
        else:
            other = stored(site.run(name).path / "experiment.json")
            if other is None:
                return f"{name} cannot be read by the app.", none
        changes = diff(other, experiment)
    except NnxdslError as error:
        return str(error), none
    if not changes:
        return f"No differences from {name}.", none
    rows = [(path, render(get(other, path)), render(value)) for path, value in changes.items()]
    return f"{len(rows)} differences from {name}", pd.DataFrame(rows, columns=["Field", name, "this run"])
