"""The head of a run's page: its state, what it does, what is wrong with it and what to change, and its metrics."""

from __future__ import annotations

import glob
import re
import time
from collections.abc import Sequence

import attrs
import numpy as np

from nnxdsl.config.core.serialization import flatten
from nnxdsl.config.weights import From
from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info

from ...formatting import age, duration, local_time, number, parsed
from ...markup import markdown_link, plain
from ...processes.launch import TRASH, Launch
from ...state import Site
from ...store.experiments import stored
from ...store.index import Row, last_attempt


@attrs.frozen
class Chosen:
    """A run, which may not have a directory yet."""

    id: str
    # As of `Row`, or `starting`, `stopping`, `refused`, or `missing` if its directory was moved or deleted; empty if
    # there is no such run.
    state: str = ""
    row: Row | None = None  # in the list of runs; None without a directory
    newest: Launch | None = None  # by the app
    directory: RunDirectory | None = None  # if its files are sound
    place: int | None = None  # in the queue, from 1
    problem: str = ""  # which of its files is damaged or gone

    @property
    def is_live(self) -> bool:
        """Whether a process of it is running."""
        if self.state == "missing":
            return self.newest is not None and self.newest.is_alive
        return self.state in ("starting", "stopping") or (self.row is not None and self.row.is_live)

    @property
    def is_restarted(self) -> bool:
        """Whether its newest start is newer than its last status, which then belongs to an earlier attempt."""
        heard = {} if self.row is None else self.row.status.get("heartbeat") or {}
        return self.newest is not None and self.newest.began > heard.get("wall", 0.0)


@attrs.frozen
class Trouble:
    """Why a run does not go on: a remedy in plain text, an exception or output, the path of the field to change."""

    message: str = ""
    error: str = ""
    field: str | None = None


def chosen(site: Site, run: str) -> Chosen:
    """Returns the run with an id."""
    row, newest = site.index.row(run), site.launcher.newest(run)
    is_alive = newest is not None and newest.is_alive
    if row is None:
        queue = [one.run for one in site.launcher.waiting()]
        if run in queue:
            return Chosen(run, "queued", place=queue.index(run) + 1)
        state = "" if newest is None else newest.state
        if state == "missing" or site.index.vanished_since(run, 0.0 if newest is None else newest.began):
            place = site.settings.home
            deleted = sorted((place / TRASH).glob(f"{glob.escape(run)}-[0-9]*"))
            gone = f"Its directory {place / run} was moved or deleted" + (f"; it is {deleted[-1]}" if deleted else "")
            return Chosen(run, "missing", newest=newest, problem=f"{gone}.")
        return Chosen(run, state, newest=newest)
    try:
        choice = Chosen(run, row.state, row, newest, site.run(run), problem=row.problem or "")
    except RunError as error:
        return Chosen(run, "damaged", row, newest, problem=str(error))
    if is_alive and not row.is_live and choice.is_restarted:
        return attrs.evolve(choice, state="starting", row=attrs.evolve(row, metrics={}))
    if is_alive and row.state in ("stopped", "failed"):  # final, but its process is still exiting: no resume yet
        return attrs.evolve(choice, state="stopping")
    return choice


def activity(site: Site, run: Chosen) -> str:
    """What the run does at the moment, as Markdown."""
    if not run.state:
        return f"There is no run {plain(run.id)} in {plain(str(site.settings.home))}." if run.id else "Choose one:"
    if run.row is None:
        return _before(site, run)
    status, row = run.row.status, run.row
    step, total = status.get("step") or 0, status.get("total")
    parts: list[str] = []
    if run.state == "starting" and not row.is_live:
        parts.append("a new attempt is reading its data")
    elif run.is_live and status.get("stage") and run.directory is not None:
        parts.append(_stage(run.directory, row))
    if total:
        parts.append(f"step {step:,} of {total:,}")
    if run.is_live and status.get("eta_seconds") is not None:
        parts.append(_time_left(site, row))
    if run.is_live and row.quiet != float("inf"):
        parts.append(f"last heartbeat {age(row.quiet)}")
    return plain(" · ".join(parts))


def _before(site: Site, run: Chosen) -> str:
    if run.place is not None:
        return f"Queued at position {run.place}; it starts when a slot is free while the app is running."
    if run.state != "starting" or run.newest is None:
        return ""
    lasted = duration(max(0.0, time.time() - run.newest.began))
    text = f"It reads and checks its data before it creates its directory ({lasted} so far)."
    experiment = stored(run.newest.directory / "experiment.json")
    weights = None if experiment is None else experiment.model.weights
    earlier = site.index.row(weights.experiment.id) if isinstance(weights, From) else None
    if earlier is None:
        return text
    linked, step = markdown_link(earlier.id, "/run", id=earlier.id), earlier.status.get("step") or 0
    return (
        f"{text} It starts from the weights of another run, which runs first: {linked} ({earlier.state}, step {step})"
    )


def _stage(directory: RunDirectory, row: Row) -> str:
    stage, began = str(row.status.get("stage")), None
    if row.state == "compiling":
        began = parsed(str(last_attempt(directory).get("time", "")))
    return stage if began is None else f"{stage}, {duration(max(0.0, time.time() - began.timestamp()))} so far"


def _time_left(site: Site, row: Row) -> str:
    """Estimated time left: the run's own estimate, and a range from its recent fast and slow steps."""
    seconds, columns = row.status.get("eta_seconds"), site.series.of(row.path / "metrics.jsonl").columns
    rates, text = columns.get("pairs/s") or columns.get("samples/s"), f"{duration(seconds)} left"
    if rates is None or len(rates.values) < 12 or seconds is None or not row.status.get("total"):
        return text
    recent = np.asarray(rates.values[-60:])
    recent = recent[np.isfinite(recent) & (recent > 0)]
    if len(recent) < 8:
        return text
    slow, pace, quick = np.percentile(recent, (10, 50, 90))
    return f"{text} ({duration(seconds * pace / quick)} to {duration(seconds * pace / slow)})"


def trouble(run: Chosen) -> Trouble:
    """Why the run is not progressing, and the remedy."""
    row, newest = run.row, run.newest
    if run.problem:
        return Trouble(run.problem)
    if row is None:
        return _refused(newest) if newest is not None and run.state == "refused" else Trouble()
    status = row.status
    if run.state == "failed":
        error = str(status.get("error") or "No error was recorded.")
        experiment = None if run.directory is None else stored(run.directory.path / "experiment.json")
        field = None if experiment is None else field_to_blame(list(flatten(experiment)), error)
        return Trouble(f"The field to change: {field}." if field else "", error, field)
    if run.state == "lost":
        if row.inconsistency:
            return Trouble(f"{row.inconsistency}. Resume continues from its newest checkpoint.")
        saved = status.get("checkpoint")
        resumes = f"Its last checkpoint is step {saved}; Resume continues there." if saved else "It has no checkpoint."
        return Trouble(f"{_how_lost(row, newest)} {resumes}")
    if run.state == "silent":
        quiet = duration(row.quiet)
        return Trouble(
            f"Its process is alive, but its last heartbeat is {quiet} old: it may hang, or the disk may be full."
        )
    if newest is not None and not newest.is_alive and not row.is_live and run.is_restarted:
        refused = _refused(newest)
        return attrs.evolve(refused, message=f"The last attempt to resume failed: {refused.message}")
    return Trouble()


def _refused(newest: Launch) -> Trouble:
    """Output of a process that ended before its run had a directory."""
    code, lines = newest.exit_code, [line for line in newest.output().splitlines() if line.strip()]
    first = next((n for n, line in enumerate(lines) if re.match(r"\w*Error: ", line)), max(0, len(lines) - 1))
    exit_text = "" if code is None else f" (exit code {code})" if code >= 0 else f" by signal {-code}"
    verb = "was ended" if code is not None and code < 0 else "ended"
    message = f"The process {verb}{exit_text} before it created the run directory. Nothing was written."
    return Trouble(message, "\n".join(lines[first : first + 12]) or "No output.")


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


def figures(row: Row, zone: str) -> str:
    """What the run trains, and its latest metrics, as Markdown."""
    saved = row.status.get("checkpoint")
    metrics = {
        "Loss": ("loss", ""),
        "Tokens/s": ("tokens/s", ""),
        "Pairs/s": ("pairs/s", ""),
        "Samples/s": ("samples/s", ""),
        "Tokens": ("num_tokens", ""),
        "Memory": ("peak_memory_gib", " GiB"),
    }
    facts = {
        "Objective": row.facts.get("objective"),
        "Model": row.facts.get("model"),
        "Trained": row.facts.get("adapter"),
        "Devices": row.facts.get("mesh"),
        "Attempt": row.status.get("attempt"),
        "Created": local_time(row.created, zone),
    }
    latest = {name: number(row.metrics[key]) + unit for name, (key, unit) in metrics.items() if key in row.metrics}
    latest |= {"Checkpoint": f"step {saved:,}" if saved else None, "Duration": duration(row.seconds)}
    lines = (
        " · ".join(f"{name} **{plain(str(value))}**" for name, value in line.items() if value not in (None, "", "-"))
        for line in (facts, latest)
    )
    return "\n\n".join(lines)
