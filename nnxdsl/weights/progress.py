"""Shows how much of a model's weights has been read."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping

import attrs
import numpy as np

from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.models.params import ParamSpec
from nnxdsl.program.init import ArrayLike, ReferenceSource, Source, TeacherSource
from nnxdsl.runtime.distributed import is_single_process
from nnxdsl.terminal.display import Display

Count = Callable[[int], None]


@contextlib.contextmanager
def reading_weights(display: Display, name: str, source: Source, *models: Mapping[str, ParamSpec]) -> Iterator[Source]:
    """A phase of the display around the reading of models; the block reads from the source that it is given.

    Args:
        display: Shows the bytes of the weights, in the dtypes that they are read into.
        name: Of the phase.
        source: Where the weights come from.
        models: The weights of each model that is read.
    """
    leaves = [leaf for model in models for leaf in model.values()]
    values = sum(math.prod(leaf.shape) for leaf in leaves)
    size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    phase, done, lock = display.begin(name, size, unit="bytes"), 0, threading.Lock()

    def count(number: int) -> None:
        nonlocal done
        with lock:  # several threads read the layers of one weight
            done += number
            display.advance(phase, min(size * done // values, size))

    try:
        yield _counted(source, count)
    finally:
        display.end(phase)


def _counted(source: Source, count: Count) -> Source:
    match source:
        case TeacherSource():
            return TeacherSource(_Counted(source, count), _Counted(source.teacher, count))
        case ReferenceSource():
            return ReferenceSource(_Counted(source, count), _Counted(source.reference, count))
        case _:
            return _Counted(source, count)


class _Counted:
    """A source that calls `count` with the number of values that were read: a part of a layer at a time."""

    def __init__(self, source: Source, count: Count) -> None:
        self._source, self._count = source, count

    def leaf(self, path: str) -> ArrayLike:
        weight = self._source.leaf(path)
        # Of several processes each reads only what its devices need, so that a weight is counted as a whole.
        if not isinstance(weight, MappedArray) or not is_single_process():
            self._count(weight.size)
            return weight
        guards = weight.guards or (lambda _: None,) * len(weight.parts)
        return attrs.evolve(weight, guards=tuple(functools.partial(self._read, guard) for guard in guards))

    def _read(self, guard: Callable[[np.ndarray], None], part: np.ndarray) -> None:
        guard(part)
        self._count(part.size)
