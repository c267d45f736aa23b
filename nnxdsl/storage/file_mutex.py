"""A file lock between processes: one of several runs does a piece of work, the others wait for its result."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_SECONDS = 0.2


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], object], should_stop: Callable[[], bool]) -> Iterator[bool]:
    """Holds an flock on `path` within the block; the kernel releases it if the process is killed.

    Args:
        path: The lock file, which is never deleted.
        on_wait: Called once if another process holds the lock.
        should_stop: Polled while waiting; True ends the wait.

    Yields:
        Whether the lock was acquired; False if `should_stop` returned True first.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        has_waited = False
        while not _try_lock(descriptor):
            if should_stop():
                yield False
                return
            if not has_waited:
                on_wait()
                has_waited = True
            time.sleep(POLL_SECONDS)
        yield True
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
