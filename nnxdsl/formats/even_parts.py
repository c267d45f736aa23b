"""Tensors that transformers wrote as equal parts of a joined one, as the unequal parts that were published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from nnxdsl.formats.safetensors import Tensor


@attrs.frozen
class JoinedRows:
    """Rows of tensors that are joined along their first axis, with the interface of a `safetensors.Tensor`.

    Attributes:
        parts: The tensors, in their order.
        start: The first row among those of all parts.
        stop: The row after the last.
    """

    parts: tuple[Tensor, ...]
    start: int
    stop: int

    @property
    def file(self) -> Path:
        """The safetensors file of the first tensor."""
        return self.parts[0].file

    @property
    def dtype(self) -> str:
        """The dtype as stored."""
        return self.parts[0].dtype

    @property
    def numpy(self) -> np.dtype:
        """The dtype in numpy."""
        return self.parts[0].numpy

    @property
    def readable(self) -> bool:
        """Whether `read` supports the dtype."""
        return all(part.readable for part in self.parts)

    @property
    def is_mapped(self) -> bool:
        """Whether `read` returns a view of the file: it does not."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as read."""
        return self.stop - self.start, *self.parts[0].shape[1:]

    def read(self) -> np.ndarray:
        """The values, in new memory."""
        return np.concatenate([part.read() for part in self.parts])[self.start : self.stop]


def recut(tensors: Mapping[str, Any], like: Mapping[str, str]) -> Iterator[tuple[str, JoinedRows]]:
    """The parts of other lengths of the joined tensors of all layers; nothing where they have their lengths already.

    Args:
        tensors: Those of a checkpoint by name (`StoredTensor`), such as "layers.0.linear_attn.q_conv1d.weight".
        like: The names of the parts within a layer in their order, and for each a tensor with as many rows.
    """
    (first, *_) = like or ("",)
    for name in tensors if like else ():
        layer = name.removesuffix(first)
        if layer == name or not all(layer + one in tensors for pair in like.items() for one in pair):
            continue
        parts = tuple(tensor for part in like if isinstance(tensor := tensors[layer + part], Tensor))
        rows = [tensors[layer + other].shape[0] for other in like.values()]
        stored = [part.shape[0] for part in parts]
        if (
            len(parts) < len(like)
            or rows == stored
            or sum(rows) != sum(stored)
            or len({part.shape[1:] for part in parts}) > 1
        ):
            continue
        for number, part in enumerate(like):
            start = sum(rows[:number])
            yield layer + part, JoinedRows(parts, start, start + rows[number])
