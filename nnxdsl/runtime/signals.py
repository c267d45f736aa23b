"""Asking a run to stop: the first SIGINT or SIGTERM waits for the step boundary, a second one ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Catches signals while it is entered; does nothing outside the main thread, where Python delivers none.

    A thread of its own hears of them through a pipe: Python's handlers wait until the main thread is back from XLA,
    which may be compiling for minutes.

    Attributes:
        signal: The first signal that came, or None.
    """

    def __init__(self, tell: Callable[[], object] = lambda: None) -> None:
        """Catches nothing yet.

        Args:
            tell: Called when the first signal comes, in another thread.
        """
        self.signal: int | None = None
        self._tell = tell
        self._before: dict[int, Any] = {}
        self._listener: threading.Thread | None = None
        self._pipe = (-1, -1)
        self._wakeup = -1

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._listener = threading.Thread(target=self._listen, name="signals", daemon=True)
            self._listener.start()
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._listener is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._pipe[1])
            self._listener.join()
            os.close(self._pipe[0])

    def _listen(self) -> None:
        while received := os.read(self._pipe[0], 1):
            number = received[0]
            if number not in SIGNALS:  # any other signal that Python handles comes here too
                continue
            if self.signal is not None:
                _leave(number)
            self.signal = number
            self._tell()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler that keeps the default action away; what there is to do, the listener does."""


def _leave(number: int) -> None:
    """Ends the process as a kill would, whatever it is doing: the last commit is whole in any case."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR + b"\n")
    os._exit(128 + number)
