"""One run: how it stands, its curves, its log, what it is made of, and what may be done with it."""

from __future__ import annotations

import re
import time
from typing import Any

from nnxdsl.run import process
from nnxdsl.run.store import RunDirectory
from nnxdsl.spec.errors import NnxdslError, RunError, SpecError
from nnxdsl.spec.source import render, to_python
from nnxdsl.spec.tree import diff, flatten, get
from nnxdsl.spec.weights import From

from .experiments import stored
from .html import Child, Html, join, link, tag
from .index import Row, last_attempt
from .launch import Launch, tail
from .page import Action, Answer, Ask, Page
from .parts import action, copy_button, facts, progress, run_link, state_badge, table, tabs
from .run_charts import charts, eta_words
from .state import Site
from .words import age, duration, number, parsed, size, time_of

TABS = {
    "": "Charts",
    "log": "Log",
    "config": "Config",
    "samples": "Samples",
    "environment": "Environment",
    "events": "Events",
}
SHOWN_SAMPLES = 60
SHOWN_EVENTS = 300


def opened(site: Site, ask: Ask) -> Answer:
    """The run that the query names."""
    return _answer(site, ask)


def ticked(site: Site, ask: Ask) -> Answer:
    """The same, but for a log that is held still."""
    paused = ask.payload.get("paused")
    if isinstance(paused, list) and "log" in paused and ask.query.get("tab") == "log":
        answer = _answer(site, ask)
        return Answer({name: html for name, html in answer.regions.items() if name != "body"})
    return _answer(site, ask)


def stop(site: Site, ask: Ask) -> Answer:
    """Asks it to save and end."""
    return _done(site, ask, site.launcher.stop(ask.query.get("id", ""), ask.client))


def kill(site: Site, ask: Ask) -> Answer:
    """Ends it at once."""
    return _done(site, ask, site.launcher.kill(ask.query.get("id", ""), ask.client))


def resume(site: Site, ask: Ask) -> Answer:
    """Goes on where it was saved last."""
    site.launcher.resume(ask.query.get("id", ""), ask.client)
    return _done(site, ask, "Going on where it was saved last.")


def again(site: Site, ask: Ask) -> Answer:
    """Starts once more what was refused before it had a directory."""
    newest = site.launcher.newest(ask.query.get("id", ""))
    experiment = None if newest is None else stored(newest.directory / "experiment.json")
    if experiment is None:
        return Answer(notice="What was to be started is not known any more; begin with a new run.", bad=True)
    site.launcher.launch(experiment, ask.client)
    return _done(site, ask, "Started again.")


def unqueue(site: Site, ask: Ask) -> Answer:
    """Has it wait no longer."""
    return Answer(goto="/", notice=site.launcher.unqueue(ask.query.get("id", ""), ask.client))


def delete(site: Site, ask: Ask) -> Answer:
    """Moves it to the home's trash."""
    said = site.launcher.put_away(ask.query.get("id", ""), ask.client)
    return Answer(goto="/", notice=said)


def _done(site: Site, ask: Ask, notice: str) -> Answer:
    return Answer(_answer(site, ask).regions, notice=notice)


def _answer(site: Site, ask: Ask) -> Answer:
    run = ask.query.get("id", "")
    if not run:
        rows = site.index.rows()[:10]
        listed = tag("ul", [tag("li", run_link(row), " ", state_badge(row.state)) for row in rows], cls="plain")
        return Answer({"head": join(tag("h1", "Run"), tag("p", "Choose one:")), "spoken": join(), "body": listed})
    row, newest = site.index.row(run), site.launcher.newest(run)
    if row is None:
        return _before(site, run, newest)
    state = row.state
    if newest is not None and newest.is_alive and not row.is_live and _is_after(newest, row):
        state = "starting"
    elif newest is not None and newest.is_alive and row.state in ("stopped", "failed"):
        state = "stopping"  # it has said its last word, and its process is ending: nothing can go on yet
    try:
        directory = site.run(run)
    except RunError as error:
        head = join(tag("h1", run), state_badge("damaged"), tag("p", str(error), cls="notice bad"))
        return Answer({"head": head, "spoken": join(), "body": join()})
    tab = ask.query.get("tab", "")
    tab = tab if tab in TABS else ""
    body = join(tabs("/run", {"id": run}, TABS, tab, "Parts of the run"), _BODIES[tab](site, directory, row, ask))
    spoken = tag("p", f"{run} is {state}", cls="visually-hidden", role="status")
    return Answer({"head": _head(site, directory, row, state, newest), "spoken": spoken, "body": body})


# before there is a directory


def _before(site: Site, run: str, newest: Launch | None) -> Answer:
    """A run that waits, is being started, or was refused before it had a directory."""
    place = next((n for n, one in enumerate(site.launcher.waiting(), start=1) if one.run == run), None)
    buttons: list[Html] = []
    parts: list[Child] = []
    tick = "1"
    if place is not None:
        state = "queued"
        parts.append(tag("p", f"It waits, number {place}, and begins when a slot is free while an app is open."))
        buttons = [action("Do not run", "run.unqueue")]
    elif newest is None:
        head = join(tag("h1", run), tag("p", f"There is no run {run} in {site.settings.home}."))
        back = tag("p", tag("a", "All runs", href="/", cls="button"))
        return Answer({"head": head, "spoken": join(), "body": tag("div", back, cls="empty", data_tick="3")})
    elif newest.is_alive:
        state = "starting"
        lasted = f" ({duration(max(0.0, time.time() - newest.began))} so far)"
        parts.append(tag("p", f"It reads its data and checks what it can before it makes its directory{lasted}."))
        earlier = _earlier(site, newest)
        if earlier is not None:
            words = (" (", state_badge(earlier.state), ", step ", earlier.status.get("step") or 0, ")")
            parts.append(
                tag("p", "It starts from what another run learns, which is run first: ", run_link(earlier), words)
            )
        buttons = [
            action("Stop", "run.stop"),
            action("Kill", "run.kill", "danger", data_confirm="End the process at once?"),
        ]
    else:
        state, tick = "refused", "4"
        parts.append(_why_refused(newest))
        draft = tag("a", "Change it", href=link("/new", **{"from": run}), cls="button primary")
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
    body = tag("section", tag("h2", "What it has printed"), tag("pre", output, cls="log", tabindex=0), cls="panel")
    spoken = tag("p", f"{run} is {state}", cls="visually-hidden", role="status")
    return Answer({"head": head, "spoken": spoken, "body": body if output else join()})


def _earlier(site: Site, newest: Launch) -> Row | None:
    experiment = stored(newest.directory / "experiment.json")
    if experiment is None or not isinstance(experiment.model.weights, From):
        return None
    return site.index.row(experiment.model.weights.experiment.id)


def _why_refused(newest: Launch) -> Html:
    code, lines = newest.exit_code, [line for line in newest.output().splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if re.match(r"\w*Error: ", line)), max(0, len(lines) - 1))
    said = "\n".join(lines[first : first + 12])
    how = "" if code is None else f" (exit code {code})" if code >= 0 else f" by signal {-code}"
    verb = "was ended" if code is not None and code < 0 else "ended"
    return join(
        tag("p", f"The process {verb}{how} before the run had a directory. Nothing was written."),
        tag("pre", said or "It printed nothing.", cls="error", role="alert"),
    )


def _is_after(newest: Launch, row: Row) -> bool:
    """Whether a start came after the run's last word, so that what the run says is of an earlier attempt."""
    return newest.began > (row.status.get("heartbeat") or {}).get("wall", 0.0)


# the head


def _head(site: Site, directory: RunDirectory, row: Row, state: str, newest: Launch | None) -> Html:
    status = row.status
    step, total = status.get("step") or 0, status.get("total")
    live = row.is_live or state in ("starting", "stopping")
    words: list[Child] = [state_badge(state)]
    if live and status.get("stage") and state != "starting":
        words.append(tag("span", _stage(directory, row), cls="muted"))
    elif state == "starting":
        words.append(tag("span", "a new attempt reads its data", cls="muted"))
    if total:
        words.append(tag("span", f"step {step:,} of {total:,}"))
    if live and status.get("eta_seconds") is not None:
        words.append(tag("span", eta_words(site.series.of(directory.path / "metrics.jsonl"), step, total or 0, status)))
    if live and row.quiet != float("inf"):
        words.append(tag("span", f"heard of {age(row.quiet)}", cls="muted"))
    parts: list[Child] = [
        tag(
            "div",
            tag("h1", row.id),
            tag("div", _buttons(site, row, state, live), cls="row"),
            cls="row between",
        ),
        tag("p", words, cls="row words"),
        progress(step, total, "Steps done") if total else None,
        _trouble(directory, row, state, newest),
        _figures(row),
    ]
    return tag("div", parts, data_tick="2" if live else "4", data_title=row.id, cls="run-head")


def _stage(directory: RunDirectory, row: Row) -> str:
    stage = str(row.status.get("stage"))
    if row.state == "compiling":
        began = parsed(str(last_attempt(directory).get("time", "")))
        if began is not None:
            return f"{stage}, {duration(max(0.0, time.time() - began.timestamp()))} so far"
    return stage


def _buttons(site: Site, row: Row, state: str, live: bool) -> list[Html]:
    run = row.id
    found: list[Html] = []
    if not site.settings.read_only:
        if live:
            found.append(action("Stop and save", "run.stop", "primary"))
            question = f"End {run} at once? What it saved last is whole; what came after is lost."
            found.append(action("Kill", "run.kill", "danger", data_confirm=question))
        elif state in ("stopped", "failed", "lost", "queued"):
            found.append(action("Resume", "run.resume", "primary"))
        found.append(tag("a", "Clone", href=link("/new", **{"from": run}), cls="button"))
    found.append(tag("a", "Layout", href=link("/layout", run=run), cls="button"))
    found.append(tag("a", "Outputs", href=link("/outputs", run=run), cls="button"))
    found.append(tag("a", "Compare", href=link("/compare", ids=run), cls="button"))
    if not site.settings.read_only and not live:
        question = "It is moved to the directory .trash beside the runs."
        found.append(action("Delete", "run.delete", "danger", data_confirm=question, data_confirm_name=run))
    return found


def _trouble(directory: RunDirectory, row: Row, state: str, newest: Launch | None) -> Html | None:
    """Why it does not go on, and what to do: the exception first."""
    status = row.status
    if state == "failed":
        error = str(status.get("error") or "It did not say why.")
        return join(tag("pre", error, cls="error", role="alert"), _blame(directory, row, error))
    if state == "lost":
        checkpoint = status.get("checkpoint")
        saved = (
            f"It was saved last at step {checkpoint}; resume goes on there." if checkpoint else "Nothing was saved yet."
        )
        return tag("p", f"{_how_lost(row, newest)} {saved}", cls="notice bad", role="alert")
    if state == "silent":
        words = (
            f"Its process lives, but has said nothing for {duration(row.quiet)}: it may hang, or its disk may be full."
        )
        return tag("p", words, cls="notice bad", role="alert")
    if newest is not None and not newest.is_alive and not row.is_live and _is_after(newest, row):
        return join(tag("p", "The last attempt to go on was refused:"), _why_refused(newest))
    return None


def _how_lost(row: Row, newest: Launch | None) -> str:
    pid, host = row.status.get("pid"), row.status.get("host")
    if host is not None and host != process.hostname():
        return f"It runs on {host}, which has been silent for {duration(row.quiet)}."
    code = newest.exit_code if newest is not None and newest.process.pid == pid else None
    if code is not None and code < 0:
        reason = ", as a person or a lack of memory does" if code == -9 else ""
        return f"Its process {pid} was ended by signal {-code}{reason}."
    if code is not None:
        return f"Its process {pid} ended with exit code {code} and did not say why; its log may."
    return f"Its process {pid} is gone and did not say why: it was killed, or the machine went down."


def _blame(directory: RunDirectory, row: Row, error: str) -> Html | None:
    """The field that an error names, if it names one, and the way to change it."""
    experiment = stored(directory.path / "experiment.json")
    if experiment is None:
        return None
    named = [path for path in flatten(experiment) if re.search(rf"(?<![\w.]){re.escape(path)}(?![\w.])", error)]
    if not named and "learning rate" in error:
        named = [path for path in flatten(experiment) if path.endswith(("lr", "peak_lr"))]
    target = link("/new", **{"from": row.id}) + (f"#f-{named[0]}" if named else "")
    about = [" It names ", tag("code", named[0]), "."] if named else []
    return tag("p", tag("a", "Clone with a fix", href=target, cls="button"), about)


def _figures(row: Row) -> Html:
    metrics, saved = row.metrics, row.status.get("checkpoint")
    pairs: list[tuple[str, Child]] = [
        ("Objective", row.facts.get("objective")),
        ("Model", row.facts.get("model")),
        ("Trained", row.facts.get("adapter")),
        ("Devices", row.facts.get("mesh")),
        ("Loss", number(metrics.get("loss")) if "loss" in metrics else None),
        ("Tokens/s", number(metrics.get("tokens/s")) if "tokens/s" in metrics else None),
        ("Tokens", number(metrics.get("num_tokens")) if "num_tokens" in metrics else None),
        ("Checkpoint", f"step {saved:,}" if saved else None),
        ("Attempt", row.status.get("attempt")),
        ("Made", time_of(row.created)),
        ("Took", duration(row.seconds)),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "", "-")]
    return tag("dl", shown, cls="figures")


# the tabs


def _charts(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    return charts(site, directory, row, ask)


def _log(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    search = ask.query.get("find", "").strip().lower()
    text = tail(directory.log, site.settings.limits.log_bytes)
    newest = site.launcher.newest(row.id)
    lines = text.splitlines()
    shown = [line for line in lines if search in line.lower()] if search else lines
    bytes_ = directory.log.stat().st_size if directory.log.exists() else 0
    pause = tag("label", tag("input", type="checkbox", data_pause="log"), " Hold still", cls="row")
    form = tag(
        "form",
        tag(
            "input",
            type="search",
            name="find",
            value=ask.query.get("find", ""),
            placeholder="Only lines with ...",
            aria_label="Search the log",
        ),
        pause,
        cls="row",
        data_query=True,
    )
    written = [
        tag(
            "span", f"{line}\n", cls="bad" if re.search(r"\b\w*Error\b|Traceback|^refused", line[22:] or line) else None
        )
        for line in shown
    ]
    cut = (
        f", the last {size(site.settings.limits.log_bytes)} are shown"
        if bytes_ > site.settings.limits.log_bytes
        else ""
    )
    about = tag("p", f"{size(bytes_)}{cut}; {len(shown):,} lines", cls="muted small")
    body = (
        tag("pre", tag("code", written), cls="log", tabindex=0, aria_label="Log")
        if shown
        else tag("p", "No such line yet.", cls="empty")
    )
    save = tag("a", "Download", href=link("/download", run=row.id, file="log.txt"), download=True, cls="button small")
    printed = newest.output().strip() if newest is not None else ""
    extra = (
        tag("details", tag("summary", "What its process printed"), tag("pre", printed, cls="log")) if printed else None
    )
    return join(tag("div", form, save, cls="row between"), about, body, extra)


def _config(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    experiment = stored(directory.path / "experiment.json")
    if experiment is None:
        source = (directory.path / "experiment.py").read_text(encoding="utf-8")[:200_000]
        note = "It names classes of another package, which the app does not import; this is the file as it was written."
        return join(tag("p", note, cls="notice"), tag("pre", source))
    compared = ask.query.get("with", "")
    others = [("preset", name) for name in site.presets.names()] + [
        ("run", one.id) for one in site.index.rows()[:50] if one.id != row.id
    ]
    options = [tag("option", "nothing", value="")]
    options += [
        tag("option", f"{kind} {name}", value=f"{kind}:{name}", selected=f"{kind}:{name}" == compared)
        for kind, name in others
    ]
    form = tag("form", tag("label", "Differences to ", tag("select", options, name="with")), data_query=True, cls="row")
    saves = [
        tag("a", name, href=link("/download", run=row.id, file=name), download=True, cls="button small")
        for name in ("experiment.py", "experiment.json", "metrics.jsonl")
    ]
    return join(
        tag("div", form, tag("div", copy_button("run-python", "Copy Python"), saves, cls="row"), cls="row between"),
        _differences(site, compared, experiment),
        tag("pre", tag("code", to_python(experiment), id="run-python"), tabindex=0),
    )


def _differences(site: Site, compared: str, experiment: Any) -> Html | None:
    kind, _, name = compared.partition(":")
    if not name:
        return None
    try:
        if kind == "preset":
            other = site.presets.experiment(name)
            if other is None:
                job = site.presets.job(name)
                wrong = job.error if job is not None and job.error else "It is still being read."
                return tag("p", wrong, cls="notice", data_tick="1")
        else:
            other = stored(site.run(name).path / "experiment.json")
            if other is None:
                return tag("p", f"{name} cannot be read by the app.", cls="notice")
        changes = diff(other, experiment)
    except (NnxdslError, SpecError) as error:
        return tag("p", str(error), cls="notice bad")
    if not changes:
        return tag("p", f"No differences to {name}.", cls="notice")
    rows = [(tag("code", path), render(get(other, path)), render(value)) for path, value in changes.items()]
    return table(("Field", name, "this run"), rows, f"{len(rows)} differences to {name}")


def _samples(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    found = directory.samples()
    if not found:
        return tag("p", "No answers yet. Prompts in evaluation.prompts are answered at every evaluation.", cls="empty")
    steps = sorted({sample["step"] for sample in found})
    chosen = ask.query.get("step", "")
    step = int(chosen) if chosen.isdigit() and int(chosen) in steps else steps[-1]
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
                cls="grid",
            ),
            cls="panel",
        )
        for sample in found
        if sample["step"] == step
    ]
    return join(form, cards[:SHOWN_SAMPLES])


def _environment(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    attempts = directory.attempts()
    if not attempts:
        return tag("p", "It has not begun a step yet; what it runs on is written down then.", cls="empty")
    return join([_attempt(one) for one in reversed(attempts)])


def _attempt(one: dict[str, Any]) -> Html:
    git = one.get("git") or {}
    versions = one.get("versions") or {}
    rows: list[tuple[str, Child]] = [
        ("Began", time_of(str(one.get("time", "")))),
        ("At step", one.get("start")),
        ("Command", tag("code", " ".join(process.redact(str(word)) for word in one.get("argv", ())))),
        ("Directory", one.get("cwd")),
        ("Machine", f"{one.get('host')}, {one.get('platform')}"),
        ("Devices", ", ".join(map(str, one.get("devices", ())))),
        ("Python", one.get("python")),
        ("Packages", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("Git", f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "no repository"),
        ("Flags", ", ".join(f"{name}={value}" for name, value in (one.get("flags") or {}).items()) or "none"),
    ]
    return tag("section", tag("h2", f"Attempt {one.get('attempt')}"), facts(rows), cls="panel")


def _events(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    own = [(event.get("time"), "run", _event_words(event)) for event in directory.events()]
    asked = [
        (one.get("time"), f"app, {one.get('by') or 'somebody'}", str(one.get("action")))
        for one in site.launcher.audited(row.id)
    ]
    rows = sorted([*own, *asked], key=lambda event: str(event[0]), reverse=True)[:SHOWN_EVENTS]
    shown = [(time_of(str(when)), who, what) for when, who, what in rows]
    return table(("When", "Who", "What"), shown, f"{len(shown)} events, newest first")


def _event_words(event: dict[str, Any]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
    return f"{event.get('event', '')}{f': {rest}' if rest else ''}"[:2_000]


_BODIES = {
    "": _charts,
    "log": _log,
    "config": _config,
    "samples": _samples,
    "environment": _environment,
    "events": _events,
}

PAGE = Page(
    name="run",
    path="/run",
    title="Run",
    regions=("head", "spoken", "body"),
    in_navigation=False,
    actions={
        "open": opened,
        "tick": ticked,
        "stop": Action(stop, writes=True),
        "kill": Action(kill, writes=True),
        "resume": Action(resume, writes=True),
        "again": Action(again, writes=True),
        "unqueue": Action(unqueue, writes=True),
        "delete": Action(delete, writes=True),
    },
)
