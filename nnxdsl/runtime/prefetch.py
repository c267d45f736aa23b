"""Prepares the inputs of the next steps in a thread while the current step is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls a pure function for the next steps in a thread; a context manager.

    Errors are raised at the step that needs the result. At most `depth` results are prepared ahead.
    """

    def __init__(self, make: Callable[[int], T], end: int, depth: int) -> None:
        """Calls nothing yet.

        Args:
            make: Returns the input of a step.
            end: The number of steps; `make` is called for smaller steps only.
            depth: Number of steps to prepare ahead; 0 calls `make` on demand, without a thread.
        """
        self._make, self._end, self._depth = make, end, depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches") if depth else None
        self._pending: deque[tuple[int, Future[T]]] = deque()

    def get(self, step: int) -> T:
        """The input of a step, already prepared if the step follows the previous one."""
        if self._thread is None:
            return self._make(step)
        if self._pending and self._pending[0][0] != step:
            self._cancel()
        first = self._pending[-1][0] + 1 if self._pending else step
        for following in range(first, min(step + self._depth + 1, self._end)):
            self._pending.append((following, self._thread.submit(self._make, following)))
        return self._pending.popleft()[1].result()

    def _cancel(self) -> None:
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
