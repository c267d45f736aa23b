"""Experts of a layer that a checkpoint stores in one tensor, as the matrices of each expert that others store."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import attrs
import numpy as np

from nnxdsl.formats.safetensors import Tensor

_MATRICES = {".gate_up_proj": ("gate_proj", "up_proj"), ".down_proj": ("down_proj",)}


@attrs.frozen
class ExpertMatrix:
    """A matrix of a tensor that holds those of all experts, with the interface of a `safetensors.Tensor`.

    Attributes:
        stored: The tensor, `[experts, out, in]`.
        expert: The number of the expert.
        start: The matrix's first row among those of an expert.
        stop: The row after its last.
    """

    stored: Tensor
    expert: int
    start: int
    stop: int

    @property
    def file(self) -> Path:
        """The safetensors file of the tensor."""
        return self.stored.file

    @property
    def dtype(self) -> str:
        """The dtype as stored."""
        return self.stored.dtype

    @property
    def numpy(self) -> np.dtype:
        """The dtype in numpy."""
        return self.stored.numpy

    @property
    def readable(self) -> bool:
        """Whether `read` supports the dtype."""
        return self.stored.readable

    @property
    def is_mapped(self) -> bool:
        """Whether `read` returns a view of the file."""
        return self.stored.is_mapped

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as read."""
        return self.stop - self.start, self.stored.shape[-1]

    def read(self) -> np.ndarray:
        """The values as stored, read-only and memory-mapped."""
        return self.stored.read()[self.expert, self.start : self.stop]


def unstacked(name: str, tensor: object, wanted: Collection[str]) -> Iterator[tuple[str, ExpertMatrix]]:
    """The matrices that a tensor of all experts holds, if a decoder reads them one by one; else nothing.

    Args:
        name: The tensor's name, such as "layers.0.mlp.experts.gate_up_proj" (Qwen3.5's published files).
        tensor: The tensor.
        wanted: The names that the decoder reads.
    """
    for ending, matrices in _MATRICES.items():
        prefix = name.removesuffix(ending)
        if prefix == name or not isinstance(tensor, Tensor) or len(tensor.shape) != 3:
            continue
        experts, rows, _ = tensor.shape
        size = rows // len(matrices)
        for expert in range(experts):
            for number, matrix in enumerate(matrices):
                one = f"{prefix}.{expert}.{matrix}.weight"
                if one not in wanted:
                    return
                yield one, ExpertMatrix(tensor, expert, number * size, (number + 1) * size)
