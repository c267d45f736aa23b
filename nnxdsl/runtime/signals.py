"""Stops a run on signals: the first SIGINT or SIGTERM takes effect at a step boundary, a second one at once."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """Catches signals within the block; does nothing outside the main thread, where Python delivers none.

    A thread receives them through a pipe: Python's handlers wait until the main thread returns from XLA, which may be
    compiling for minutes. In an interactive session (a notebook) a second SIGINT raises KeyboardInterrupt once it has
    returned, since the process holds more than the run.

    Attributes:
        signal: The first signal that was received, or None.
    """

    def __init__(self, on_signal: Callable[[], object] = lambda: None) -> None:
        """Catches nothing before it is entered.

        Args:
            on_signal: Called from another thread when the first signal is received.
        """
        self.signal: int | None = None
        self._on_first_signal = on_signal
        self._is_repeated = False
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
            self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
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
            if number not in SIGNALS:  # Python writes all signals that it handles to the pipe
                continue
            if self.signal is not None and number == signal.SIGINT and _is_interactive():
                self._interrupt()
                continue
            if self.signal is not None:
                _leave(number)
            self.signal = number
            self._on_first_signal()

    def _interrupt(self) -> None:
        """Raises KeyboardInterrupt in the main thread, whose handler may have run before this thread woke up."""
        if not self._is_repeated:  # an interrupt from here comes back through the pipe
            self._is_repeated = True
            _thread.interrupt_main()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Replaces the default action; the listener thread handles the signal."""
        if self._is_repeated:
            raise KeyboardInterrupt


def _is_interactive() -> bool:
    """Whether people type into this process: Python's prompt, IPython or a notebook's kernel."""
    return hasattr(sys, "ps1") or ("IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None)


def _leave(number: int) -> None:
    """Exits at once, as after a kill: the last committed checkpoint is complete in any case."""
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR + b"\n")
    os._exit(128 + number)
