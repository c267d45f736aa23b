"""Chunks of rows converted by several processes, in order and with bounded memory."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import cloudpickle

from nnxdsl.data.loaders.convert import Conversion, Converted
from nnxdsl.data.loaders.files import Chunk
from nnxdsl.data.loaders.worker import Worker

AHEAD = 3
"""Chunks for each worker that are read before their results are taken: what bounds the memory."""


def cpu_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def convert_all(conversion: Conversion, chunks: Iterable[Chunk], workers: int) -> Iterator[Converted]:
    """The chunks as ids, in their order.

    Args:
        conversion: Converts each.
        chunks: Read as they are needed, `AHEAD` of them for each worker.
        workers: Number of worker processes; with fewer than two this process converts.
    """
    if workers < 2:
        yield from map(conversion, chunks)
        return
    pickled = cloudpickle.dumps(conversion)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    pending: collections.deque[Future[Converted]] = collections.deque()

    def convert(chunk: Chunk) -> Converted:
        worker = idle.get()
        try:
            return worker(chunk)
        finally:
            idle.put(worker)

    # A thread for each process waits for its results; the workers are ended first, so that no thread waits in vain.
    with ThreadPoolExecutor(workers) as threads, contextlib.ExitStack() as stack:
        stack.callback(lambda: threads.shutdown(wait=False, cancel_futures=True))
        for _ in range(workers):
            idle.put(stack.enter_context(Worker(pickled)))
        for chunk in chunks:
            pending.append(threads.submit(convert, chunk))
            if len(pending) >= AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
