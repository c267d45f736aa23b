"""The About page: settings, versions, disk usage and limits of the app, and a button that clears its caches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from pathlib import Path

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ..components.parts import action, facts
from ..html import Html, join, tag
from ..page import Action, Answer, Ask, Page
from ..state import Site
from ..store.index import Row, last_attempt
from ..words import number, size

PACKAGES = ("nnxdsl", "jax", "flax", "optax", "qwix", "orbax-checkpoint", "gradio", "numpy")
LOOKED_AT = 20
COUNTED = 50_000
"""Files that are counted at most when the size of a directory is measured."""


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the page."""
    settings, limits = site.settings, site.settings.limits
    disk = shutil.disk_usage(settings.home if settings.home.is_dir() else settings.home.parent)
    own_bytes, whole = _bytes(settings.own)
    rows = site.index.rows()
    here = [
        ("Run directory", tag("code", settings.home)),
        ("Working directory", tag("code", settings.project)),
        ("Runs", number(len(rows))),
        ("Disk", f"{size(disk.free)} free of {size(disk.total)}"),
        ("The app's own files", f"{size(own_bytes)}{'' if whole else ' and more'} in {settings.own}"),
        ("Changes", "not allowed (read-only)" if settings.read_only else "allowed: start, stop and delete runs"),
        ("Authentication", "password" if settings.password else "token in the printed address"),
        ("Host names", ", ".join(settings.hosts)),
    ]
    bounds = [
        ("Concurrent runs of the queue", limits.slots),
        ("Queued runs at most", limits.queued),
        ("Upload limit", size(limits.upload_bytes)),
        ("Time limit of a child process", f"{limits.job_seconds:.0f} s"),
        ("Log shown", size(limits.log_bytes)),
    ]
    machine = [
        ("Machine", f"{process_info.hostname()}, {platform.platform()}"),
        ("Processors", os.cpu_count()),
        ("Devices of the latest run", _devices(site, rows)),
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in PACKAGES),
    ]
    clear = None
    if not settings.read_only:
        clear = action("Clear drafts and plans", "about.clear", data_confirm="Runs are not touched. Clear them?")
    columns = [
        tag("section", tag("h2", "This app"), facts(here), clear, cls="panel"),
        tag("section", tag("h2", "Versions"), facts(machine), cls="panel"),
        tag("section", tag("h2", "Limits"), facts(bounds), cls="panel"),
        _words(),
    ]
    return Answer({"main": join(tag("h1", "About"), tag("div", columns, cls="grid wide"))})


def _devices(site: Site, rows: list[Row]) -> str:
    """Devices of the latest run, from its record: querying jax would initialize a device."""
    for row in rows[:LOOKED_AT]:
        seen = Counter(map(str, last_attempt(RunDirectory(row.path)).get("devices", ())))
        if seen:
            return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in seen.items())
    return "no run has started yet"


def clear(site: Site, ask: Ask) -> Answer:
    """Deletes drafts and cached plans."""
    for name in ("drafts", "plans"):
        shutil.rmtree(site.settings.own / name, ignore_errors=True)
    site.launcher.audit("clear", "", ask.client)
    return Answer(opened(site, ask).regions, notice="Drafts and plans are cleared.")


def _words() -> Html:
    verbs = [
        ("nnxdsl run FILE", "trains; run again, it resumes from the last checkpoint"),
        ("nnxdsl runs", "lists all runs and their states"),
        ("nnxdsl plan FILE", "memory and shardings, without using a device"),
        ("nnxdsl resume RUN", "resumes a run, also on other devices"),
        ("nnxdsl diff A B", "what differs between two experiments"),
        ("nnxdsl --help", "lists all commands"),
    ]
    note = "Everything in this app is also available in a terminal; runs that are started there appear here."
    rows = [(tag("code", words), what) for words, what in verbs]
    return tag("section", tag("h2", "The command line"), tag("p", note), facts(rows), cls="panel")


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


PAGE = Page(
    name="about",
    path="/about",
    title="About",
    regions=("main",),
    actions={"open": opened, "clear": Action(clear, writes=True)},
)
