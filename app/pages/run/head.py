"""The head of a run's page: state, progress, action buttons, errors and remedies."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from nnxdsl.config.core.serialization import flatten
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ...components.parts import action, progress, state_badge
from ...html import Child, Html, join, link, tag
from ...processes.launch import Launch
from ...state import Site
from ...store.experiments import stored
from ...store.index import Row, last_attempt
from ...words import age, duration, number, parsed, time_of
from .before import is_after, why_refused
from .charts import eta_words


def head_of(site: Site, directory: RunDirectory, row: Row, state: str, newest: Launch | None) -> Html:
    """Returns state, progress and metrics, with the buttons that the state allows."""
    status = row.status
    step, total = status.get("step") or 0, status.get("total")
    live = row.is_live or state in ("starting", "stopping")
    words: list[Child] = [state_badge(state)]
    if live and status.get("stage") and state != "starting":
        words.append(tag("span", _stage(directory, row), cls="muted"))
    elif state == "starting":
        words.append(tag("span", "a new attempt is reading its data", cls="muted"))
    if total:
        words.append(tag("span", f"step {step:,} of {total:,}"))
    if live and status.get("eta_seconds") is not None:
        words.append(tag("span", eta_words(site.series.of(directory.path / "metrics.jsonl"), step, total or 0, status)))
    if live and row.quiet != float("inf"):
        words.append(tag("span", f"last heartbeat {age(row.quiet)}", cls="muted"))
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
            question = f"Kill {run}? Its last checkpoint stays valid; progress since then is lost."
            found.append(action("Kill", "run.kill", "danger", data_confirm=question))
        elif state in ("stopped", "failed", "lost", "queued"):
            found.append(action("Resume", "run.resume", "primary"))
        found.append(tag("a", "Clone", href=link("/new", **{"from": run}), cls="button"))
    found.append(tag("a", "Layout", href=link("/layout", run=run), cls="button"))
    found.append(tag("a", "Outputs", href=link("/outputs", run=run), cls="button"))
    found.append(tag("a", "Compare", href=link("/compare", ids=run), cls="button"))
    if not site.settings.read_only and not live:
        question = "It will be moved to the directory .trash next to the runs."
        found.append(action("Delete", "run.delete", "danger", data_confirm=question, data_confirm_name=run))
    return found


def _trouble(directory: RunDirectory, row: Row, state: str, newest: Launch | None) -> Html | None:
    """Returns why the run is not progressing, and the remedy."""
    status = row.status
    if state == "failed":
        error = str(status.get("error") or "No error was recorded.")
        return join(tag("pre", error, cls="error", role="alert"), _blame(directory, row, error))
    if state == "lost":
        if row.doubt:
            words = f"{row.doubt}. Resume continues from its newest checkpoint."
            return tag("p", words, cls="notice bad", role="alert")
        checkpoint = status.get("checkpoint")
        saved = (
            f"Its last checkpoint is step {checkpoint}; Resume continues there."
            if checkpoint
            else "It has no checkpoint."
        )
        return tag("p", f"{_how_lost(row, newest)} {saved}", cls="notice bad", role="alert")
    if state == "silent":
        words = f"Its process is alive, but its last heartbeat is {duration(row.quiet)} old: "
        words += "it may hang, or the disk may be full."
        return tag("p", words, cls="notice bad", role="alert")
    if newest is not None and not newest.is_alive and not row.is_live and is_after(newest, row):
        return join(tag("p", "The last attempt to resume failed:"), why_refused(newest))
    return None


def _how_lost(row: Row, newest: Launch | None) -> str:
    pid, host = row.status.get("pid"), row.status.get("host")
    if host is not None and host != process_info.hostname():
        return f"It runs on {host}; the last heartbeat is {duration(row.quiet)} old."
    code = newest.exit_code if newest is not None and newest.process.pid == pid else None
    if code is not None and code < 0:
        reason = ", sent by a user or by the out-of-memory killer" if code == -9 else ""
        return f"Its process {pid} was killed by signal {-code}{reason}."
    if code is not None:
        return f"Its process {pid} ended with exit code {code} without an error; see its log."
    return f"Its process {pid} no longer exists and left no error: it was killed, or the machine went down."


def _blame(directory: RunDirectory, row: Row, error: str) -> Html | None:
    """Returns a link that clones the run to fix an error, and the field to change if it is known."""
    experiment = stored(directory.path / "experiment.json")
    if experiment is None:
        return None
    path = field_to_blame(list(flatten(experiment)), error)
    target = link("/new", **{"from": row.id}) + (f"#f-{path}" if path else "")
    about = [" The field to change: ", tag("code", path), "."] if path else []
    return tag("p", tag("a", "Clone with a fix", href=target, cls="button"), about)


def field_to_blame(paths: Sequence[str], error: str) -> str | None:
    """Field that an error suggests to change: the learning rate, or the first path in its message.

    A name without a dot, such as `steps`, counts only where it is written as a field: `steps=` or `steps:`.
    """
    if "learning rate" in error:
        rates = [path for path in paths if path.endswith((".lr", ".peak_lr"))]
        return min(rates, key=lambda path: path.count("."), default=None)
    for path in paths:
        end = r"(?![\w.])" if "." in path else "[=:]"
        if re.search(rf"(?<![\w.]){re.escape(path)}{end}", error):
            return path
    return None


def _figures(row: Row) -> Html:
    metrics, saved = row.metrics, row.status.get("checkpoint")
    pairs: list[tuple[str, Child]] = [
        ("Objective", row.facts.get("objective")),
        ("Model", row.facts.get("model")),
        ("Trained", row.facts.get("adapter")),
        ("Devices", row.facts.get("mesh")),
        ("Loss", number(metrics.get("loss")) if "loss" in metrics else None),
        ("Tokens/s", number(metrics.get("tokens/s")) if "tokens/s" in metrics else None),
        *(
            (f"{unit.capitalize()}/s", number(metrics[f"{unit}/s"]))
            for unit in ("pairs", "rows")
            if f"{unit}/s" in metrics
        ),
        ("Tokens", number(metrics.get("num_tokens")) if "num_tokens" in metrics else None),
        ("Memory", f"{number(metrics['peak_memory_gib'])} GiB" if "peak_memory_gib" in metrics else None),
        ("Checkpoint", f"step {saved:,}" if saved else None),
        ("Attempt", row.status.get("attempt")),
        ("Made", time_of(row.created)),
        ("Took", duration(row.seconds)),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "", "-")]
    return tag("dl", shown, cls="figures")
