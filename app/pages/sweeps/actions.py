"""What the Sweeps page does: starts a sweep from a run, stops one, resumes one, retries its failed runs."""

from __future__ import annotations

from functools import partial

import gradio as gr

from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.errors import RunError

from ...markdown import plain
from ...page import Part
from ...processes.launch import SWEEPS
from ...state import Site
from ...store.experiments import stored
from ...store.sweeps import OpenedSweep, ask_to_stop, created, names, opened
from ...view import Done, Query, Values, View

COMBINED, ZIPPED = "Grid: every combination", "Zip: first values together, then second ones"


class Actions(Part):
    """Buttons and the form of a new sweep; built only where the app may write."""

    def __init__(self, view: View, site: Site) -> None:
        """Adds the components, and what they do, to the page."""
        self.site = site
        self._refused = gr.Markdown(visible=False, elem_classes=["problem"])
        with gr.Row():
            self._stop, self._resume, self._retry = (
                gr.Button(text, visible=False, size="sm", scale=0, min_width=160)
                for text in ("Stop the sweep", "Resume the sweep", "Retry failed runs")
            )
        with gr.Accordion("New sweep", open=False):
            self._base = gr.Dropdown([], label="Run", info="Its experiment is changed at every point")
            fields = gr.Textbox(
                label="Fields",
                info="One per line, with values as on the command line",
                lines=3,
                placeholder="objective.beta=0.05, 0.1\nseed=0, 1",
            )
            with gr.Row():
                combine = gr.Radio([COMBINED, ZIPPED], value=COMBINED, label="Points")
                parallel = gr.Number(1, label="Concurrent runs", precision=0, minimum=1)
            start = gr.Button("Start the sweep", variant="primary", scale=0, min_width=160)
        view.on(start.click, self._started, [self._base, fields, combine, parallel])
        view.on(self._resume.click, self._resumed, [parallel])
        view.on(self._retry.click, partial(self._resumed, retry_failed=True), [parallel])
        view.on(self._stop.click, self._stopped)

    def fill(self, sweep: OpenedSweep | None) -> Values:
        """Shows which buttons a sweep has, and why its last start was refused; None for no sweep."""
        points = () if sweep is None else sweep.points
        start = None if sweep is None else self.site.launcher.newest(sweep.name, SWEEPS)
        is_driven = start is not None and start.is_alive
        is_live = is_driven or any(point.row is not None and point.row.is_live for point in points)
        states = set() if is_live else {point.state for point in points}
        is_refused = start is not None and not is_driven and start.exit_code not in (None, 0, FAILED, INTERRUPTED)
        output = plain(start.output()) if start is not None and is_refused else ""
        return {
            self._stop: gr.update(visible=is_live),
            self._resume: gr.update(visible=bool(states - {"finished", "failed"})),
            self._retry: gr.update(visible="failed" in states and sweep is not None and sweep.kind == "sweep"),
            self._refused: gr.update(value=f"**The last start was refused:** {output}", visible=is_refused),
            self._base: gr.update(choices=[row.id for row in self.site.index.rows()]),
        }

    def _started(self, query: Query, run: str, text: str, points: str, parallel: int | None) -> Done:
        site = self.site
        experiment = stored(site.run(run or "").path / "experiment.json")
        if experiment is None:
            raise RunError(f"{run}: its experiment is damaged, or names code that is not allowed (--allow)")
        path = created(site.settings, experiment, text or "", zipped_values=points == ZIPPED)
        site.launcher.sweep(path, parallel=parallel or 1)
        return Done(f"Started {path.name}.", query={"of": path.name})

    def _resumed(self, query: Query, parallel: int | None, *, retry_failed: bool = False) -> Done:
        sweep = self._opened(query)
        self.site.launcher.sweep(sweep.path, parallel=parallel or 1, retry_failed=retry_failed)
        return Done(f"Resumed {sweep.name}.")

    def _stopped(self, query: Query) -> Done:
        sweep = self._opened(query)
        ask_to_stop(sweep)
        self.site.launcher.audit("stop sweep", sweep.name)
        return Done("Stop requested: the command that drives the sweep stops all runs and ends.")

    def _opened(self, query: Query) -> OpenedSweep:
        home = self.site.settings.home
        return opened(home, self.site.index, self.site.series, query.get("of") or next(iter(names(home)), ""))
