"""The System page: processors, memory, GPUs and disk of this machine now and over time, and what each run uses."""

from __future__ import annotations

from collections.abc import Sequence

import gradio as gr
import numpy as np
import pandas as pd

from ..components.plots import Chart, Line, figure
from ..page import Page
from ..processes.usage import SECONDS, Sample, disk
from ..store.index import Row
from ..view import Query, Values, if_any, is_narrow

NOTE = (
    "Sampled as long as the app runs, every 5 s while this page is open and every 15 s otherwise; the last hours are "
    "kept until the app ends. Memory of devices over a run's steps is among its charts."
)
GAP_MINUTES = 1.0  # time between two samples from which on they are not connected


class System(Page):
    """What the machine and each live run use."""

    name, path, title = "system", "/system", "System"

    def build(self) -> None:
        gr.Markdown(f"# System\n\n{NOTE}")
        self.now = gr.Markdown()
        self.gpus = gr.Dataframe(label="GPUs", interactive=False, visible=False)
        self.runs = gr.Dataframe(label="Live runs", interactive=False, visible=False)
        self.plot = gr.Plot(show_label=False)
        self.timer = gr.Timer(SECONDS)

    def fill(self, query: Query) -> Values:
        rows, samples = [row for row in self.site.index.rows() if row.is_live], self.site.usage.samples()
        last = samples[-1]
        free, total = disk(self.site.settings.home)
        machine = (
            f"Processors **{last.processors:.1f} of {last.count}** · Host memory **{last.memory:.1f} of "
            f"{last.total:.1f} GiB** · Disk of the runs **{free:.1f} GiB free of {total:.1f}**"
        )
        return {
            self.now: machine if rows else f"{machine}\n\nNo run is live.",
            self.gpus: if_any(_gpus(last)),
            self.runs: if_any(pd.DataFrame([_run(row, last) for row in rows])),
            self.plot: figure(_charts(samples), "minutes ago", 1 if is_narrow(query) else 2),
        }


def _gpus(last: Sample) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "GPU": gpu.name,
            "Memory, GiB": f"{gpu.memory:.1f} of {gpu.total:.1f}",
            "Utilization": "unknown" if gpu.utilization is None else f"{gpu.utilization:.0f} %",
        }
        for gpu in last.gpus
    )


def _run(row: Row, last: Sample) -> dict[str, str]:
    used, device = last.runs.get(row.id), row.metrics.get("peak_memory_gib")
    figures = {
        "Run": row.id,
        "State": row.state,
        "Process": f"{row.status.get('host')}:{row.status.get('pid')}",
        "Processors": "" if used is None else f"{used.processors:.1f}",
        "Host memory, GiB": "" if used is None else f"{used.memory:.2f}",
        "Peak of its device, GiB": "" if device is None else f"{device:.2f}",
    }
    if last.gpus:
        gpus = {} if used is None else used.gpus
        busy = [f"{gpu.utilization:.0f} %" for gpu in last.gpus if gpu.name in gpus and gpu.utilization is not None]
        labels = [f"{memory:.1f} of {name}" for name, memory in gpus.items() if memory == memory]
        figures |= {"GPU memory, GiB": ", ".join(labels), "Utilization of its GPUs": ", ".join(busy)}
    return figures


def _charts(samples: Sequence[Sample]) -> list[Chart]:
    """What is used over time: of the machine, of each run, of each GPU; with gaps where the app took no samples."""
    minutes = np.array([(one.time - samples[-1].time) / 60 for one in samples])
    curves = {
        "Processors in use": [
            {"machine": one.processors, **{run: used.processors for run, used in one.runs.items()}} for one in samples
        ],
        "Host memory, GiB": [
            {"machine": one.memory, **{run: used.memory for run, used in one.runs.items()}} for one in samples
        ],
        "GPU memory, GiB": [
            {gpu.name: gpu.memory for gpu in one.gpus}
            | {run: sum(used.gpus.values()) for run, used in one.runs.items() if used.gpus}
            for one in samples
        ],
        "GPU utilization, %": [{gpu.name: gpu.utilization for gpu in one.gpus} for one in samples],
    }
    gaps = np.flatnonzero(np.diff(minutes) > GAP_MINUTES) + 1
    x = np.insert(minutes, gaps, minutes[gaps - 1])

    def lines(rows: list[dict[str, float]]) -> list[Line]:
        columns = pd.DataFrame(rows).astype(float)
        return [
            Line(str(name), x, np.insert(column.to_numpy(), gaps, np.nan), colour)
            for colour, (name, column) in enumerate(columns.items())
        ]

    return [Chart(title, lines(rows)) for title, rows in curves.items() if any(rows)]
