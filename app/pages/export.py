"""The Export page: a run's model for transformers, or its adapter for PEFT, written by a child process."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import pandas as pd

from nnxdsl.errors import RunError

from ..formatting import number
from ..markup import markdown_link, plain
from ..page import Page
from ..processes.jobs import Job
from ..state import Site
from ..view import Done, Query, Values, if_any
from .outputs.request import steps_of, with_checkpoints

DTYPES = ("float32", "bfloat16", "float16")
ADAPTER = "adapter"
FOLDER = "exports"  # in the project's directory
EMPTY = (
    "Writes the newest checkpoint of a run as safetensors: the whole model, adapters merged, for transformers and "
    "vLLM, or the adapter alone for PEFT. What was written is read back and compared with the run's logits. "
    "No run has saved a checkpoint yet."
)


class Export(Page):
    """What to export, how far it is, and the files that were written."""

    name, path, title = "export", "/export", "Export"

    def build(self) -> None:
        gr.Markdown("# Export")
        control, kinds = self.view.control, [("Model, for transformers", ""), ("Adapter, for PEFT", ADAPTER)]
        with gr.Row():
            self.run = control("run", gr.Dropdown([], label="Run", info="Its newest checkpoint", scale=2))
            self.kind = control("what", gr.Radio(kinds, value="", label="What", scale=2))
            self.dtype = control("dtype", gr.Dropdown(list(DTYPES), value=DTYPES[0], label="dtype"), DTYPES[0])
        self.status = gr.Markdown()
        self.buttons: list[gr.Button] = []
        if not self.site.settings.read_only:
            with gr.Row():
                hidden = {"visible": False, "min_width": 160}
                start = self.view.button("Export", self._start, variant="primary", **hidden)
                self.buttons = [start, self.view.button("Cancel", self._cancel, **hidden)]
        self.files = gr.Dataframe(label="Files", interactive=False, visible=False)
        self.timer = gr.Timer(1, active=False)

    def fill(self, query: Query) -> Values:
        """Shows the export of the query, or of the newest run with a checkpoint."""
        ids = [row.id for row in with_checkpoints(self.site)]
        run, place, job, status = query.get("run") or next(iter(ids), ""), None, None, EMPTY
        try:
            place = _place(self.site, {**query, "run": run}) if run else None
        except RunError as error:
            status = f"**{plain(str(error))}**"
        if place is not None:
            job = self.site.jobs.get(f"export {place}")
        is_running, result = job is not None and not job.is_over, None if job is None else job.result
        status = status if place is None else _status(place, job)
        files = [] if result is None else [(name, f"{size:,}") for name, size in result["files"].items()]
        visible = (place is not None and not is_running and result is None, is_running)
        return {
            self.run: gr.update(choices=ids, value=run or None),
            self.kind: query.get("what", ""),
            self.dtype: query.get("dtype", DTYPES[0]),
            self.status: status,
            self.files: if_any(pd.DataFrame(files, columns=["file", "bytes"])),
            self.timer: gr.update(active=is_running),
            **{button: gr.update(visible=one) for button, one in zip(self.buttons, visible, strict=False)},
        }

    def _start(self, query: Query) -> Done:
        name = query.get("run") or next((row.id for row in with_checkpoints(self.site)), "")
        place, is_adapter = _place(self.site, {**query, "run": name}), query.get("what") == ADAPTER
        if place.exists() and any(place.iterdir()):
            return Done(f"{place} is not empty; move it away", is_problem=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.site.launcher.audit("export", name)
        argv = ["-m", "nnxdsl", "export", str(self.site.run(name).path), str(place), "--json"]
        argv += ["--dtype", query.get("dtype", DTYPES[0]), *(["--adapter"] if is_adapter else [])]
        self.site.jobs.start(f"export {place}", argv)
        return Done(query={"run": name})

    def _cancel(self, query: Query) -> Done:
        self.site.jobs.cancel(f"export {_place(self.site, query)}")
        return Done("Cancelled; an incomplete export is removed.")


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


def _status(place: Path, job: Job | None) -> str:
    """Where an export will be written, how far it is, or what came of it."""
    if job is None:
        warning = f" {plain(str(place))} is not empty." if place.exists() else ""
        return f"Will be written to {plain(str(place))}.{warning}"
    if not job.is_over:
        return f"Exporting to {plain(str(place))}, {job.seconds:.0f} s so far ..."
    if job.result is None:
        return f"**{plain(job.error or job.state)}**"
    result = job.result
    run = markdown_link(result["run"], "/run", id=result["run"])
    lines = [
        f"**{plain(result['directory'])}**: {plain(result['kind'])} of {run} "
        f"after {result['step']:,} steps, in {plain(result['dtype'])}, in {job.seconds:.0f} s",
        f"Read back, logits differ by at most {number(result['difference'])} from the run's, of which the largest is "
        f"{number(result['largest'])}.",
        f"Tokenizer: {plain(str(result['tokenizer']))}",
        *([f"Base: {plain(str(result['base']))}"] if result.get("base") else []),
        *(plain(str(note)) for note in result.get("notes") or ()),
    ]
    return "\n\n".join(lines)
