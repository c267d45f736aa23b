"""What this app is: its settings, versions, disk, limits; and what of its own may be cleared."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from pathlib import Path

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from .html import Html, join, tag
from .index import Row, last_attempt
from .page import Action, Answer, Ask, Page
from .parts import action, facts
from .state import Site
from .words import number, size

PACKAGES = ("nnxdsl", "jax", "flax", "optax", "qwix", "orbax-checkpoint", "gradio", "numpy")
LOOKED_AT = 20
COUNTED = 50_000
"""Files that are looked at to measure a directory."""


def opened(site: Site, ask: Ask) -> Answer:
    """The page."""
    settings, limits = site.settings, site.settings.limits
    disk = shutil.disk_usage(settings.home if settings.home.is_dir() else settings.home.parent)
    mine, whole = _bytes(settings.own)
    rows = site.index.rows()
    here = [
        ("Runs are in", tag("code", settings.home)),
        ("Started in", tag("code", settings.project)),
        ("Runs", number(len(rows))),
        ("Disk", f"{size(disk.free)} free of {size(disk.total)}"),
        ("The app's own files", f"{size(mine)}{'' if whole else ' and more'} in {settings.own}"),
        ("Changes", "no: read only" if settings.read_only else "yes: runs can be started, stopped and put away"),
        ("Who may use it", "whoever has its password" if settings.password else "whoever has the token of its address"),
        ("Known as", ", ".join(settings.hosts)),
    ]
    bounds = [
        ("Runs of the queue at once", limits.slots),
        ("Runs that may wait", limits.queued),
        ("Largest upload", size(limits.upload_bytes)),
        ("Longest child process", f"{limits.job_seconds:.0f} s"),
        ("Log shown", size(limits.log_bytes)),
    ]
    machine = [
        ("Machine", f"{process_info.hostname()}, {platform.platform()}"),
        ("Processors", os.cpu_count()),
        ("Devices of the newest run", _devices(site, rows)),
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
    """What the run that began last ran on: to ask jax itself would take a device."""
    for row in rows[:LOOKED_AT]:
        seen = Counter(map(str, last_attempt(RunDirectory(row.path)).get("devices", ())))
        if seen:
            return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in seen.items())
    return "none has begun yet"


def clear(site: Site, ask: Ask) -> Answer:
    """Removes drafts and plans."""
    for name in ("drafts", "plans"):
        shutil.rmtree(site.settings.own / name, ignore_errors=True)
    site.launcher.audit("clear", "", ask.client)
    return Answer(opened(site, ask).regions, notice="Drafts and plans are cleared.")


def _words() -> Html:
    verbs = [
        ("nnxdsl run FILE", "trains; started again, goes on where it stopped"),
        ("nnxdsl runs", "all runs and how they stand"),
        ("nnxdsl plan FILE", "memory and shardings, before a device is touched"),
        ("nnxdsl resume RUN", "goes on with a run, on other devices too"),
        ("nnxdsl diff A B", "what differs between two experiments"),
        ("nnxdsl --help", "every verb"),
    ]
    note = "Everything that this app does can be done in a terminal; runs started there appear here by themselves."
    rows = [(tag("code", words), what) for words, what in verbs]
    return tag("section", tag("h2", "The command line"), tag("p", note), facts(rows), cls="panel")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _bytes(place: Path) -> tuple[int, bool]:
    """How large a directory is, and whether all of it was looked at."""
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
