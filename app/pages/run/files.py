"""Tabs of a run's files: log, samples, environment, events."""

from __future__ import annotations

import re
from typing import Any

import gradio as gr
import pandas as pd

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ...html import link
from ...processes.launch import tail
from ...state import Site
from ...store.index import Row
from ...view import Query, Values, View
from ...words import local_time, size, whole

_WRONG = re.compile(r"\b\w*Error\b|Traceback|^refused")
_STAMP = 22
"""Characters of the time at the beginning of a line of the log."""
SHOWN_SAMPLES = 60
SHOWN_EVENTS = 300
TO_ERROR = "error"
TO_END = """() => requestAnimationFrame(() => {
  const text = document.querySelector("#run-log textarea");
  if (text && !text.dataset.isAtEnd) { text.scrollTop = text.scrollHeight; text.dataset.isAtEnd = "1"; }
})"""
"""gradio follows a text that grows, and yet shows the beginning of its first value."""
_TABLE: dict[str, Any] = {"interactive": False, "wrap": True, "visible": False, "show_search": "filter"}


class Log:
    """The tab of the log, whose end is in view.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, view: View) -> None:
        """Adds the components."""
        with gr.Row():
            self._find = view.control(
                "find", gr.Textbox(label="Search the log", placeholder="Filter lines ...", max_lines=1, scale=3)
            )
            choices = [("All lines", ""), ("Up to the last error", TO_ERROR)]
            view.control("lines", gr.Radio(choices, value="", label="Show", scale=2))
            view.control("pause", gr.Checkbox(label="Pause", info="Not followed", min_width=160))
        with gr.Row(elem_classes=["buttons"]):
            self._about = gr.Markdown()
            self._save = gr.Button("Download", link="#", size="sm", scale=0)
        self._text = gr.Textbox(label="Log", lines=24, max_lines=24, interactive=False, elem_id="run-log")
        self._text.change(None, js=TO_END, api_visibility="private")
        with gr.Accordion("Process output", open=False, visible=False) as self._box:
            self._printed = gr.Textbox(show_label=False, label="Process output", max_lines=24)
        self.outputs = [self._find, self._about, self._save, self._text, self._box, self._printed]

    def shown(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Returns the last lines of the log; nothing of it while it is paused."""
        search, limit = query.get("find", "").strip().lower(), site.settings.limits.log_bytes
        lines = tail(directory.log, limit).splitlines()
        if query.get("lines") == TO_ERROR:
            wrong = [number for number, line in enumerate(lines) if _WRONG.search(line[_STAMP:] or line)]
            lines = lines[: wrong[-1] + 1] if wrong else []
        lines = [line for line in lines if search in line.lower()]
        count = directory.log.stat().st_size if directory.log.exists() else 0
        cut = f", the last {size(limit)} are shown" if count > limit else ""
        newest = site.launcher.newest(row.id)
        printed = newest.output().strip() if newest is not None else ""
        log: Values = {self._about: f"{size(count)}{cut}; {len(lines):,} lines", self._text: "\n".join(lines)}
        return {
            self._find: query.get("find", ""),
            self._save: gr.update(link=link("/download", run=row.id, file="log.txt")),
            **({} if query.get("pause") == "1" else log),
            self._box: gr.update(visible=bool(printed)),
            self._printed: printed,
        }


class Samples:
    """The tab of completions that were sampled at evaluations.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, view: View) -> None:
        """Adds the components."""
        self._note = gr.Markdown("No answers yet. Completions of evaluation.prompts are sampled at every evaluation.")
        self._step = view.control("step", gr.Dropdown([], label="Answers at", visible=False))
        self._table = gr.Dataframe(
            label="Answers", column_widths=["24%", "38%", "38%"], elem_id="run-samples", **_TABLE
        )
        self.outputs = [self._note, self._step, self._table]

    def shown(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Returns the completions of the query's step, or else of the last one."""
        found = directory.samples()
        if not found:
            return {self._note: gr.update(visible=True)}
        steps = sorted({sample["step"] for sample in found})
        chosen = whole(query.get("step", ""))
        step = chosen if chosen in steps else steps[-1]
        lines = [
            [str(sample.get(name) or "") for name in ("prompt", "policy", "reference")]
            for sample in found
            if sample["step"] == step
        ]
        table = pd.DataFrame(lines[:SHOWN_SAMPLES], columns=["Prompt", "Policy", "Reference"])
        choices = [(f"step {one:,}", str(one)) for one in steps]
        return {
            self._note: gr.update(visible=False),
            self._step: gr.update(choices=choices, value=str(step), visible=True),
            self._table: gr.update(value=table, visible=True),
        }


class Environment:
    """The tab of attempts, newest first.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, view: View) -> None:
        """Adds the components."""
        self._note = gr.Markdown("No step has started yet; the environment is recorded at the first step.")
        self._table = gr.Dataframe(label="Attempts", pinned_columns=1, column_widths=["130px"], **_TABLE)
        self.outputs = [self._note, self._table]

    def shown(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Returns what each attempt ran on."""
        attempts = directory.attempts()
        if not attempts:
            return {self._note: gr.update(visible=True)}
        columns = {f"Attempt {one.get('attempt')}": _attempt(one, query.get("_zone", "")) for one in reversed(attempts)}
        table = pd.DataFrame(
            {"": list(next(iter(columns.values()))), **{n: list(v.values()) for n, v in columns.items()}}
        )
        return {self._note: gr.update(visible=False), self._table: gr.update(value=table, visible=True)}


def _attempt(one: dict[str, Any], zone: str) -> dict[str, str]:
    git = one.get("git") or {}
    versions = one.get("versions") or {}
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
        "Flags": ", ".join(f"{name}={value}" for name, value in (one.get("flags") or {}).items()) or "none",
    }


class Events:
    """The tab of the run's events and of actions in the app, newest first.

    Attributes:
        outputs: Components that `shown` changes.
    """

    def __init__(self, view: View) -> None:
        """Adds the components."""
        self._table = gr.Dataframe(label="Events", **{**_TABLE, "visible": True})
        self.outputs = [self._table]

    def shown(self, site: Site, directory: RunDirectory, row: Row, query: Query) -> Values:
        """Returns the events."""
        own = [(event.get("time"), "run", _event_words(event)) for event in directory.events()]
        selected = [
            (one.get("time"), f"app, {one.get('by') or 'somebody'}", str(one.get("action")))
            for one in site.launcher.audited(row.id)
        ]
        rows = sorted([*own, *selected], key=lambda event: str(event[0]), reverse=True)[:SHOWN_EVENTS]
        zone = query.get("_zone", "")
        lines = [(local_time(str(when), zone), who, what) for when, who, what in rows]
        table = pd.DataFrame(lines, columns=["When", "Who", "What"])
        return {self._table: gr.update(value=table, label=f"{len(rows)} events, newest first")}


def _event_words(event: dict[str, Any]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
    return f"{event.get('event', '')}{f': {rest}' if rest else ''}"[:2_000]
