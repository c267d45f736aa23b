"""Starts queued runs when a slot is free; a lock ensures that one app per home does so."""

from __future__ import annotations

import itertools
import shutil
import sys
import threading

from nnxdsl.errors import NnxdslError
from nnxdsl.storage.file_mutex import file_lock
from nnxdsl.storage.jsonl import read_json

from ..client import CLIENT
from ..settings import Settings
from ..store.experiments import from_tree
from ..store.index import Index
from .launch import Launcher

EVERY_SECONDS = 2.0


class Dispatcher:
    """A thread that lives as long as the app. The queue is stored in files, so it survives the app."""

    def __init__(self, settings: Settings, launcher: Launcher, index: Index) -> None:
        self._settings, self._launcher, self._index = settings, launcher, index
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="queue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; the queue is kept."""
        self._ended.set()
        self._thread.join(5)

    def _keep(self) -> None:
        self._settings.app_directory.mkdir(parents=True, exist_ok=True)
        # Another app of this home may run the queue: then this one waits for its end.
        with file_lock(self._settings.app_directory / "queue.lock", lambda: None, self._ended.is_set) as is_ours:
            while is_ours and not self._ended.wait(EVERY_SECONDS):
                try:
                    self.start_next()
                except (NnxdslError, OSError) as error:
                    sys.stderr.write(f"the queue: {error}\n")

    def start_next(self) -> bool:
        """Starts the first run of the queue if a slot is free; returns whether it did."""
        CLIENT.set("the queue")
        waiting = self._launcher.waiting()
        starting = {launch.run for launch in itertools.islice(self._launcher.launches(), 50) if launch.is_alive}
        live = {row.id for row in self._index.rows() if row.is_live}
        if not waiting or len(live | starting) >= self._settings.limits.slots:
            return False
        first = waiting[0]
        try:
            experiment = from_tree(read_json(first.directory / "experiment.json"))
            self._launcher.launch(experiment, first.recipe)
        except NnxdslError as error:
            self._launcher.audit(f"not started: {error}", first.run)
        shutil.rmtree(first.directory, ignore_errors=True)
        return True
