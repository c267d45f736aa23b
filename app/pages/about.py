"""The About page: settings, versions, disk usage and limits of the app, and a button that clears its caches."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import gradio as gr

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ..components.confirm import Confirmation
from ..formatting import number, size
from ..markup import plain
from ..page import Page
from ..processes.usage import disk
from ..state import Site
from ..store.index import last_attempt
from ..view import Done, Query, Values

PACKAGES = ("nnxdsl", "jax", "flax", "optax", "qwix", "orbax-checkpoint", "gradio", "numpy")
LOOKED_AT = 20
QUESTION = "Runs are not touched. Clear drafts and plans?"
NOTE = "Everything in this app is also available in a terminal; runs that are started there appear here."
COMMANDS = {
    "nnxdsl run FILE": "trains; run again, it resumes from the last checkpoint",
    "nnxdsl runs": "lists all runs and their states",
    "nnxdsl plan FILE": "memory and shardings, without using a device",
    "nnxdsl resume RUN": "resumes a run, also on other devices",
    "nnxdsl diff A B": "what differs between two experiments",
    "nnxdsl --help": "lists all commands",
}


class About(Page):
    """Settings and versions, and a button that clears caches."""

    name, path, title = "about", "/about", "About"

    def build(self) -> None:
        gr.Markdown("# About")
        with gr.Row():
            with gr.Column(min_width=360):
                self.settings = gr.Markdown()
                self.question = None
                if not self.site.settings.read_only:
                    button = gr.Button("Clear drafts and plans", scale=0)
                    self.question = Confirmation(self.view, button, "clear", QUESTION, lambda query: clear(self.site))
            self.versions = gr.Markdown(min_height=40)
        limits = self.site.settings.limits
        rows = {
            "Concurrent runs of the queue": limits.slots,
            "Queued runs at most": limits.queued,
            "Upload limit": size(limits.upload_bytes),
            "Time limit of a child process": f"{limits.job_seconds:.0f} s",
            "Log shown": size(limits.log_bytes),
        }
        with gr.Row():
            for section in (_section("Limits", rows), _section("The command line", COMMANDS, NOTE)):
                with gr.Column(min_width=360):
                    gr.Markdown(section)

    def fill(self, query: Query) -> Values:
        here, machine = _section("This app", _here(self.site)), _section("Versions", _machine(self.site))
        question = {} if self.question is None else self.question.fill(query)
        return {self.settings: here, self.versions: machine, **question}


def clear(site: Site) -> Done:
    """Deletes drafts and cached plans."""
    for name in ("drafts", "plans"):
        shutil.rmtree(site.settings.app_directory / name, ignore_errors=True)
    site.launcher.audit("clear", "")
    return Done("Drafts and plans are cleared.")


def _section(title: str, rows: Mapping[str, object], note: str = "") -> str:
    lines = [f"| {plain(name)} | {plain(str(value))} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", note, "", "| | |", "|---|---|", *lines])


def _here(site: Site) -> dict[str, object]:
    settings = site.settings
    free, total = disk(settings.home)
    targets = {"command": settings.alert_command, "webhook": settings.alert_webhook}
    return {
        "Run directory": settings.home,
        "Working directory": settings.project,
        "Runs": number(len(site.index.rows())),
        "Disk": f"{size(free * 2**30)} free of {size(total * 2**30)}",
        "The app's own files": f"{size(_bytes(settings.app_directory))} in {settings.app_directory}",
        "Changes": "not allowed (read-only)" if settings.read_only else "allowed: start, stop and delete runs",
        "Authentication": "password" if settings.password else "token in the printed address",
        "Host names": ", ".join(settings.hosts),
        "Alerts": ", ".join(["notices", *(name for name, target in targets.items() if target)]),
    }


def _machine(site: Site) -> dict[str, object]:
    versions = process_info.installed_versions(PACKAGES)
    return {
        "Machine": f"{process_info.hostname()}, {platform.platform()}",
        "Processors": os.cpu_count(),
        "Devices of the latest run": _devices(site),
        "Python": platform.python_version(),
        **{name: versions.get(name, "not installed") for name in PACKAGES},
    }


def _devices(site: Site) -> str:
    """Devices of the latest run, from its record: querying jax would initialize a device."""
    for row in site.index.rows()[:LOOKED_AT]:
        seen = Counter(map(str, last_attempt(RunDirectory(row.path)).get("devices", ())))
        if seen:
            return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in seen.items())
    return "no run has started yet"


def _bytes(place: Path) -> int:
    total = 0
    for parent, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
