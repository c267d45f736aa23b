"""The About page: settings, versions, disk usage and limits of the app, and a button that clears its caches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import gradio as gr

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ..components.confirm import Confirmation
from ..markdown import plain
from ..page import Page
from ..settings import Settings
from ..state import Site
from ..store.index import Row, last_attempt
from ..view import Done, Query, Values, View
from ..words import number, size

PACKAGES = ("nnxdsl", "jax", "flax", "optax", "qwix", "orbax-checkpoint", "gradio", "numpy")
LOOKED_AT = 20
COUNTED = 50_000
"""Files that are counted at most when the size of a directory is measured."""
NOTE = "Everything in this app is also available in a terminal; runs that are started there appear here."
COMMANDS = (
    ("nnxdsl run FILE", "trains; run again, it resumes from the last checkpoint"),
    ("nnxdsl runs", "lists all runs and their states"),
    ("nnxdsl plan FILE", "memory and shardings, without using a device"),
    ("nnxdsl resume RUN", "resumes a run, also on other devices"),
    ("nnxdsl diff A B", "what differs between two experiments"),
    ("nnxdsl --help", "lists all commands"),
)


def build(site: Site) -> None:
    """Adds the components of the page."""
    view = View()
    gr.Markdown("# About")
    with gr.Row():
        with gr.Column(min_width=360):
            here = gr.Markdown()
            confirmation = None if site.settings.read_only else _clearing(site, view)
        versions = gr.Markdown(min_height=40)
    with gr.Row():
        gr.Markdown(_section("Limits", _limits(site.settings)))
        gr.Markdown(_section("The command line", COMMANDS, NOTE))

    def shown(query: Query) -> Values:
        rows = site.index.rows()
        found = {here: _section("This app", _here(site, rows)), versions: _section("Versions", _machine(site, rows))}
        return found if confirmation is None else {**found, **confirmation.shown(query)}

    view.shows(shown, [here, versions, *(confirmation.outputs if confirmation is not None else [])])


def _section(title: str, rows: Sequence[tuple[str, object]], note: str = "") -> str:
    """A heading, and a table of names and values, as Markdown."""
    lines = [f"| {plain(name)} | {plain(str(value))} |" for name, value in rows]
    return "\n".join([f"## {title}", "", note, "", "| | |", "|---|---|", *lines])


def _here(site: Site, rows: Sequence[Row]) -> list[tuple[str, object]]:
    settings = site.settings
    disk = shutil.disk_usage(settings.home if settings.home.is_dir() else settings.home.parent)
    own_bytes, whole = _bytes(settings.own)
    return [
        ("Run directory", settings.home),
        ("Working directory", settings.project),
        ("Runs", number(len(rows))),
        ("Disk", f"{size(disk.free)} free of {size(disk.total)}"),
        ("The app's own files", f"{size(own_bytes)}{'' if whole else ' and more'} in {settings.own}"),
        ("Changes", "not allowed (read-only)" if settings.read_only else "allowed: start, stop and delete runs"),
        ("Authentication", "password" if settings.password else "token in the printed address"),
        ("Host names", ", ".join(settings.hosts)),
        ("Alerts", ", ".join(["notices", *_alert_targets(settings)])),
    ]


def _alert_targets(settings: Settings) -> list[str]:
    return [*(["command"] if settings.alert_command else []), *(["webhook"] if settings.alert_webhook else [])]


def _limits(settings: Settings) -> list[tuple[str, object]]:
    limits = settings.limits
    return [
        ("Concurrent runs of the queue", limits.slots),
        ("Queued runs at most", limits.queued),
        ("Upload limit", size(limits.upload_bytes)),
        ("Time limit of a child process", f"{limits.job_seconds:.0f} s"),
        ("Log shown", size(limits.log_bytes)),
    ]


def _machine(site: Site, rows: Sequence[Row]) -> list[tuple[str, object]]:
    return [
        ("Machine", f"{process_info.hostname()}, {platform.platform()}"),
        ("Processors", os.cpu_count()),
        ("Devices of the latest run", _devices(rows)),
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in PACKAGES),
    ]


def _devices(rows: Sequence[Row]) -> str:
    """Devices of the latest run, from its record: querying jax would initialize a device."""
    for row in rows[:LOOKED_AT]:
        seen = Counter(map(str, last_attempt(RunDirectory(row.path)).get("devices", ())))
        if seen:
            return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in seen.items())
    return "no run has started yet"


def _clearing(site: Site, view: View) -> Confirmation:
    button = gr.Button("Clear drafts and plans", scale=0)
    question = "Runs are not touched. Clear drafts and plans?"
    return Confirmation(view, button, "clear", question, lambda query, client: clear(site, client))


def clear(site: Site, client: str) -> Done:
    """Deletes drafts and cached plans."""
    for name in ("drafts", "plans"):
        shutil.rmtree(site.settings.own / name, ignore_errors=True)
    site.launcher.audit("clear", "", client)
    return Done("Drafts and plans are cleared.")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _bytes(place: Path) -> tuple[int, bool]:
    """Size of a directory in bytes, and whether all of its files were counted."""
    total = seen = 0
    for parent, _, names in os.walk(place):
        for name in names:
            seen += 1
            if seen > COUNTED:
                return total, False
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total, True


PAGE = Page(name="about", path="/about", title="About", build=build)
