"""The list of runs: states, progress and actions."""

from __future__ import annotations

import time
from collections import Counter

import attrs

from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.errors import RunError

from ..components.charts import sparkline
from ..components.parts import action, progress, run_link, state_badge, tag_link
from ..html import Html, join, link, tag
from ..page import Action, Answer, Ask, Page
from ..processes.launch import Launch
from ..state import Site
from ..store.index import Row
from ..store.series import sampled
from ..store.tags import words_of
from ..words import age, duration, number, time_of, whole
from . import demo

SHOWN = 100
STATES = ("running", "queued", "stopped", "finished", "failed", "lost")
COMPARED = 6
FEW = 200
LAUNCHES = 20
REFUSED_SECONDS = 24 * 3600.0
COLUMNS = ("", "Run", "State", "Progress", "Loss", "Accuracy", "Margin", "Curve", "Model", "Started")
NUMERIC = ("Loss", "Accuracy", "Margin")
SMALL = "small muted nowrap"


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the list, filtered by search text, state and tag."""
    rows = site.index.rows()
    chosen = _chosen(site, rows, ask)
    return Answer({"head": _head(site, rows, ask), "list": _list(site, rows, chosen, ask)})


def ticked(site: Site, ask: Ask) -> Answer:
    """Updates the list; the search field is not replaced, since the user may be typing."""
    rows = site.index.rows()
    return Answer({"list": _list(site, rows, _chosen(site, rows, ask), ask)})


def compare(site: Site, ask: Ask) -> Answer:
    """Opens the Compare page for the ticked runs."""
    ids = _ticked(ask)
    if not 2 <= len(ids) <= COMPARED:
        return Answer(notice=f"Tick 2 to {COMPARED} runs to compare them.", bad=True)
    return Answer(goto=link("/compare", ids=",".join(ids)))


def clone(site: Site, ask: Ask) -> Answer:
    """Opens a new draft that is copied from the ticked run."""
    ids = _ticked(ask)
    if len(ids) != 1:
        return Answer(notice="Tick one run to clone it.", bad=True)
    return Answer(goto=link("/new", **{"from": ids[0]}))


def stop(site: Site, ask: Ask) -> Answer:
    """Requests that all ticked runs save a checkpoint and stop."""
    ids = _ticked(ask)
    if not ids:
        return Answer(notice="Tick the runs to stop.", bad=True)
    for run in ids:
        site.launcher.stop(run, ask.client)
    return _told(opened(site, ask), f"Stop requested: {', '.join(ids)}. They save a checkpoint after the current step.")


def retag(site: Site, ask: Ask) -> Answer:
    """Adds tags to all ticked runs; `-tag` removes one."""
    ids, words = _ticked(ask), ask.fields.get("tags", "").replace(",", " ").split()
    if not ids or not words:
        return Answer(notice="Tick runs, and enter a tag (or -tag to remove it).", bad=True)
    gone = {word[1:] for word in words if word.startswith("-")}
    more = words_of(" ".join(word for word in words if not word.startswith("-")))
    changed = {run: words_of(" ".join(word for word in (*site.tags.of(run), *more) if word not in gone)) for run in ids}
    for run, tags in changed.items():
        if site.index.row(run) is not None:
            site.tags.set(run, tags, ask.client)
    return _told(opened(site, ask), f"Tagged {len(ids)} {'run' if len(ids) == 1 else 'runs'}.")


def delete(site: Site, ask: Ask) -> Answer:
    """Moves all ticked runs to the home's trash."""
    ids = _ticked(ask)
    if not ids:
        return Answer(notice="Tick the runs to delete.", bad=True)
    gone: list[str] = []
    try:
        for run in ids:
            site.launcher.put_away(run, ask.client)
            gone.append(run)
    except RunError as error:
        left = [run for run in ids if run not in gone]
        return attrs.evolve(_without(site, ask, left), notice=f"{error}. {len(gone)} were deleted before it.", bad=True)
    where = site.settings.home / ".trash"
    return attrs.evolve(_without(site, ask, []), notice=f"Moved to {where}: {', '.join(gone)}.")


def _without(site: Site, ask: Ask, ticked: list[str]) -> Answer:
    """Returns the page with only these runs ticked."""
    query = {**ask.query, "ids": ",".join(ticked)}
    answer = opened(site, Ask({name: text for name, text in query.items() if text}))
    return attrs.evolve(answer, query=link("", **query).lstrip("?"))


def move(site: Site, ask: Ask) -> Answer:
    """Moves a queued run up or down by one position."""
    error = site.launcher.move(ask.text("id"), -1 if ask.text("to") == "earlier" else 1, ask.client)
    return _told(opened(site, ask), error)


def unqueue(site: Site, ask: Ask) -> Answer:
    """Removes a run from the queue."""
    return _told(opened(site, ask), site.launcher.unqueue(ask.text("id"), ask.client))


def _is_refused(launch: Launch) -> bool:
    """Whether a recent start failed before its run had a directory, so that the list does not include it."""
    return launch.exit_code == REFUSED and not launch.is_alive and time.time() - launch.began < REFUSED_SECONDS


def _told(answer: Answer, notice: str) -> Answer:
    return Answer(answer.regions, notice=notice)


def _ticked(ask: Ask) -> list[str]:
    return [one for one in ask.query.get("ids", "").split(",") if one][:50]


def _chosen(site: Site, rows: list[Row], ask: Ask) -> list[Row]:
    wanted = ask.query.get("tag", "")
    words, state = ask.query.get("q", "").lower().split(), ask.query.get("state", "")
    return [
        row
        for row in rows
        if (not wanted or wanted in site.tags.of(row.id))
        and all(word in f"{row.text} {' '.join(site.tags.of(row.id)).lower()}" for word in words)
        and (not state or row.state == state or (state == "running" and row.is_live))
    ]


def _head(site: Site, rows: list[Row], ask: Ask) -> Html:
    if not rows:
        return tag("h1", "Runs")
    state = ask.query.get("state", "")
    options = [tag("option", "any state", value="")]
    options += [tag("option", name, value=name, selected=name == state) for name in STATES]
    hint = "Search name, objective, model, mesh, tag"
    search = tag(
        "input", type="search", name="q", value=ask.query.get("q", ""), placeholder=hint, aria_label="Search runs"
    )
    choice = tag("select", options, name="state", aria_label="State")
    used, wanted = site.tags.used(row.id for row in rows), ask.query.get("tag", "")
    tags = [tag("option", "any tag", value="")]
    tags += [tag("option", word, value=word, selected=word == wanted) for word in used]
    if wanted and wanted not in used:
        tags.append(tag("option", wanted, value=wanted, selected=True))
    tagged = tag("select", tags, name="tag", aria_label="Tag") if len(tags) > 1 else None
    form = tag("form", search, choice, tagged, cls="row grow", role="search", data_query=True)
    buttons = [action("Compare", "runs.compare")]
    if not site.settings.read_only:
        buttons += [action("Clone", "runs.clone"), action("Stop and save", "runs.stop")]
        question = "They will be moved to the directory .trash next to the runs."
        buttons.append(action("Delete", "runs.delete", "danger", data_confirm=question, data_confirm_ticked=True))
        buttons.append(tag("a", "New run", cls="button primary", href="/new"))
    bar = tag("div", form, tag("div", buttons, cls="row"), cls="row between toolbar")
    return join(tag("h1", "Runs"), bar, None if site.settings.read_only else _tagging())


def _tagging() -> Html:
    field = tag(
        "input", type="text", name="tags", aria_label="Tags for the ticked runs", placeholder="baseline, -old", size=18
    )
    return tag(
        "details",
        tag("summary", "Tag the ticked runs", cls="small muted"),
        tag("form", field, tag("button", "Tag", type="submit", cls="button small"), cls="row", data_do="runs.retag"),
        id="runs-tagging",
    )


def _list(site: Site, rows: list[Row], chosen: list[Row], ask: Ask) -> Html:
    waiting = site.launcher.waiting()
    ids = {row.id for row in rows}
    newest = {one.run: one for one in reversed(site.launcher.launches(0, LAUNCHES)) if one.run not in ids}
    starting = [one for one in reversed(newest.values()) if one.is_alive]
    refused = [one for one in reversed(newest.values()) if _is_refused(one)]
    if not rows and not waiting and not starting and not refused:
        return _empty(site)
    counts = Counter("running" if row.is_live else row.state for row in rows)
    counters = [
        tag("a", tag("b", counts[name]), " ", name, href=link("/", state=name), cls="counter")
        for name in ("running", "finished", "stopped", "failed", "lost", "damaged")
        if counts[name]
    ]
    parts: list[Html] = [
        tag("div", tag("a", tag("b", len(rows)), " all", href="/", cls="counter"), counters, cls="counters")
    ]
    if starting or waiting:
        lines = [
            tag("li", state_badge("starting"), " ", tag("a", one.run, href=link("/run", id=one.run), cls="mono"))
            for one in starting
        ]
        lines += [
            tag(
                "li",
                state_badge("queued"),
                " ",
                tag("a", one.run, href=link("/run", id=one.run), cls="mono"),
                f" queued, position {place} ",
                None if site.settings.read_only else _waiting_buttons(one.run, place, len(waiting)),
            )
            for place, one in enumerate(waiting, start=1)
        ]
        parts.append(tag("section", tag("h2", "Starting and queued"), tag("ul", lines, cls="plain"), cls="panel"))
    if refused:
        lines = [
            tag("li", state_badge("refused"), " ", tag("a", one.run, href=link("/run", id=one.run), cls="mono"))
            for one in refused
        ]
        parts.append(tag("section", tag("h2", "Failed to start today"), tag("ul", lines, cls="plain"), cls="panel"))
    if chosen:
        parts.append(_table(site, chosen, ask))
    elif rows:
        parts.append(tag("p", "No run matches.", cls="empty"))
    elif not waiting and not starting:
        parts.append(_empty(site))
    idle = "4" if len(rows) <= FEW else "12"  # refreshing a list of a thousand runs takes 0.1 s
    return tag("div", parts, data_tick="2" if any(row.is_live for row in rows) or waiting or starting else idle)


def _waiting_buttons(run: str, place: int, count: int) -> Html:
    """Buttons of a queued run."""

    def moved(sign: str, to: str) -> Html:
        return action(sign, "runs.move", "small", data_id=run, data_to=to, aria_label=f"{run}: one place {to}")

    return join(
        moved("↑", "earlier") if place > 1 else None,
        " ",
        moved("↓", "later") if place < count else None,
        " ",
        action("Do not run", "runs.unqueue", "small", data_id=run),
    )


def _table(site: Site, chosen: list[Row], ask: Ask) -> Html:
    ticked_ids = set(_ticked(ask))
    shown = SHOWN * _page(ask)
    heads = [
        tag(
            "th",
            name or tag("span", "Tick", cls="visually-hidden"),
            scope="col",
            cls="num" if name in NUMERIC else None,
        )
        for name in COLUMNS
    ]
    body = [_row(site, row, row.id in ticked_ids) for row in chosen[:shown]]
    caption = f"{len(chosen):,} {'run' if len(chosen) == 1 else 'runs'} in {site.settings.home}"
    whole = tag("table", tag("caption", caption), tag("thead", tag("tr", heads)), tag("tbody", body), cls="cards")
    more = None
    if len(chosen) > shown:
        left, query = len(chosen) - shown, {**ask.query, "pages": str(_page(ask) + 1)}
        more = tag("p", tag("a", f"Show {min(SHOWN, left)} more of {left:,}", href=link("/", **query), cls="button"))
    return join(tag("div", whole, cls="scroll", tabindex=0, role="region", aria_label="Runs"), more)


def _page(ask: Ask) -> int:
    return min(50, max(1, whole(ask.query.get("pages", "")) or 1))


def _row(site: Site, row: Row, is_ticked: bool) -> Html:
    status, metrics, live = row.status, row.metrics, row.is_live
    step, total = status.get("step") or 0, status.get("total")
    what = " · ".join(row.facts[name] for name in ("objective", "adapter") if name in row.facts)
    left = f", {duration(status.get('eta_seconds'))} left" if live and status.get("eta_seconds") is not None else ""
    done = f"{step:,} of {total:,}{left}" if total else ""
    curve = None if row.problem else sparkline(sampled(row.path / "metrics.jsonl", "loss"), f"Loss of {row.id}")
    beside = tag("div", f"last heartbeat {age(row.quiet)}", cls=SMALL) if live else None
    wrong = tag("div", row.problem, cls="small bad") if row.problem else None
    cells: list[tuple[str, object, str]] = [
        (
            "",
            tag("input", type="checkbox", data_tick_id=row.id, checked=is_ticked, aria_label=f"Tick {row.id}"),
            "tick",
        ),
        ("Run", tag("div", run_link(row), tag("div", what, cls=SMALL), _tags(site, row.id)), "name"),
        ("State", tag("div", state_badge(row.state), beside, wrong), ""),
        ("Progress", tag("div", progress(step, total, f"Progress of {row.id}"), tag("div", done, cls=SMALL)), ""),
        ("Loss", number(metrics.get("loss")), "num"),
        ("Accuracy", number(metrics.get("rewards/accuracies", metrics.get("mean_token_accuracy"))), "num"),
        ("Margin", number(metrics.get("rewards/margins")), "num"),
        ("Curve", curve, ""),
        ("Model", tag("div", row.facts.get("model", "-"), tag("div", row.facts.get("mesh", ""), cls=SMALL)), "nowrap"),
        ("Started", tag("div", time_of(row.created), tag("div", f"took {duration(row.seconds)}", cls=SMALL)), "nowrap"),
    ]
    return tag("tr", [tag("td", value, cls=cls or None, data_label=label or None) for label, value, cls in cells])


def _tags(site: Site, run: str) -> Html | None:
    words = site.tags.of(run)
    return tag("div", [tag_link(word) for word in words], cls="tags") if words else None


def _empty(site: Site) -> Html:
    parts: list[Html | None] = [
        tag("h2", "No runs yet"),
        tag(
            "p",
            "A run is one training of an experiment: a directory with its config, metrics, log and checkpoints. "
            "Runs appear here automatically, whether they were started here or in a terminal.",
        ),
        demo.offered(site, "runs.demo"),
        tag("p", f"Runs are read from {site.settings.home}", cls="muted small apart"),
    ]
    return tag("div", parts, cls="empty", data_tick="2")


PAGE = Page(
    name="runs",
    path="/",
    title="Runs",
    regions=("head", "list"),
    actions={
        "open": opened,
        "tick": ticked,
        "compare": compare,
        "clone": Action(clone, writes=True),
        "stop": Action(stop, writes=True),
        "delete": Action(delete, writes=True),
        "retag": Action(retag, writes=True),
        "move": Action(move, writes=True),
        "unqueue": Action(unqueue, writes=True),
        "demo": Action(demo.start, writes=True),
    },
)
