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
from ..view import Done, Query, Values, View, if_any
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
        kinds = [("Model, for transformers", ""), ("Adapter, for PEFT", ADAPTER)]
        what = view.control("what", gr.Radio(kinds, value="", label="What", scale=2))
        dtype = view.control("dtype", gr.Dropdown(list(DTYPES), value=DTYPES[0], label="dtype"), DTYPES[0])
    words = gr.Markdown()
    buttons: list[gr.Button] = []
    if not site.settings.read_only:
        with gr.Row():
            buttons = [
                gr.Button("Export", variant="primary", visible=False, scale=0, min_width=160),
                gr.Button("Cancel", visible=False, scale=0, min_width=160),
            ]
    files = gr.Dataframe(label="Files", interactive=False, visible=False)
    timer = gr.Timer(1, active=False)

    def shown(query: Query) -> Values:
        ids = [row.id for row in with_checkpoints(site)]
        chosen = query.get("run") or next(iter(ids), "")
        place = _place(site, {**query, "run": chosen}) if chosen else None
        job = None if place is None else site.jobs.get(f"export {place}")
        is_running = job is not None and not job.is_over
        is_done = job is not None and job.result is not None
        written = [(name, f"{size:,}") for name, size in job.result["files"].items()] if job and job.result else []
        visible = (place is not None and not is_running and not is_done, is_running)
        return {
            run: gr.update(choices=ids, value=chosen or None),
            what: query.get("what", ""),
            dtype: query.get("dtype", DTYPES[0]),
            words: EMPTY if place is None else _told(place, job),
            files: if_any(pd.DataFrame(written, columns=["file", "bytes"])),
            timer: gr.update(active=is_running),
            **{button: gr.update(visible=one) for button, one in zip(buttons, visible, strict=False)},
        }

    def started(query: Query, client: str) -> Done:
        name = query.get("run") or next((row.id for row in with_checkpoints(site)), "")
        place, is_adapter = _place(site, {**query, "run": name}), query.get("what") == ADAPTER
        if place.exists() and any(place.iterdir()):
            return Done(f"{place} is not empty; move it away", is_problem=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        site.launcher.audit("export", name, client)
        words = ["-m", "nnxdsl", "export", str(site.run(name).path), str(place), "--json"]
        words += ["--dtype", query.get("dtype", DTYPES[0]), *(["--adapter"] if is_adapter else [])]
        site.jobs.start(f"export {place}", words)
        return Done(query={"run": name})

    def cancelled(query: Query, client: str) -> Done:
        site.jobs.cancel(f"export {_place(site, query)}")
        return Done("Cancelled; an incomplete export is removed.")

    view.shows(shown, [run, what, dtype, words, files, *buttons, timer], every=timer)
    for button, action in zip(buttons, (started, cancelled), strict=False):
        view.does(button.click, action)


def _place(site: Site, query: Query) -> Path:
    """The directory that an export of a query's run, or else of the first one, writes; a RunError says why none."""
    directory, dtype = site.run(query.get("run", "")), query.get("dtype", DTYPES[0])
    steps = steps_of(directory.path)
    if not steps:
        raise RunError(f"{directory.path.name} has no checkpoint yet")
    if dtype not in DTYPES:
        raise RunError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype[:40]!r}")
    what = "-adapter" if query.get("what") == ADAPTER else ""
    return site.settings.project / FOLDER / f"{directory.path.name}-{steps[0]}{what}-{dtype}"


def _told(place: Path, job: Job | None) -> str:
    """Where an export will be written, how far it is, or what came of it."""
    if job is None:
        there = f" {plain(str(place))} is not empty." if place.exists() else ""
        return f"Will be written to {plain(str(place))}.{there}"
    if not job.is_over:
        return f"Exporting to {plain(str(place))}, {job.seconds:.0f} s so far ..."
    if job.result is None:
        return f"**{plain(job.error or job.state)}**"
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


PAGE = Page(name="export", path="/export", title="Export", build=build)
