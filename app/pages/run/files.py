"""Tabs of a run's files: log, config, samples, environment, events."""

from __future__ import annotations

import re
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl import Experiment
from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import diff, get
from nnxdsl.errors import NnxdslError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ...formatting import local_time, size, whole
from ...markup import link, plain
from ...processes.launch import tail
from ...state import Site
from ...store.experiments import stored
from ...store.index import Row
from ...view import Part, Query, Values, View, if_any

_WRONG = re.compile(r"\b\w*Error\b|Traceback|^refused")
_STAMP = 22  # characters of the time at the beginning of a line of the log
SHOWN_SAMPLES = 60
SHOWN_EVENTS = 300
TO_ERROR = "error"
TO_END = """() => requestAnimationFrame(() => {
  const text = document.querySelector("#run-log textarea");
  if (text && !text.dataset.isAtEnd) { text.scrollTop = text.scrollHeight; text.dataset.isAtEnd = "1"; }
})"""
"""gradio follows a text that grows, and yet shows the beginning of its first value."""
SAVED = ("experiment.py", "experiment.json", "metrics.jsonl", "metrics.csv")
OTHERS = 50
FOREIGN = "It names classes of another package, which the app does not import; this is the stored file."
_TABLE: dict[str, Any] = {"interactive": False, "wrap": True, "visible": False, "show_search": "filter"}


class Config(Part):
    """The run's experiment as Python, its files, and what differs from a recipe or another run."""

    def __init__(self, view: View) -> None:
        with gr.Row(elem_classes=["buttons"]):
            self.saves = {name: gr.Button(name, link="#", size="sm", scale=0) for name in SAVED}
        self.other = view.control("with", gr.Dropdown([("nothing", "")], value="", label="Differences from"))
        self.note = gr.Markdown()
        self.table = gr.Dataframe(interactive=False, wrap=True, visible=False, label="Differences")
        self.code = gr.Code(language="python", interactive=False, label="Python")

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Shows the experiment, or its stored file if the app cannot read it."""
        links = {save: gr.update(link=link("/download", run=row.id, file=name)) for name, save in self.saves.items()}
        experiment = stored(directory.path / "experiment.json")
        if experiment is None:
            source = (directory.path / "experiment.py").read_text(encoding="utf-8")[:200_000]
            hidden = gr.update(visible=False)
            return {**links, self.other: hidden, self.note: FOREIGN, self.table: hidden, self.code: source}
        choices = {"": "nothing"} | {f"preset:{name}": f"recipe {name}" for name in site.presets.names()}
        choices |= {f"run:{one.id}": f"run {one.id}" for one in site.index.rows()[:OTHERS] if one.id != row.id}
        chosen = query.get("with", "")
        note, changes = _differences(site, chosen, experiment)
        listed = [(text, value) for value, text in choices.items()]
        return {
            **links,
            self.other: gr.update(choices=listed, value=chosen if chosen in choices else "", visible=True),
            self.note: plain(note),
            self.table: if_any(changes),
            self.code: to_python(experiment),
        }


def _differences(site: Site, compared: str, experiment: Experiment) -> tuple[str, pd.DataFrame]:
    """Text on the differences from a recipe or run, and a table of them."""
    kind, _, name = compared.partition(":")
    none = pd.DataFrame()
    if not name:
        return "", none
    try:
        if kind == "preset":
            other, job = site.presets.experiment(name), site.presets.job(name)
            missing = job.error if job is not None and job.error else "The recipe is still being read."
        else:
            other, missing = stored(site.run(name).path / "experiment.json"), f"{name} cannot be read by the app."
        if other is None:
            return missing, none
        changes = diff(other, experiment)
    except NnxdslError as error:
        return str(error), none
    if not changes:
        return f"No differences from {name}.", none
    rows = [(path, render(get(other, path)), render(value)) for path, value in changes.items()]
    return f"{len(rows)} differences from {name}", pd.DataFrame(rows, columns=["Field", name, "this run"])


class Log(Part):
    """The last lines of the log; nothing new of it while it is paused."""

    def __init__(self, view: View) -> None:
        with gr.Row():
            hint: dict[str, Any] = {"placeholder": "Filter lines ...", "max_lines": 1, "scale": 3, "min_width": 300}
            self.search = view.control("find", gr.Textbox(label="Search the log", **hint))
            choices = [("All lines", ""), ("Up to the last error", TO_ERROR)]
            view.control("lines", gr.Radio(choices, value="", label="Show", scale=2))
            view.control("pause", gr.Checkbox(label="Pause", info="Not followed", min_width=160))
        with gr.Row(elem_classes=["buttons"]):
            self.about = gr.Markdown()
            self.save = gr.Button("Download", link="#", size="sm", scale=0)
        self.text = gr.Textbox(label="Log", lines=24, max_lines=24, interactive=False, elem_id="run-log")
        self.text.change(None, js=TO_END, api_visibility="private")
        with gr.Accordion("Process output", open=False, visible=False) as self.process:
            self.output = gr.Textbox(show_label=False, label="Process output", max_lines=24)

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        wanted, limit = query.get("find", "").strip().lower(), site.settings.limits.log_bytes
        lines = tail(directory.log, limit).splitlines()
        if query.get("lines") == TO_ERROR:
            wrong = [number for number, line in enumerate(lines) if _WRONG.search(line[_STAMP:] or line)]
            lines = lines[: wrong[-1] + 1] if wrong else []
        lines = [line for line in lines if wanted in line.lower()]
        count = directory.log.stat().st_size if directory.log.exists() else 0
        cut = f", the last {size(limit)} are shown" if count > limit else ""
        newest = site.launcher.newest(row.id)
        output = newest.output().strip() if newest is not None else ""
        followed: Values = {self.about: f"{size(count)}{cut}; {len(lines):,} lines", self.text: "\n".join(lines)}
        return {
            self.save: gr.update(link=link("/download", run=row.id, file="log.txt")),
            **({} if query.get("pause") == "1" else followed),
            self.process: gr.update(visible=bool(output)),
            self.output: output,
        }


class Samples(Part):
    """The completions of an evaluation, by default the last."""

    def __init__(self, view: View) -> None:
        self.note = gr.Markdown("No answers yet. Completions of evaluation.prompts are sampled at every evaluation.")
        self.step = view.control("step", gr.Dropdown([], label="Answers at", visible=False))
        more: dict[str, Any] = {"column_widths": ["24%", "38%", "38%"], "elem_id": "run-samples"}
        self.table = gr.Dataframe(label="Answers", **more, **_TABLE)

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        samples = directory.samples()
        if not samples:
            return {self.note: gr.update(visible=True)}
        steps = sorted({sample["step"] for sample in samples})
        chosen_step = whole(query.get("step", ""))
        step = chosen_step if chosen_step in steps else steps[-1]
        lines = [
            [str(sample.get(name) or "") for name in ("prompt", "policy", "reference")]
            for sample in samples
            if sample["step"] == step
        ]
        frame = pd.DataFrame(lines[:SHOWN_SAMPLES], columns=["Prompt", "Policy", "Reference"])
        choices = [(f"step {one:,}", str(one)) for one in steps]
        return {
            self.note: gr.update(visible=False),
            self.step: gr.update(choices=choices, value=str(step), visible=True),
            self.table: gr.update(value=frame, visible=True),
        }


class Environment(Part):
    """What each attempt ran on, the newest first."""

    def __init__(self, view: View) -> None:
        self.note = gr.Markdown("No step has started yet; the environment is recorded at the first step.")
        self.table = gr.Dataframe(label="Attempts", pinned_columns=1, column_widths=["130px"], **_TABLE)

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        zone, attempts = query.get("_zone", ""), directory.attempts()
        frame = pd.DataFrame({f"Attempt {one.get('attempt')}": _attempt(one, zone) for one in reversed(attempts)})
        return {
            self.note: gr.update(visible=not attempts),
            self.table: gr.update(value=frame.reset_index(names=""), visible=bool(attempts)),
        }


def _attempt(one: dict[str, Any], zone: str) -> dict[str, str]:
    git, versions, flags = ((one.get(name) or {}) for name in ("git", "versions", "flags"))
    return {
        "Began": local_time(str(one.get("time", "")), zone),
        "At step": str(one.get("start")),
        "Command": " ".join(process_info.redact(str(word)) for word in one.get("argv", ())),
        "Directory": str(one.get("cwd")),
        "Machine": f"{one.get('host')}, {one.get('platform')}",
        "Devices": ", ".join(map(str, one.get("devices", ()))),
        "Python": str(one.get("python")),
        "Packages": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Git": f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "no repository",
        "Flags": ", ".join(f"{name}={value}" for name, value in flags.items()) or "none",
    }


class Events(Part):
    """Events of the run and actions in the app, the newest first."""

    def __init__(self, view: View) -> None:
        self.table = gr.Dataframe(label="Events", **{**_TABLE, "visible": True})

    def fill(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        events = [(str(event.get("time")), "run", _event_text(event)) for event in directory.events()]
        events += [
            (str(one.get("time")), f"app, {one.get('by') or 'somebody'}", str(one.get("action")))
            for one in site.launcher.audited(row.id)
        ]
        rows = sorted(events, key=lambda event: event[0], reverse=True)[:SHOWN_EVENTS]
        frame = pd.DataFrame(rows, columns=["When", "Who", "What"])
        frame["When"] = [local_time(when, query.get("_zone", "")) for when in frame["When"]]
        return {self.table: gr.update(value=frame, label=f"{len(rows)} events, newest first")}


def _event_text(event: dict[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in ("time", "event")}
    # Counts of rows by reason, of which most are empty; lengths by column are the Data page's.
    shown = {name: value for name, value in fields.items() if value not in ({}, [], "", None) and name != "lengths"}
    rest = ", ".join(
        f"{name} {', '.join(f'{key}: {one}' for key, one in value.items()) if isinstance(value, dict) else value}"
        for name, value in shown.items()
    )
    return f"{event.get('event', '')}{f': {rest}' if rest else ''}"[:2_000]
