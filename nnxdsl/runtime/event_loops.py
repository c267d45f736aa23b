"""Event loops for orbax, which closes them after the first error while other writes are still under way."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import warnings
from collections.abc import Callable
from typing import Any

_LEFT_ALONE = r"coroutine '(run_sync\.<locals>|AsyncCheckpointer|\w*Checkpoint\w*)\..*' was never awaited"


class _PatientLoop(asyncio.SelectorEventLoop):
    """A loop that drops what other threads hand to it once it is closed: nobody waits for that any more.

    tensorstore's threads do so when the other writes of a failed save end. An ordinary loop raises in them, and each
    write would print a traceback beside the one message that matters.
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
        with contextlib.suppress(AttributeError):  # it was never whole: there was no descriptor for it
            super().__del__()


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _PatientLoop()


def use_patient_loops() -> None:
    """Has `asyncio.new_event_loop` make loops that may be told of something after they were closed.

    A policy that somebody else has set stays. Where no loop can be made, orbax's own coroutines are left alone; Python
    need not warn of them, since the error that left them so is raised.
    """
    warnings.filterwarnings("ignore", _LEFT_ALONE, RuntimeWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of policies, from Python 3.14 on
        if type(asyncio.get_event_loop_policy()) is asyncio.DefaultEventLoopPolicy:
            asyncio.set_event_loop_policy(_Policy())
