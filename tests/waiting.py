"""Waiting for an event as long as it takes: a limit ends what hangs, and is no measure of speed."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_SECONDS = 1200.0
"""More than a machine ten times slower needs for any one thing that a test waits for."""


def wait_until(condition: Callable[[], object], what: str = "", every_seconds: float = 0.02) -> None:
    """Returns when `condition` holds; fails, naming `what`, if something hangs."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, what or "what was waited for did not come"
        time.sleep(every_seconds)
