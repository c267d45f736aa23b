"""What the next steps need, made in a thread while this one is computed; knows nothing of what is made."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls a pure function for the steps to come, in their order; a context manager, whose thread ends with it.

    What cannot be made is raised at the step that needs it. At most `depth` results wait beside the one that was taken.
    """

    def __init__(self, make: Callable[[int], T], end: int, depth: int) -> None:
        """Makes nothing yet.

        Args:
            make: From a step to what it needs.
            end: The first step that there is not.
            depth: For how many steps ahead; 0 makes each when it is asked for, without a thread.
        """
        self._make, self._end, self._depth = make, end, depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches") if depth else None
        self._waiting: deque[tuple[int, Future[T]]] = deque()

    def at(self, step: int) -> T:
        """What a step needs. Steps that follow each other find it made; any other begins anew."""
        if self._thread is None:
            return self._make(step)
        if self._waiting and self._waiting[0][0] != step:
            self._forget()
        first = self._waiting[-1][0] + 1 if self._waiting else step
        for following in range(first, min(step + self._depth + 1, self._end)):
            self._waiting.append((following, self._thread.submit(self._make, following)))
        return self._waiting.popleft()[1].result()

    def _forget(self) -> None:
        for _, made in self._waiting:
            made.cancel()
        self._waiting.clear()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._forget()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
