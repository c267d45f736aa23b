"""Processor time that a test compares with other processor time, never with a number of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_seconds(function: Callable[[], object], times: int = 1) -> float:
    """Returns the least processor time of this process that calls of `function` took."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        function()
        taken.append(time.process_time() - began)
    return min(taken)
