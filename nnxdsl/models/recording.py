"""Values that layers give beside their output, recorded while a model is traced, where anything reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class Recorder(Generic[ValueT]):
    """One kind of value; `recording` and `layer` are entered around the decoder and around each layer.

    Args:
        name: of the value.
    """

    def __init__(self, name: str) -> None:
        self._is_on: ContextVar[bool] = ContextVar(f"records_{name}", default=False)
        self._layer: ContextVar[list[ValueT] | None] = ContextVar(f"{name}_of_layer", default=None)

    @contextmanager
    def recording(self, is_on: bool) -> Iterator[None]:
        """Within the context, the layers of a decoder that is traced give this value."""
        token = self._is_on.set(is_on)
        try:
            yield
        finally:
            self._is_on.reset(token)

    @contextmanager
    def layer(self) -> Iterator[list[ValueT]]:
        """A list that `record` of one layer adds to; it stays empty outside of `recording`."""
        values: list[ValueT] = []
        token = self._layer.set(values if self._is_on.get() else None)
        try:
            yield values
        finally:
            self._layer.reset(token)

    @property
    def is_on(self) -> bool:
        """Whether the value of the layer that is traced is read."""
        return self._layer.get() is not None

    def record(self, value: Callable[[], ValueT]) -> None:
        """Computes the value of the layer that is traced, if it is read."""
        layer = self._layer.get()
        if layer is not None:
            layer.append(value())
