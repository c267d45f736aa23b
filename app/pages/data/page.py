"""The Data page: what becomes of rows, their lengths, and some of them as tokens, before anything is trained."""

from __future__ import annotations

import contextlib
from typing import Any

import gradio as gr

from nnxdsl.data.sources.paths import files_of
from nnxdsl.errors import DataError, RunError

from ...components.token_runs import token_runs
from ...markdown import plain
from ...page import Page
from ...processes.jobs import Job
from ...state import Site
from ...store.experiments import written
from ...view import Done, Query, Values, View, if_any, is_narrow
from ...words import whole
from ..demo import choices
from ..layout.request import SOURCES, source, within
from .facts import facts, lengths, lengths_plot, parts_of, row_table

EMPTY = (
    "Shows what becomes of the rows of an experiment or of a file: how many are read, truncated or left out and why, "
    "how long they are, and some of them as tokens, with and without loss. Choose one above."
)
ROWS, MOST_ROWS = 3, 20


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Data")
    with gr.Row():
        of = gr.Dropdown([], label="Data of", info="A recipe, a run, or a draft", scale=2)
        about = "File, folder or glob in the project"
        can_name = not site.settings.read_only
        file = gr.Textbox(label="Or a file", info=about, placeholder="data/*.jsonl", scale=2, visible=can_name)
        tokenizer = gr.Textbox(label="Tokenizer of the file", info="Its directory; bytes without one", visible=can_name)
        rows = gr.Number(ROWS, label="Rows shown", info="As tokens", precision=0, minimum=0, maximum=MOST_ROWS)
    part = gr.Radio([], label="Part", visible=False)
    for name, control in {"of": of, "file": file, "tokenizer": tokenizer}.items():
        view.control(name, control)
    view.control("rows", rows, str(ROWS))
    words = gr.Markdown()
    retry = gr.Button("Read again", visible=False, size="sm", scale=0)
    bad = gr.Dataframe(label="Rows", interactive=False, wrap=True, visible=False)
    table = gr.Dataframe(label="Tokens of a row", interactive=False, visible=False)
    plot = gr.Plot(show_label=False, visible=False)
    examples = gr.HTML(visible=False, padding=False)
    timer = gr.Timer(1, active=False)
    found = [part, retry, bad, table, plot, examples]

    def shown(query: Query) -> Values:
        job = rows_job(site, query)
        values: dict[Any, Any] = {
            of: gr.update(choices=choices(site), value=query.get("of")),
            file: query.get("file", ""),
            tokenizer: query.get("tokenizer", ""),
            rows: _rows(query),
            timer: gr.update(active=job is not None and not job.is_over),
            **dict.fromkeys(found, gr.update(visible=False)),
        }
        if job is None:
            return {**values, words: EMPTY}
        if not job.is_over:
            return {**values, words: f"Reading the rows, {job.seconds:.0f} s so far ..."}
        if job.result is None:
            return {**values, words: f"**{plain(job.error or job.state)}**", retry: gr.update(visible=True)}
        parts = parts_of(job.result)
        name = next(one for one in (query.get("part"), "data", *parts) if one in parts)
        values[part] = gr.update(choices=list(parts), value=name, visible=len(parts) > 1)
        values[bad] = if_any(row_table(parts[name]))
        values[plot] = gr.update(value=None, visible=False)
        if "lengths" in parts[name]:
            drawn = lengths_plot(parts[name], 1 if is_narrow(query) else 2)
            values[table] = gr.update(value=lengths(parts[name]), visible=True)
            values[plot] = gr.update(value=drawn, visible=True)
            values[examples] = gr.update(value=token_runs(parts[name].get("examples", ())), visible=True)
        return {**values, words: facts(parts[name])}

    def read_again(query: Query, _client: str) -> None:
        rows_job(site, query, again=True)

    view.shows(shown, [of, file, tokenizer, rows, words, *found, timer], every=timer)
    view.does(retry.click, read_again)
    # Not a control, which an answer to the timer would leave as it is: parts are known when the rows were read.
    view.does(part.input, lambda query, client, name: Done(query={"part": name}), [part])


def rows_job(site: Site, query: Query, *, again: bool = False) -> Job | None:
    """The child process that reads the rows, which is started `again` if it failed; None if the query names none."""
    settings, stamp = site.settings, ""
    words = ["--json", "--rows", str(_rows(query)), "--home", str(site.settings.home)]
    kind, _, name = query.get("of", "").partition(":")
    if target := query.get("file", ""):
        if settings.read_only:
            raise RunError("file: a read-only app shows the data of recipes and runs alone")
        file, tokenizer = within(settings, target), query.get("tokenizer", "")
        within(settings, tokenizer)
        with contextlib.suppress(DataError):  # which the child process tells
            for one in files_of([str(settings.project / target)]):
                within(settings, str(one.path))
        words += ["--tokenizer", tokenizer] if tokenizer else []
        with contextlib.suppress(OSError):
            stat = file.stat()  # a changed file is read again
            stamp = f"{stat.st_mtime_ns} {stat.st_size}"
    elif kind in (("run", "exp") if settings.read_only else SOURCES) and name:
        experiment = source(site, {kind: name}).experiment
        if experiment is None:  # the recipe is being read
            return Job("", ())
        target = str(written(site.settings.own / "plans", experiment))
    else:
        return None
    key = f"data {words} {target} {stamp}"
    return (None if again else site.jobs.get(key)) or site.jobs.start(key, ["-m", "nnxdsl", "data", target, *words])


def _rows(query: Query) -> int:
    given = whole(query.get("rows", ""))
    return ROWS if given is None else min(MOST_ROWS, given)


PAGE = Page(name="data", path="/data", title="Data", build=build)
