"""The run that a page shows, as plain values: its state as one word, its files, and the newest start of it."""

from __future__ import annotations

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

from ...processes.launch import Launch
from ...state import Site
from ...store.index import Row


@attrs.frozen
class Chosen:
    """A run, which may not have a directory yet.

    Attributes:
        id: Its id.
        state: One word, as of `Row`, or `starting`, `stopping` and `refused`; empty if there is no such run.
        row: Its row in the list of runs; None without a directory.
        newest: The newest start by the app.
        directory: Its directory, if its files are sound.
        place: Its position in the queue, from 1.
        problem: Which of its files is damaged.
    """

    id: str
    state: str = ""
    row: Row | None = None
    newest: Launch | None = None
    directory: RunDirectory | None = None
    place: int | None = None
    problem: str = ""

    @property
    def is_live(self) -> bool:
        """Whether a process of it is running."""
        return self.state in ("starting", "stopping") or (self.row is not None and self.row.is_live)


def chosen(site: Site, run: str) -> Chosen:
    """Returns the run with an id."""
    row, newest = site.index.row(run), site.launcher.newest(run)
    if row is None:
        return _without_directory(site, run, newest)
    state = row.state
    if newest is not None and newest.is_alive and not row.is_live and is_after(newest, row):
        state = "starting"
    elif newest is not None and newest.is_alive and row.state in ("stopped", "failed"):
        state = "stopping"  # its status is final, but its process is still exiting: it cannot be resumed yet
    try:
        directory = site.run(run)
    except RunError as error:
        return Chosen(run, "damaged", row, newest, problem=str(error))
    return Chosen(run, state, row, newest, directory, problem=row.problem or "")


def _without_directory(site: Site, run: str, newest: Launch | None) -> Chosen:
    place = next((n for n, one in enumerate(site.launcher.waiting(), start=1) if one.run == run), None)
    if place is not None:
        return Chosen(run, "queued", place=place)
    if newest is None:
        return Chosen(run)
    return Chosen(run, "starting" if newest.is_alive else "refused", newest=newest)


def is_after(newest: Launch, row: Row) -> bool:
    """Whether a start is newer than the run's last status, which then belongs to an earlier attempt."""
    return newest.began > (row.status.get("heartbeat") or {}).get("wall", 0.0)
