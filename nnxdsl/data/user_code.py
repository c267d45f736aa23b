"""Users' functions and classes: their sources, and calls in threads that end with the process."""

from __future__ import annotations

import concurrent.futures
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def submit(work: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Starts a call in a thread of its own, which ends with the process if the call never returns.

    Args:
        work: The call.
        name: Of the thread.
    """
    future = concurrent.futures.Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # SystemExit as well: whoever waits is told
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def source_of(code: Any) -> str:
    """The source of a function or class; its name if it was defined interactively, or not in Python."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return repr(getattr(code, "__qualname__", ""))
