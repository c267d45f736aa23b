"""What the Sweeps page does: starts a sweep from a run, stops one, resumes one, retries its failed runs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import gradio as gr

from nnxdsl.cli.exit_codes import FAILED, INTERRUPTED
from nnxdsl.errors import RunError

from ...markdown import plain
from ...processes.launch import SWEEPS
from ...state import Site
from ...store.experiments import stored
from ...store.sweeps import Found, ask_to_stop, created, names, opened
from ...view import Done, Query, Values, View

COMBINED, ZIPPED = "Every combination", "First values together, then the second ones"


@attrs.frozen
class Actions:
    """Buttons and the form of a new sweep; built only where the app may write.

    Attributes:
        shown: Components whose values `values` gives.
    """

    site: Site
    stop: gr.Button
    resume: gr.Button
    retry: gr.Button
    refused: gr.Markdown
    base: gr.Dropdown

    @property
    def shown(self) -> Sequence[gr.Button | gr.Markdown | gr.Dropdown]:
        """Components whose values `values` gives."""
        return (self.stop, self.resume, self.retry, self.refused, self.base)

    @classmethod
    def build(cls, view: View, site: Site) -> Actions:
        """Adds the components, and what they do, to the page."""
        refused = gr.Markdown(visible=False, elem_classes=["problem"])
        with gr.Row():
            stop, resume, retry = (
                gr.Button(text, visible=False, size="sm", scale=0, min_width=160)
                for text in ("Stop the sweep", "Resume the sweep", "Retry failed runs")
            )
        with gr.Accordion("New sweep", open=False):
            base = gr.Dropdown([], label="Run", info="Its experiment is changed at every point")
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

        def begun(_query: Query, client: str, run: str, text: str, how: str, count: float) -> Done:
            experiment = stored(site.run(run or "").path / "experiment.json")
            if experiment is None:
                raise RunError(f"{run}: its experiment is damaged, or names code that is not allowed (--allow)")
            limit = site.settings.limits.queued
            home = site.settings.home
            path = created(home, experiment, text or "", zipped_values=how == ZIPPED, limit=limit)
            site.launcher.sweep(path, client, parallel=_count(count))
            return Done(f"Started {path.name}.", query={"of": path.name})

        def again(query: Query, client: str, count: float, *, retry_failed: bool = False) -> Done:
            found = _opened(site, query)
            site.launcher.sweep(found.path, client, parallel=_count(count), retry_failed=retry_failed)
            return Done(f"Resumed {found.name}.")

        def retried(query: Query, client: str, count: float) -> Done:
            return again(query, client, count, retry_failed=True)

        def stopped(query: Query, client: str) -> Done:
            found = _opened(site, query)
            ask_to_stop(found)
            site.launcher.audit("stop sweep", found.name, client)
            return Done("Stop requested: the command that drives the sweep stops all runs and ends.")

        view.does(start.click, begun, [base, fields, combine, parallel])
        view.does(resume.click, again, [parallel])
        view.does(retry.click, retried, [parallel])
        view.does(stop.click, stopped)
        return cls(site, stop, resume, retry, refused, base)

    def values(self, found: Found | None) -> Values:
        """Which buttons a sweep has, and why its last start was refused; None for no sweep."""
        points = () if found is None else found.points
        start = None if found is None else self.site.launcher.newest(found.name, SWEEPS)
        is_driven = start is not None and start.is_alive
        is_live = is_driven or any(point.row is not None and point.row.is_live for point in points)
        states = {point.state for point in points}
        is_ended = found is not None and not is_live
        is_refused = start is not None and not is_driven and start.exit_code not in (None, 0, FAILED, INTERRUPTED)
        output = plain(start.output()) if start is not None and is_refused else ""
        return {
            self.stop: gr.update(visible=is_live),
            self.resume: gr.update(visible=is_ended and bool(states - {"finished", "failed"})),
            self.retry: gr.update(
                visible=is_ended and "failed" in states and found is not None and found.kind == "sweep"
            ),
            self.refused: gr.update(value=f"**The last start was refused:** {output}", visible=is_refused),
            self.base: gr.update(choices=[row.id for row in self.site.index.rows()]),
        }


def _opened(site: Site, query: Query) -> Found:
    name = query.get("of") or next(iter(names(site.settings.home)), "")
    return opened(site.settings.home, site.index, site.series, name)


def _count(value: float | None) -> int:
    if value is None or value != int(value):
        raise RunError(f"concurrent runs: expected a whole number, got {value}")
    return int(value)
