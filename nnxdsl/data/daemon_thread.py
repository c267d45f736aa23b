"""Calls of users' functions in threads that end with the process, if a call never returns."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def submit(work: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Starts a call in a thread of its own.

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
