"""Quantized tensors of published checkpoints, dequantized as they are read.

Two forms are published: MXFP4 (GPT-OSS; Open Compute Project, Microscaling Formats v1.0: two 4-bit floats a byte, and a
power of two for each 32 of them) and 8-bit floats with a factor for each block of a matrix (DeepSeek-V3,
arXiv:2412.19437, section 3.3). Activations stay as the network has them: nothing is rounded but what was stored so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import ml_dtypes
import numpy as np

from nnxdsl.formats.safetensors import Tensor

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BLOCKS, _SCALES, _FACTORS = "_blocks", "_scales", "_scale_inv"
# The sixteen values of E2M1, by their bits: sign, two of exponent, one of mantissa.
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BIAS = 127  # of a scale's exponent
_EIGHT_BITS = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}


@attrs.frozen
class _QuantizedTensor:
    """A tensor of two in the file: what is stored, and what it is multiplied by. Looks as a `safetensors.Tensor`."""

    stored: Tensor
    scale: Tensor

    @property
    def file(self) -> Path:
        """The safetensors file of what is stored."""
        return self.stored.file

    @property
    def readable(self) -> bool:
        """Always: what else there is, is no such tensor."""
        return True

    @property
    def numpy(self) -> np.dtype:
        """Its dtype as it is read."""
        return _BFLOAT16

    @property
    def is_mapped(self) -> bool:
        """Never: its numbers are computed as it is read."""
        return False


class Mxfp4(_QuantizedTensor):
    """Experts' matrices, `[experts, in, out]`, of blocks `[experts, out, in / 32, 16]` and scales without the last."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is read."""
        *leading, rows, blocks, size = self.stored.shape
        return (*leading, blocks * size * 2, rows)

    @property
    def dtype(self) -> str:
        """For messages."""
        return "MXFP4"

    def read(self) -> np.ndarray:
        """The numbers, bfloat16: every one of them has a place there, so nothing is rounded."""
        blocks, scales = self.stored.raw(), self.scale.raw()
        out = np.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), _BFLOAT16)
        table = _E2M1.astype(_BFLOAT16)
        for matrix, few, exponents in zip(out, blocks, scales, strict=True):  # an expert at a time, for the memory
            matrix[..., 0::2], matrix[..., 1::2] = table[few & 15], table[few >> 4]
            # A bfloat16 of this exponent is the power of two itself; the product of the two is exact.
            power = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)
            matrix[...] = (matrix.astype(np.float32) * power[..., None]).astype(_BFLOAT16)
        return out.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


class BlockFloat8(_QuantizedTensor):
    """A matrix `[out, in]` of 8-bit floats, with a float32 factor for each block of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is read, and stored."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """For messages."""
        return self.stored.dtype

    def read(self) -> np.ndarray:
        """The numbers, multiplied in float32 and rounded to bfloat16."""
        few = self.stored.raw().view(_EIGHT_BITS[self.stored.dtype]).reshape(self.shape)
        factors = self.scale.read().astype(np.float32)
        (rows, columns), (tall, wide) = few.shape, self.block
        out = np.empty(few.shape, _BFLOAT16)
        across = np.repeat(factors, wide, axis=1)[:, :columns]
        for number, start in enumerate(range(0, rows, tall)):  # a row of blocks at a time, for the memory
            part = few[start : start + tall].astype(np.float32) * across[number]
            out[start : start + tall] = part.astype(_BFLOAT16)
        return out

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a factor: the published sizes are powers of two, the last block may be cut."""
        sizes = (_block(length, count) for length, count in zip(self.shape, self.scale.shape, strict=True))
        rows, columns = sizes
        return rows, columns


def _block(length: int, count: int) -> int:
    """The power of two of which so many make up a length; the whole length where there is but one."""
    if count == 1:
        return length
    size = 1
    while -(-length // size) > count:
        size *= 2
    return size


def dequantize(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | Mxfp4 | BlockFloat8]]:
    """A checkpoint's tensors by name, those in few bits as one each under the name that they have in plain numbers.

    What does not fit together is left as it stands: it is told of as any tensor that nobody asked for.
    """
    taken: set[str] = set()
    for name, tensor in tensors.items():
        base = name.removesuffix(_BLOCKS)
        scales, factors = tensors.get(base + _SCALES), tensors.get(name + _FACTORS)
        if base != name and scales is not None and _is_mxfp4(tensor, scales):
            taken |= {name, base + _SCALES}
            yield base, Mxfp4(tensor, scales)
        elif factors is not None and _is_block_float8(tensor, factors):
            taken |= {name, name + _FACTORS}
            yield name, BlockFloat8(tensor, factors)
    yield from ((name, tensor) for name, tensor in tensors.items() if name not in taken)


def _is_mxfp4(blocks: Tensor, scales: Tensor) -> bool:
    is_bytes = blocks.dtype == scales.dtype == "U8"
    return is_bytes and len(blocks.shape) == 4 and blocks.shape[-1] == 16 and blocks.shape[:-1] == scales.shape


def _is_block_float8(stored: Tensor, factors: Tensor) -> bool:
    if stored.dtype not in _EIGHT_BITS or not factors.readable or not len(stored.shape) == len(factors.shape) == 2:
        return False
    sizes = zip(stored.shape, factors.shape, strict=True)
    return all(0 < count <= length and -(-length // _block(length, count)) == count for length, count in sizes)
