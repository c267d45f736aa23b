"""Event loops for orbax, which closes its loop after the first error while other writes are still running."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import warnings
from collections.abc import Callable
from typing import Any

_NEVER_AWAITED = r"coroutine '(run_sync\.<locals>|AsyncCheckpointer|\w*Checkpoint\w*)\..*' was never awaited"


class _PatientLoop(asyncio.SelectorEventLoop):
    """A loop that ignores callbacks from other threads after it is closed.

    tensorstore's threads schedule them when the other writes of a failed save end. An ordinary loop raises in those
    threads, and each write would print a traceback in addition to the error.
    """

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            if not self.is_closed():
                raise
            return asyncio.Handle(callback, args, self, context)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # __init__ failed: there was no file descriptor left
            super().__del__()


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


def use_patient_loops() -> None:
    """Makes `asyncio.new_event_loop` return loops that ignore callbacks after they are closed.

    A policy that is set already stays. Python's warnings about orbax's coroutines that were never awaited are
    suppressed: the error that prevented it is raised.
    """
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # policies are deprecated from Python 3.14 on
        if type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy:
            asyncio.set_event_loop_policy(_Policy())
