"""Renews the heartbeat of a run while its main thread is busy: compiling, evaluating, reading weights."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

EVERY_SECONDS = 10.0


@contextlib.contextmanager
def beating(directory: RunDirectory, every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
    """Renews the heartbeat in `status.json` every `every_seconds` from a daemon thread, until the block ends."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_seconds):
            with contextlib.suppress(RunError):  # a full disk: the main thread raises it when it writes
                directory.beat(every_seconds=every_seconds / 2)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
