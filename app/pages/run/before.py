"""The page of a run without a directory: queued, starting, or failed to start."""

from __future__ import annotations

import re
import time

from nnxdsl.config.weights import From

from ...components.parts import action, run_link, state_badge
from ...html import Child, Html, join, link, tag
from ...page import Answer
from ...processes.launch import Launch
from ...state import Site
from ...store.experiments import stored
from ...store.index import Row
from ...words import duration


def before(site: Site, run: str, newest: Launch | None) -> Answer:
    """Returns the page of a run that is queued, starting, or failed before it had a directory."""
    place = next((n for n, one in enumerate(site.launcher.waiting(), start=1) if one.run == run), None)
    buttons: list[Html] = []
    parts: list[Child] = []
    tick = "1"
    if place is not None:
        state = "queued"
        parts.append(tag("p", f"Queued at position {place}; it starts when a slot is free while the app is running."))
        buttons = [action("Do not run", "run.unqueue")]
    elif newest is None:
        head = join(tag("h1", run), tag("p", f"There is no run {run} in {site.settings.home}."))
        back = tag("p", tag("a", "All runs", href="/", cls="button"))
        return Answer(
            {"head": head, "spoken": join(), "tags": join(), "body": tag("div", back, cls="empty", data_tick="3")}
        )
    elif newest.is_alive:
        state = "starting"
        lasted = f" ({duration(max(0.0, time.time() - newest.began))} so far)"
        parts.append(tag("p", f"It reads and checks its data before it creates its directory{lasted}."))
        earlier = _earlier(site, newest)
        if earlier is not None:
            words = (" (", state_badge(earlier.state), ", step ", earlier.status.get("step") or 0, ")")
            parts.append(
                tag("p", "It starts from the weights of another run, which runs first: ", run_link(earlier), words)
            )
        buttons = [
            action("Stop", "run.stop"),
            action("Kill", "run.kill", "danger", data_confirm="Kill the process?"),
        ]
    else:
        state, tick = "refused", "4"
        parts.append(why_refused(newest))
        draft = tag("a", "Edit", href=link("/new", **{"from": run}), cls="button primary")
        buttons = [draft, action("Start again", "run.again")]
    if site.settings.read_only:
        buttons = []
    head = tag(
        "div",
        tag("div", tag("h1", run), tag("div", buttons, cls="row"), cls="row between"),
        tag("p", state_badge(state)),
        parts,
        data_tick=tick,
        data_title=run,
    )
    output = newest.output() if newest is not None and place is None else ""
    body = tag("section", tag("h2", "Output"), tag("pre", output, cls="log", tabindex=0), cls="panel")
    spoken = tag("p", f"{run} is {state}", cls="visually-hidden", role="status")
    return Answer({"head": head, "spoken": spoken, "tags": join(), "body": body if output else join()})


def _earlier(site: Site, newest: Launch) -> Row | None:
    experiment = stored(newest.directory / "experiment.json")
    if experiment is None or not isinstance(experiment.model.weights, From):
        return None
    return site.index.row(experiment.model.weights.experiment.id)


def why_refused(newest: Launch) -> Html:
    """Output of a process that ended before its run had a directory."""
    code, lines = newest.exit_code, [line for line in newest.output().splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if re.match(r"\w*Error: ", line)), max(0, len(lines) - 1))
    message = "\n".join(lines[first : first + 12])
    how = "" if code is None else f" (exit code {code})" if code >= 0 else f" by signal {-code}"
    verb = "was ended" if code is not None and code < 0 else "ended"
    return join(
        tag("p", f"The process {verb}{how} before it created the run directory. Nothing was written."),
        tag("pre", message or "No output.", cls="error", role="alert"),
    )


def is_after(newest: Launch, row: Row) -> bool:
    """Whether a start is newer than the run's last status, which then belongs to an earlier attempt."""
    return newest.began > (row.status.get("heartbeat") or {}).get("wall", 0.0)
