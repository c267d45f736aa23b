"""The Data page: what becomes of rows, their lengths, and some of them as tokens, before anything is trained."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import gradio as gr

from nnxdsl.cli.verbs.data import is_source
from nnxdsl.data.sources.paths import files_of
from nnxdsl.errors import DataError, RunError

from ...formatting import whole
from ...markup import plain
from ...page import Page
from ...processes.jobs import Job
from ...settings import Settings
from ...state import Site
from ...store.experiments import written
from ...store.own_files import require_no_own_files
from ...view import Done, Query, Values, if_any, is_narrow
from ..demo import choices
from ..layout.request import SOURCES, source, within
from .facts import facts, lengths, lengths_plot, parts_of, row_table, token_runs

EMPTY = (
    "Shows what becomes of the rows of an experiment or of a file: how many are read, truncated or left out and why, "
    "how long they are, and some of them as tokens, with and without loss. Choose one above."
)
ROWS, MOST_ROWS = 3, 20


class Data(Page):
    """The source of rows, what becomes of them, and some of them as tokens."""

    name, path, title = "data", "/data", "Data"

    def build(self) -> None:
        gr.Markdown("# Data")
        can_name, control = not self.site.settings.read_only, self.view.control
        file: dict[str, Any] = {"info": "File, folder or glob in the project", "visible": can_name, "scale": 2}
        label = "Its directory; bytes without one"
        number: dict[str, Any] = {"precision": 0, "minimum": 0, "maximum": MOST_ROWS}
        with gr.Row():
            self.of = control("of", gr.Dropdown([], label="Data of", info="A recipe, a run, or a draft", scale=2))
            self.file = control("file", gr.Textbox(label="Or a file", placeholder="data/*.jsonl", **file))
            tokenizer = gr.Textbox(label="Tokenizer of the file", info=label, visible=can_name)
            self.tokenizer = control("tokenizer", tokenizer)
            rows = gr.Number(ROWS, label="Rows shown", info="As tokens", **number)
            self.rows = control("rows", rows, str(ROWS))
        self.part = gr.Radio([], label="Part", visible=False)
        self.about = gr.Markdown()
        self.retry = self.view.button("Read again", self._read_again, visible=False, size="sm")
        self.counts = gr.Dataframe(label="Rows", interactive=False, wrap=True, visible=False)
        self.lengths = gr.Dataframe(label="Tokens of a row", interactive=False, visible=False)
        self.plot = gr.Plot(show_label=False, visible=False)
        self.examples = gr.HTML(visible=False, padding=False)
        self.timer = gr.Timer(1, active=False)
        # Not a control, which an answer to the timer would leave as it is: parts are known when the rows were read.
        self.view.on(self.part.input, lambda query, name: Done(query={"part": name}), [self.part])

    def fill(self, query: Query) -> Values:
        job = rows_job(self.site, query)
        results = (self.part, self.retry, self.counts, self.lengths, self.plot, self.examples)
        values: dict[Any, Any] = {
            self.of: gr.update(choices=choices(self.site), value=query.get("of")),
            self.file: query.get("file", ""),
            self.tokenizer: query.get("tokenizer", ""),
            self.rows: _rows(query),
            self.timer: gr.update(active=job is not None and not job.is_over),
            **dict.fromkeys(results, gr.update(visible=False)),
        }
        if job is None:
            return {**values, self.about: EMPTY}
        if not job.is_over:
            return {**values, self.about: f"Reading the rows, {job.seconds:.0f} s so far ..."}
        if job.result is None:
            about = f"**{plain(job.error or job.state)}**"
            return {**values, self.about: about, self.retry: gr.update(visible=True)}
        parts = parts_of(job.result)
        name = next(one for one in (query.get("part"), "data", *parts) if one in parts)
        values[self.part] = gr.update(choices=list(parts), value=name, visible=len(parts) > 1)
        values[self.counts] = if_any(row_table(parts[name]))
        values[self.plot] = gr.update(value=None, visible=False)
        if "lengths" in parts[name]:
            plot = lengths_plot(parts[name], 1 if is_narrow(query) else 2)
            values[self.lengths] = gr.update(value=lengths(parts[name]), visible=True)
            values[self.plot] = gr.update(value=plot, visible=True)
            values[self.examples] = gr.update(value=token_runs(parts[name].get("examples", ())), visible=True)
        return {**values, self.about: facts(parts[name])}

    def _read_again(self, query: Query) -> None:
        rows_job(self.site, query, again=True)


def rows_job(site: Site, query: Query, *, again: bool = False) -> Job | None:
    """The child process that reads the rows, which is started `again` if it failed; None if the query names none."""
    settings, stamp = site.settings, ""
    argv = ["--json", "--rows", str(_rows(query)), "--home", str(site.settings.home)]
    kind, _, name = query.get("of", "").partition(":")
    if target := query.get("file", ""):
        if settings.read_only:
            raise RunError("file: a read-only app shows the data of recipes and runs alone")
        file, tokenizer = _file(settings, target), query.get("tokenizer", "")
        within(settings, tokenizer)
        argv += ["--tokenizer", tokenizer] if tokenizer else []
        with contextlib.suppress(OSError):
            stat = file.stat()  # a changed file is read again
            stamp = f"{stat.st_mtime_ns} {stat.st_size}"
    elif kind in (("run", "exp") if settings.read_only else SOURCES) and name:
        experiment = source(site, {kind: name}).experiment
        if experiment is None:  # the recipe is being read
            return Job("", ())
        require_no_own_files(settings, experiment)
        target = str(written(site.settings.app_directory / "plans", experiment))
    else:
        return None
    key = f"data {argv} {target} {stamp}"
    return (None if again else site.jobs.get(key)) or site.jobs.start(key, ["-m", "nnxdsl", "data", target, *argv])


def _file(settings: Settings, target: str) -> Path:
    """The path of rows in the project; raises if it is outside of it, of the app itself, or an experiment's."""
    file = within(settings, target)
    with contextlib.suppress(DataError):  # which the child process tells
        for one in files_of([str(settings.project / target)]):
            within(settings, str(one.path))
    if file.exists():
        is_experiment = not is_source(target, settings.home, settings.project)
    else:  # a link in the home is not followed: whether it leads to a run is not told
        is_experiment = os.path.lexists(settings.home / next(iter(Path(target).parts), ""))
    if is_experiment:
        raise RunError(f"{target[:200]} has no rows, it is an experiment; choose recipes and runs under Data of")
    return file


def _rows(query: Query) -> int:
    row_count = whole(query.get("rows", ""))
    return ROWS if row_count is None else min(MOST_ROWS, row_count)
