"""The page of one run: state, curves, log, config and actions."""

from __future__ import annotations

from nnxdsl.errors import RunError

from ...components.parts import run_link, state_badge, tabs, tag_link
from ...html import Html, join, tag
from ...page import Action, Answer, Ask, Page
from ...state import Site
from ...store.experiments import stored
from ...store.tags import words_of
from ..outputs.request import steps_of
from .before import before, is_after
from .charts import charts
from .config import config
from .files import environment, events, log, samples
from .head import head_of

TABS = {
    "": "Charts",
    "log": "Log",
    "config": "Config",
    "samples": "Samples",
    "environment": "Environment",
    "events": "Events",
}


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the page of the run in the query."""
    return _answer(site, ask)


def ticked(site: Site, ask: Ask) -> Answer:
    """Updates the page, except for a paused log."""
    paused = ask.payload.get("paused")
    if isinstance(paused, list) and "log" in paused and ask.query.get("tab") == "log":
        answer = _answer(site, ask)
        return Answer({name: html for name, html in answer.regions.items() if name != "body"})
    return _answer(site, ask)


def stop(site: Site, ask: Ask) -> Answer:
    """Requests that the run saves a checkpoint and stops."""
    return _done(site, ask, site.launcher.stop(ask.query.get("id", ""), ask.client))


def kill(site: Site, ask: Ask) -> Answer:
    """Kills the run."""
    return _done(site, ask, site.launcher.kill(ask.query.get("id", ""), ask.client))


def resume(site: Site, ask: Ask) -> Answer:
    """Resumes the run from its last checkpoint, or from the beginning if there is none."""
    run = ask.query.get("id", "")
    steps = steps_of(site.run(run).path)
    site.launcher.resume(run, ask.client)
    from_where = (
        f"Resuming from the checkpoint of step {steps[0]:,}."
        if steps
        else "No checkpoint: starting from the beginning."
    )
    return _done(site, ask, from_where)


def again(site: Site, ask: Ask) -> Answer:
    """Retries a launch that failed before the run had a directory."""
    newest = site.launcher.newest(ask.query.get("id", ""))
    experiment = None if newest is None else stored(newest.directory / "experiment.json")
    if newest is None or experiment is None:
        return Answer(notice="The record of this launch was deleted; create a new run.", bad=True)
    site.launcher.launch(experiment, ask.client, newest.recipe)
    return _done(site, ask, "Started again.")


def unqueue(site: Site, ask: Ask) -> Answer:
    """Removes the run from the queue."""
    return Answer(goto="/", notice=site.launcher.unqueue(ask.query.get("id", ""), ask.client))


def retag(site: Site, ask: Ask) -> Answer:
    """Replaces the run's tags."""
    run = ask.query.get("id", "")
    if site.index.row(run) is None:
        return Answer(notice=f"There is no run {run}.", bad=True)
    site.tags.set(run, words_of(ask.fields.get("tags", "")), ask.client)
    return _done(site, ask, "The tags were saved.")


def delete(site: Site, ask: Ask) -> Answer:
    """Moves the run to the home's trash."""
    error = site.launcher.put_away(ask.query.get("id", ""), ask.client)
    return Answer(goto="/", notice=error)


def _done(site: Site, ask: Ask, notice: str) -> Answer:
    return Answer(_answer(site, ask).regions, notice=notice)


def _answer(site: Site, ask: Ask) -> Answer:
    run = ask.query.get("id", "")
    if not run:
        rows = site.index.rows()[:10]
        listed = tag("ul", [tag("li", run_link(row), " ", state_badge(row.state)) for row in rows], cls="plain")
        return Answer(
            {"head": join(tag("h1", "Run"), tag("p", "Choose one:")), "spoken": join(), "tags": join(), "body": listed}
        )
    row, newest = site.index.row(run), site.launcher.newest(run)
    if row is None:
        return before(site, run, newest)
    state = row.state
    if newest is not None and newest.is_alive and not row.is_live and is_after(newest, row):
        state = "starting"
    elif newest is not None and newest.is_alive and row.state in ("stopped", "failed"):
        state = "stopping"  # its status is final, but its process is still exiting: it cannot be resumed yet
    try:
        directory = site.run(run)
    except RunError as error:
        head = join(tag("h1", run), state_badge("damaged"), tag("p", str(error), cls="notice bad"))
        return Answer({"head": head, "spoken": join(), "tags": join(), "body": join()})
    tab = ask.query.get("tab", "")
    tab = tab if tab in TABS else ""
    body = join(tabs("/run", {"id": run}, TABS, tab, "Parts of the run"), _BODIES[tab](site, directory, row, ask))
    spoken = tag("p", f"{run} is {state}", cls="visually-hidden", role="status")
    head = head_of(site, directory, row, state, newest)
    return Answer({"head": head, "spoken": spoken, "tags": _tags(site, run), "body": body})


def _tags(site: Site, run: str) -> Html:
    words = site.tags.of(run)
    shown = [tag("span", "Tags ", cls="muted small"), *[tag_link(word) for word in words]] if words else []
    if site.settings.read_only:
        return tag("div", shown, cls="tags")
    field = tag(
        "input",
        type="text",
        name="tags",
        value=", ".join(words),
        placeholder="baseline, sweep-3",
        aria_label="Tags, separated by commas",
    )
    save = tag("button", "Save", type="submit", cls="button small")
    editor = tag(
        "details",
        tag("summary", "Change" if words else "Add tags", cls="small muted"),
        tag("form", field, save, cls="row", data_do="run.retag"),
        id="run-tagging",
    )
    return tag("div", shown, editor, cls="tags")


_BODIES = {
    "": charts,
    "log": log,
    "config": config,
    "samples": samples,
    "environment": environment,
    "events": events,
}

PAGE = Page(
    name="run",
    path="/run",
    title="Run",
    regions=("head", "spoken", "tags", "body"),
    in_navigation=False,
    actions={
        "open": opened,
        "tick": ticked,
        "stop": Action(stop, writes=True),
        "kill": Action(kill, writes=True),
        "resume": Action(resume, writes=True),
        "again": Action(again, writes=True),
        "unqueue": Action(unqueue, writes=True),
        "retag": Action(retag, writes=True),
        "delete": Action(delete, writes=True),
    },
)
