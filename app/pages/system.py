"""The System page: processors, memory, GPUs and disk of this machine now and over time, and what each run uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import gradio as gr
import numpy as np
import pandas as pd

from nnxdsl.storage import process_info

from ..components.plots import Chart, Line, figure
from ..page import Page
from ..processes.usage import SECONDS, Process, Sample, disk
from ..state import Site
from ..store.index import Row
from ..view import Query, Values, View, is_narrow

NOTE = (
    "Sampled every 5 s while this page is open; the last hour is kept until the app ends. Memory of devices over a "
    "run's steps is among its charts."
)


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown(f"# System\n\n{NOTE}")
    words = gr.Markdown()
    gpus = gr.Dataframe(label="GPUs", interactive=False, visible=False)
    runs = gr.Dataframe(label="Live runs", interactive=False, visible=False)
    plot = gr.Plot(show_label=False)

    def shown(query: Query) -> Values:
        rows = [row for row in site.index.rows() if row.is_live]
        here = {row.id: pid for row in rows if (pid := _pid_here(row)) is not None}
        samples = site.usage.samples(here)
        last = samples[-1]
        return {
            words: _words(site, last, rows),
            gpus: gr.update(value=_gpus(last), visible=bool(last.gpus)),
            runs: gr.update(value=_runs(last, rows), visible=bool(rows)),
            plot: figure(_charts(samples), "minutes ago", 1 if is_narrow(query) else 2),
        }

    view.shows(shown, [words, gpus, runs, plot], every=SECONDS)


def _pid_here(row: Row) -> int | None:
    """Process number of a run of this machine."""
    pid = row.status.get("pid")
    return pid if isinstance(pid, int) and row.status.get("host") == process_info.hostname() else None


def _words(site: Site, last: Sample, rows: Sequence[Row]) -> str:
    free, total = disk(site.settings.home)
    found = [
        f"Processors **{last.processors:.1f} of {last.count}**",
        f"Host memory **{last.memory:.1f} of {last.total:.1f} GiB**",
        f"Disk of the runs **{free:.1f} GiB free of {total:.1f}**",
    ]
    return " · ".join(found) + ("" if rows else "\n\nNo run is live.")


def _gpus(last: Sample) -> pd.DataFrame:
    busy = ["not told" if gpu.utilization is None else f"{gpu.utilization:.0f} %" for gpu in last.gpus]
    memory = [f"{gpu.memory:.1f} of {gpu.total:.1f}" for gpu in last.gpus]
    return pd.DataFrame({"GPU": [gpu.name for gpu in last.gpus], "Memory, GiB": memory, "Utilization": busy})


def _runs(last: Sample, rows: Sequence[Row]) -> pd.DataFrame:
    used = [last.runs.get(row.id) for row in rows]
    device = [row.metrics.get("peak_memory_gib") for row in rows]
    return pd.DataFrame(
        {
            "Run": [row.id for row in rows],
            "State": [row.state for row in rows],
            "Process": [f"{row.status.get('host')}:{row.status.get('pid')}" for row in rows],
            "Processors": ["" if one is None else f"{one.processors:.1f}" for one in used],
            "Host memory, GiB": ["" if one is None else f"{one.memory:.2f}" for one in used],
            "Peak of its device, GiB": ["" if one is None else f"{one:.2f}" for one in device],
        }
    )


def _charts(samples: Sequence[Sample]) -> list[Chart]:
    """What is used over time: of the machine, of each run, of each GPU."""
    minutes = np.array([(sample.time - samples[-1].time) / 60 for sample in samples])

    def chart(title: str, used: Callable[[Sample], Mapping[str, float]]) -> Chart:
        each = [used(sample) for sample in samples]
        names = dict.fromkeys(name for values in each for name in values)
        curves = {name: np.array([values.get(name, np.nan) for values in each]) for name in names}
        return Chart(title, [Line(name, minutes, y, at) for at, (name, y) in enumerate(curves.items())])

    charts = [
        chart("Processors in use", lambda one: {"machine": one.processors} | _of(one, lambda run: run.processors)),
        chart("Host memory, GiB", lambda one: {"machine": one.memory} | _of(one, lambda run: run.memory)),
        chart("Memory of GPUs, GiB", lambda one: {gpu.name: gpu.memory for gpu in one.gpus}),
    ]
    return [chart for chart in charts if chart.lines]


def _of(sample: Sample, figure: Callable[[Process], float]) -> dict[str, float]:
    return {run: figure(process) for run, process in sample.runs.items()}


PAGE = Page(name="system", path="/system", title="System", build=build)
