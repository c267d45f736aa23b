"""Quantized tensors of published checkpoints, dequantized as they are read.

Three formats are supported: MXFP4 (GPT-OSS; Open Compute Project, Microscaling Formats v1.0: two 4-bit floats a byte,
and a power of two for each 32 of them), 8-bit floats with a scale for each block of a matrix (DeepSeek-V3,
arXiv:2412.19437, section 3.3), and integers with a scale for each group of inputs, as compressed-tensors stores them
(Kimi K2.5: 4 bits, packed). Only weights are dequantized; activations are not quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import attrs
import ml_dtypes
import numpy as np

from nnxdsl.formats.even_parts import JoinedRows
from nnxdsl.formats.safetensors import Tensor
from nnxdsl.formats.stacked_experts import ExpertMatrix

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BLOCKS, _SCALES, _BLOCK_SCALES = "_blocks", "_scales", "_scale_inv"
# The sixteen values of E2M1 by their bits: sign, two exponent bits, one mantissa bit.
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BIAS = 127  # of the exponent of a scale
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_ROWS = 256  # dequantized at a time


@attrs.frozen
class _QuantizedTensor:
    """A quantized tensor: stored values and their scales, with the interface of a `safetensors.Tensor`."""

    stored: Tensor
    scale: Tensor
    readable: ClassVar[bool] = True
    is_mapped: ClassVar[bool] = False  # the values are computed when read
    numpy: ClassVar[np.dtype] = _BFLOAT16  # the dtype as read

    @property
    def file(self) -> Path:
        """The safetensors file of the stored values."""
        return self.stored.file


class Mxfp4(_QuantizedTensor):
    """Matrices of experts `[experts, in, out]`, stored as blocks `[experts, out, in / 32, 16]` with a scale each."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as read."""
        *leading, rows, blocks, size = self.stored.shape
        return (*leading, blocks * size * 2, rows)

    @property
    def dtype(self) -> str:
        """The dtype as stored, for messages."""
        return "MXFP4"

    def read(self) -> np.ndarray:
        """The values in bfloat16, which represents all of them exactly."""
        blocks, scales = self.stored.raw(), self.scale.raw()
        out = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), _BFLOAT16)
        table = _E2M1.astype(_BFLOAT16)
        for matrix, packed, exponents in zip(out, blocks, scales, strict=True):  # one expert at a time, to limit memory
            matrix[..., 0::2], matrix[..., 1::2] = table[packed & 15], table[packed >> 4]
            # The scale is a power of two, so that the product is exact.
            power = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
            matrix[...] = (matrix.astype(np.float32) * power[..., None]).astype(_BFLOAT16)
        return out.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


class BlockFloat8(_QuantizedTensor):
    """A matrix `[out, in]` of 8-bit floats, with a float32 scale for each block."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as read and stored."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """The dtype as stored, for messages."""
        return self.stored.dtype

    def read(self) -> np.ndarray:
        """The values, multiplied by their scales in float32 and rounded to bfloat16."""
        values = self.stored.raw()
        (rows, columns), (height, width) = values.shape, self.block
        out = np.empty(values.shape, _BFLOAT16)
        scales = np.repeat(self.scale.read().astype(np.float32), width, axis=1)[:, :columns]
        for number, start in enumerate(range(0, rows, height)):  # one row of blocks at a time, to limit memory
            part = values[start : start + height].astype(np.float32) * scales[number]
            out[start : start + height] = part.astype(_BFLOAT16)
        return out

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block: powers of two in published checkpoints; the last block may be cut."""
        rows, columns = (_block(length, count) for length, count in zip(self.shape, self.scale.shape, strict=True))
        return rows, columns


@attrs.frozen
class GroupedIntegers(_QuantizedTensor):
    """A matrix `[out, in]` of integers, with a scale for each group of inputs, `[out, groups]`.

    Attributes:
        shape: The shape as read.
        bits: 4 or 8 where the integers are packed in 32-bit words, the first one in the lowest bits and zero in the
            middle of their range; None where each is an int8.
    """

    shape: tuple[int, int]
    bits: int | None = None

    @property
    def dtype(self) -> str:
        """The dtype as stored, for messages."""
        return "I8" if self.bits is None else f"I{self.bits}"

    def read(self) -> np.ndarray:
        """The values, multiplied by their scales in float32 and rounded to bfloat16."""
        rows, columns = self.shape
        stored, scales, out = self.stored.raw(), self.scale.read(), np.empty(self.shape, _BFLOAT16)
        for start in range(0, rows, _ROWS):  # some rows at a time, to limit memory
            part = slice(start, start + _ROWS)
            values = self._integers(stored[part], columns).astype(np.float32)
            factor = scales[part].astype(np.float32)[..., None]
            scaled = values.reshape(*factor.shape[:2], -1) * factor
            out[part] = scaled.reshape(values.shape).astype(_BFLOAT16)
        return out

    def _integers(self, stored: np.ndarray, columns: int) -> np.ndarray:
        if self.bits is None:
            return stored
        data = np.ascontiguousarray(stored).view(np.uint8)
        if self.bits == 4:
            data = np.stack((data & 15, data >> 4), axis=-1).reshape(len(data), -1)
        return data[:, :columns].astype(np.int16) - 2 ** (self.bits - 1)


def _block(length: int, count: int) -> int:
    """The power of two that divides a length into `count` blocks; the whole length for one block."""
    if count == 1:
        return length
    size = 1
    while -(-length // size) > count:
        size *= 2
    return size


StoredTensor = Tensor | Mxfp4 | BlockFloat8 | GroupedIntegers | ExpertMatrix | JoinedRows


def dequantize(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, StoredTensor]]:
    """A checkpoint's tensors by name, with each quantized tensor and its scales as one, under the unquantized name.

    Tensors whose scales do not match are returned unchanged; the reader reports them as unexpected.
    """
    taken: set[str] = set()
    for name, tensor in tensors.items():
        base = name.removesuffix(_BLOCKS)
        scales, block_scales = tensors.get(base + _SCALES), tensors.get(name + _BLOCK_SCALES)
        if base != name and scales is not None and _is_mxfp4(tensor, scales):
            taken |= {name, base + _SCALES}
            yield base, Mxfp4(tensor, scales)
        elif block_scales is not None and _is_block_float8(tensor, block_scales):
            taken |= {name, name + _BLOCK_SCALES}
            yield name, BlockFloat8(tensor, block_scales)
        elif (integers := _grouped_integers(name, tensor, tensors)) is not None:
            weight = name.removesuffix(_PACKED)
            taken |= {name, weight + _SCALE, weight + _SHAPE}
            yield weight, integers
    yield from ((name, tensor) for name, tensor in tensors.items() if name not in taken)


def _is_mxfp4(blocks: Tensor, scales: Tensor) -> bool:
    is_bytes = blocks.dtype == scales.dtype == "U8"
    return is_bytes and len(blocks.shape) == 4 and blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape


def _is_block_float8(stored: Tensor, scales: Tensor) -> bool:
    if stored.dtype not in _FLOAT8 or not scales.readable or not len(stored.shape) == len(scales.shape) == 2:
        return False
    sizes = zip(stored.shape, scales.shape, strict=True)
    return all(0 < count <= length and -(-length // _block(length, count)) == count for length, count in sizes)


def _grouped_integers(name: str, stored: Tensor, tensors: Mapping[str, Tensor]) -> GroupedIntegers | None:
    """A matrix of integers; None if it is none, or its scales do not match."""
    weight = name.removesuffix(_PACKED)
    scale, shape = tensors.get(weight + _SCALE), tensors.get(weight + _SHAPE)
    if scale is None or not scale.readable or not len(stored.shape) == len(scale.shape) == 2:
        return None
    rows, columns, bits = *stored.shape, None
    if weight != name:
        if stored.dtype != "I32" or shape is None or shape.dtype not in ("I32", "I64") or shape.shape != (2,):
            return None
        columns = int(shape.raw()[1])
        bits = next((bits for bits in (4, 8) if -(-columns * bits // 32) == stored.shape[1]), None)
        if bits is None or int(shape.raw()[0]) != rows:
            return None
    elif stored.dtype != "I8":
        return None
    fits = scale.shape[0] == rows and scale.shape[1] > 0 and columns % scale.shape[1] == 0
    return GroupedIntegers(stored, scale, (rows, columns), bits) if fits else None
