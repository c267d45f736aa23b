"""Taking turns at a piece of work that several runs of one home want: one does it, the others wait and find it done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_SECONDS = 0.2


@contextlib.contextmanager
def turn(path: Path, wait: Callable[[], object], is_to_end: Callable[[], bool]) -> Iterator[bool]:
    """Holds the lock `path` while it is entered; the kernel lets go of it for a process that was killed.

    Args:
        path: The lock, a file that stays.
        wait: Called once if somebody else has the turn.
        is_to_end: Asked while waiting.

    Yields:
        Whether it is our turn; False if `is_to_end` said so first.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        has_waited = False
        while not _take(descriptor):
            if is_to_end():
                yield False
                return
            if not has_waited:
                wait()
                has_waited = True
            time.sleep(POLL_SECONDS)
        yield True
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
