"""Tabs of a run's files: log, samples, environment, events."""

from __future__ import annotations

import re
from typing import Any

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ...components.parts import facts, table
from ...html import Child, Html, join, link, tag
from ...page import Ask
from ...processes.launch import tail
from ...state import Site
from ...store.index import Row
from ...words import size, time_of, whole

_WRONG = re.compile(r"\b\w*Error\b|Traceback|^refused")
SHOWN_SAMPLES = 60
SHOWN_EVENTS = 300


def log(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    """Returns the Log tab, with the last lines of the log."""
    search = ask.query.get("find", "").strip().lower()
    text = tail(directory.log, site.settings.limits.log_bytes)
    newest = site.launcher.newest(row.id)
    lines = text.splitlines()
    shown = [line for line in lines if search in line.lower()] if search else lines
    bytes_ = directory.log.stat().st_size if directory.log.exists() else 0
    pause = tag("label", tag("input", type="checkbox", data_pause="log"), " Pause", cls="row")
    form = tag(
        "form",
        tag(
            "input",
            type="search",
            name="find",
            value=ask.query.get("find", ""),
            placeholder="Filter lines ...",
            aria_label="Search the log",
        ),
        pause,
        cls="row",
        data_query=True,
    )
    wrong = {number for number, line in enumerate(shown) if _WRONG.search(line[22:] or line)}
    written = [
        tag("span", f"{line}\n", cls="bad", id=f"error-{number}", tabindex=-1)
        if number in wrong
        else tag("span", f"{line}\n")
        for number, line in enumerate(shown)
    ]
    jump = None
    if wrong:
        here = link("/run", **ask.query)
        jump = tag("a", "Go to the last error", href=f"{here}#error-{max(wrong)}", cls="button small")
    cut = (
        f", the last {size(site.settings.limits.log_bytes)} are shown"
        if bytes_ > site.settings.limits.log_bytes
        else ""
    )
    about = tag("p", f"{size(bytes_)}{cut}; {len(shown):,} lines", cls="muted small")
    body = (
        tag("pre", tag("code", written), cls="log", tabindex=0, aria_label="Log")
        if shown
        else tag("p", "No matching lines.", cls="empty")
    )
    save = tag("a", "Download", href=link("/download", run=row.id, file="log.txt"), download=True, cls="button small")
    printed = newest.output().strip() if newest is not None else ""
    extra = tag("details", tag("summary", "Process output"), tag("pre", printed, cls="log")) if printed else None
    return join(tag("div", form, tag("div", jump, save, cls="row"), cls="row between"), about, body, extra)


def samples(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    """Returns the tab of completions that were sampled at evaluations."""
    found = directory.samples()
    if not found:
        return tag(
            "p", "No answers yet. Completions of evaluation.prompts are sampled at every evaluation.", cls="empty"
        )
    steps = sorted({sample["step"] for sample in found})
    chosen = whole(ask.query.get("step", ""))
    step = chosen if chosen in steps else steps[-1]
    options = [tag("option", f"step {one}", value=one, selected=one == step) for one in steps]
    form = tag("form", tag("label", "Answers at ", tag("select", options, name="step")), data_query=True, cls="row")
    cards = [
        tag(
            "section",
            tag("h2", str(sample.get("prompt", ""))),
            tag(
                "div",
                [
                    tag("div", tag("h3", who), tag("p", str(sample[who]), cls="answer"))
                    for who in ("policy", "reference")
                    if sample.get(who) is not None
                ],
                cls="panes",
            ),
            cls="panel",
        )
        for sample in found
        if sample["step"] == step
    ]
    return join(form, cards[:SHOWN_SAMPLES])


def environment(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    """Returns the tab of attempts, newest first."""
    attempts = directory.attempts()
    if not attempts:
        return tag("p", "No step has started yet; the environment is recorded at the first step.", cls="empty")
    return join([_attempt(one) for one in reversed(attempts)])


def _attempt(one: dict[str, Any]) -> Html:
    git = one.get("git") or {}
    versions = one.get("versions") or {}
    rows: list[tuple[str, Child]] = [
        ("Began", time_of(str(one.get("time", "")))),
        ("At step", one.get("start")),
        ("Command", tag("code", " ".join(process_info.redact(str(word)) for word in one.get("argv", ())))),
        ("Directory", one.get("cwd")),
        ("Machine", f"{one.get('host')}, {one.get('platform')}"),
        ("Devices", ", ".join(map(str, one.get("devices", ())))),
        ("Python", one.get("python")),
        ("Packages", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Git", f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "no repository"),
        ("Flags", ", ".join(f"{name}={value}" for name, value in (one.get("flags") or {}).items()) or "none"),
    ]
    return tag("section", tag("h2", f"Attempt {one.get('attempt')}"), facts(rows), cls="panel")


def events(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    """Returns the tab of the run's events and of actions in the app."""
    own = [(event.get("time"), "run", _event_words(event)) for event in directory.events()]
    selected = [
        (one.get("time"), f"app, {one.get('by') or 'somebody'}", str(one.get("action")))
        for one in site.launcher.audited(row.id)
    ]
    rows = sorted([*own, *selected], key=lambda event: str(event[0]), reverse=True)[:SHOWN_EVENTS]
    shown = [(time_of(str(when)), who, what) for when, who, what in rows]
    return table(("When", "Who", "What"), shown, f"{len(shown)} events, newest first")


def _event_words(event: dict[str, Any]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
    return f"{event.get('event', '')}{f': {rest}' if rest else ''}"[:2_000]
