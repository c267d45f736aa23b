"""The System page: processors, memory, GPUs and disk of this machine now and over time, and what each run uses."""

from __future__ import annotations

from collections.abc import Sequence

import gradio as gr
import numpy as np
import pandas as pd

from nnxdsl.runs.status import writer_of

from ..components.plots import Chart, Line, figure
from ..page import Page
from ..processes.usage import SECONDS, Sample, disk
from ..state import Site
from ..store.index import Row
from ..view import Query, Values, View, if_any, is_narrow

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
        writers = {row.id: writer_of(row.status) for row in rows}
        samples = site.usage.samples(
            {run: one.pid for run, one in writers.items() if one is not None and one.is_here()}
        )
        last = samples[-1]
        free, total = disk(site.settings.home)
        machine = (
            f"Processors **{last.processors:.1f} of {last.count}** · Host memory **{last.memory:.1f} of "
            f"{last.total:.1f} GiB** · Disk of the runs **{free:.1f} GiB free of {total:.1f}**"
        )
        return {
            words: machine if rows else f"{machine}\n\nNo run is live.",
            gpus: if_any(_gpus(last)),
            runs: if_any(pd.DataFrame([_run(row, last) for row in rows])),
            plot: figure(_charts(samples), "minutes ago", 1 if is_narrow(query) else 2),
        }

    view.shows(shown, [words, gpus, runs, plot], every=SECONDS)


def _gpus(last: Sample) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "GPU": gpu.name,
            "Memory, GiB": f"{gpu.memory:.1f} of {gpu.total:.1f}",
            "Utilization": "not told" if gpu.utilization is None else f"{gpu.utilization:.0f} %",
        }
        for gpu in last.gpus
    )


def _run(row: Row, last: Sample) -> dict[str, str]:
    used, device = last.runs.get(row.id), row.metrics.get("peak_memory_gib")
    return {
        "Run": row.id,
        "State": row.state,
        "Process": f"{row.status.get('host')}:{row.status.get('pid')}",
        "Processors": "" if used is None else f"{used.processors:.1f}",
        "Host memory, GiB": "" if used is None else f"{used.memory:.2f}",
        "Peak of its device, GiB": "" if device is None else f"{device:.2f}",
    }


def _charts(samples: Sequence[Sample]) -> list[Chart]:
    """What is used over time: of the machine, of each run, of each GPU."""
    minutes = np.array([(one.time - samples[-1].time) / 60 for one in samples])
    curves = {
        "Processors in use": [
            {"machine": one.processors, **{run: used.processors for run, used in one.runs.items()}} for one in samples
        ],
        "Host memory, GiB": [
            {"machine": one.memory, **{run: used.memory for run, used in one.runs.items()}} for one in samples
        ],
        "Memory of GPUs, GiB": [{gpu.name: gpu.memory for gpu in one.gpus} for one in samples],
    }
    return [
        Chart(
            title,
            [Line(str(name), minutes, y.to_numpy(), at) for at, (name, y) in enumerate(pd.DataFrame(rows).items())],
        )
        for title, rows in curves.items()
        if any(rows)
    ]


PAGE = Page(name="system", path="/system", title="System", build=build)
