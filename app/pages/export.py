"""The Export page: a run's model for transformers, or its adapter for PEFT, written by a child process."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import pandas as pd

from nnxdsl.errors import RunError

from ..html import link
from ..markdown import link as markdown_link
from ..markdown import plain
from ..page import Page
from ..processes.jobs import Job
from ..state import Site
from ..view import Done, Query, Values, View
from ..words import number
from .outputs.request import steps_of, with_checkpoints

DTYPES = ("float32", "bfloat16", "float16")
ADAPTER = "adapter"
FOLDER = "exports"
"""In the project's directory."""
EMPTY = (
    "Writes the newest checkpoint of a run as safetensors: the whole model, adapters merged, for transformers and "
    "vLLM, or the adapter alone for PEFT. What was written is read back and compared with the run's logits. "
    "No run has saved a checkpoint yet."
)


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# Export")
    with gr.Row():
        run = view.control("run", gr.Dropdown([], label="Run", info="Its newest checkpoint", scale=2))
        what = view.control(
            "what",
            gr.Radio(
                [("Model, for transformers", ""), ("Adapter, for PEFT", ADAPTER)], value="", label="What", scale=2
            ),
        )
        dtype = view.control("dtype", gr.Dropdown(list(DTYPES), value=DTYPES[0], label="dtype"), DTYPES[0])
    words = gr.Markdown()
    can_write = not site.settings.read_only
    with gr.Row():
        start = gr.Button("Export", variant="primary", visible=False, scale=0, min_width=160) if can_write else None
        cancel = gr.Button("Cancel", visible=False, scale=0, min_width=160) if can_write else None
    files = gr.Dataframe(label="Files", interactive=False, visible=False)
    timer = gr.Timer(1, active=False)
    buttons = [one for one in (start, cancel) if one is not None]

    def shown(query: Query) -> Values:
        ids = [row.id for row in with_checkpoints(site)]
        chosen = query.get("run") or next(iter(ids), "")
        values: Values = {
            run: gr.update(choices=ids, value=chosen or None),
            what: query.get("what", ""),
            dtype: query.get("dtype", DTYPES[0]),
            files: gr.update(visible=False),
            timer: gr.Timer(active=False),
            **{button: gr.update(visible=False) for button in buttons},
        }
        if not chosen:
            return {**values, words: EMPTY}
        words_of_it, place = _arguments(site, {**query, "run": chosen})
        job = site.jobs.get(_key(words_of_it))
        first: Values = {} if start is None else {start: gr.update(visible=True)}
        if job is None:
            there = f" {plain(str(place))} is not empty." if place.exists() else ""
            return {**values, **first, words: f"Will be written to {plain(str(place))}.{there}"}
        if not job.is_over:
            told = {
                timer: gr.Timer(active=True),
                words: f"Exporting to {plain(str(place))}, {job.seconds:.0f} s so far ...",
            }
            return {**values, **told, **({} if cancel is None else {cancel: gr.update(visible=True)})}
        if job.result is None:
            return {**values, **first, words: f"**{plain(job.error or job.state)}**"}
        return {**values, words: _told(job), files: gr.update(value=_files(job), visible=True)}

    view.shows(shown, [run, what, dtype, words, files, *buttons, timer], every=timer)
    if start is None or cancel is None:
        return

    def started(query: Query, client: str) -> Done:
        name = query.get("run") or next((row.id for row in with_checkpoints(site)), "")
        words_of_it, place = _arguments(site, {**query, "run": name})
        if place.exists() and any(place.iterdir()):
            return Done(f"{place} is not empty; move it away", is_problem=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        site.launcher.audit("export", name, client)
        site.jobs.start(_key(words_of_it), words_of_it)
        return Done(query={"run": name})

    def cancelled(query: Query, _client: str) -> Done:
        site.jobs.cancel(_key(_arguments(site, query)[0]))
        return Done("Cancelled; an incomplete export is removed.")

    view.does(start.click, started)
    view.does(cancel.click, cancelled)


def _arguments(site: Site, query: Query) -> tuple[tuple[str, ...], Path]:
    """The child process's arguments, and the directory that it writes.

    Raises:
        RunError: There is no such run, it has no checkpoint, or the dtype is another one.
    """
    directory, dtype = site.run(query.get("run", "")), query.get("dtype", DTYPES[0])
    steps = steps_of(directory.path)
    if not steps:
        raise RunError(f"{directory.path.name} has no checkpoint yet")
    if dtype not in DTYPES:
        raise RunError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype[:40]!r}")
    is_adapter = query.get("what") == ADAPTER
    name = f"{directory.path.name}-{steps[0]}{'-adapter' if is_adapter else ''}-{dtype}"
    place = site.settings.project / FOLDER / name
    words = ("-m", "nnxdsl", "export", str(directory.path), str(place), "--dtype", dtype, "--json")
    return (*words, *(("--adapter",) if is_adapter else ())), place


def _key(words: tuple[str, ...]) -> str:
    return f"export {' '.join(words)}"


def _told(job: Job) -> str:
    found = job.result
    run = markdown_link(found["run"], link("/run", id=found["run"]))
    lines = [
        f"**{plain(found['directory'])}**: {plain(found['kind'])} of {run} "
        f"after {found['step']:,} steps, in {plain(found['dtype'])}, in {job.seconds:.0f} s",
        f"Read back, logits differ by at most {number(found['difference'])} from the run's, of which the largest is "
        f"{number(found['largest'])}.",
        f"Tokenizer: {plain(str(found['tokenizer']))}",
        *([f"Base: {plain(str(found['base']))}"] if found.get("base") else []),
        *(plain(str(note)) for note in found.get("notes") or ()),
    ]
    return "\n\n".join(lines)


def _files(job: Job) -> pd.DataFrame:
    files = job.result["files"]
    return pd.DataFrame([{"file": name, "bytes": f"{size:,}"} for name, size in files.items()])


PAGE = Page(name="export", path="/export", title="Export", build=build)
