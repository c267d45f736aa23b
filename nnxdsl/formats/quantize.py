"""Formats in which a checkpoint's weights are written quantized, as published: values, scales, `quantization_config`.

Which tensors are quantized, what is stored for each, and what `config.json` says of it; `quantized` reads it back.
Rounding is to nearest, from the weights alone: no calibration data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import attrs
import ml_dtypes
import numpy as np

from nnxdsl.errors import WeightsError

TensorSpec = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT8_MAX = float(ml_dtypes.finfo(_FLOAT8).max)  # 448
_LEAST = 2.0**-100
_BLOCK = 128  # rows and columns that share a scale in DeepSeek-V3
_GROUPS = (128, 64, 32)  # inputs that share a scale: llm-compressor's default, and smaller ones with kernels in vLLM
_MX_BLOCK, _MX_BIAS = 32, 127
_FLOAT4_MAX = 6.0
_GPT_OSS = "gpt_oss"


class WeightFormat(ABC):
    """How the weight of a linear layer, `[out, in]`, is stored."""

    @abstractmethod
    def largest_error(self) -> float:
        """Bound of a weight's error, as a fraction of the largest magnitude in its block.

        The values as read are rounded to bfloat16 in addition.
        """

    @abstractmethod
    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape cannot be stored; None where it can."""

    @abstractmethod
    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The tensors that are stored for a weight, by name."""

    @abstractmethod
    def encode(self, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The values of `parts`.

        Raises:
            WeightsError: The weight holds NaN or infinity.
        """

    @abstractmethod
    def config(self, ignored: Collection[str]) -> dict[str, Any]:
        """`quantization_config`, where the modules `ignored` are not quantized."""


@attrs.frozen
class BlockFloat8Format(WeightFormat):
    """8-bit floats (e4m3) with a float32 scale for each 128 x 128 block: DeepSeek-V3, arXiv:2412.19437, section 3.3."""

    def largest_error(self) -> float:
        """Half a unit of three mantissa bits."""
        return 2.0**-4

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """A cut block is refused: transformers 5.23 infers the size of blocks by division, and would misread it."""
        cut = [size for size in shape if size > _BLOCK and size % _BLOCK]
        return f"{cut[0]} is not divisible by blocks of {_BLOCK}" if cut else None

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """The values, and a scale by which those of a block are multiplied."""
        blocks = tuple(-(-size // _BLOCK) for size in shape)
        return {name: (shape, _FLOAT8), f"{name}_scale_inv": (blocks, np.dtype(np.float32))}

    def encode(self, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The largest magnitude of a block becomes 448; computed as in transformers' `Fp8Quantize`."""
        rows, columns = weight.shape
        height, width = min(_BLOCK, rows), min(_BLOCK, columns)
        values = np.empty(weight.shape, _FLOAT8)
        scales = np.empty((rows // height, columns // width), np.float32)
        for number, start in enumerate(range(0, rows, height)):  # one row of blocks at a time, to limit memory
            part = weight[start : start + height].astype(np.float32).reshape(height, -1, width)
            largest = _largest(name, part, (0, 2))
            # A block of zeros, or of numbers so small that their factor would be infinite, is stored as zeros.
            factor = np.float32(_FLOAT8_MAX) / np.where(largest > _LEAST, largest, np.float32(_FLOAT8_MAX))
            scaled = np.clip(part * factor[:, None], -_FLOAT8_MAX, _FLOAT8_MAX)
            values[start : start + height] = scaled.astype(_FLOAT8).reshape(height, columns)
            scales[number] = 1 / factor
        return {name: values, f"{name}_scale_inv": scales}

    def config(self, ignored: Collection[str]) -> dict[str, Any]:
        """The fields of DeepSeek-V3; what is computed with the weights quantizes activations as it goes ("dynamic")."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": list(ignored),
        }


@attrs.frozen
class PackedIntFormat(WeightFormat):
    """Integers in 32-bit words, with a bfloat16 scale for each group of inputs: compressed-tensors' `pack-quantized`.

    Attributes:
        bits: Bits of a value: 4 or 8.
        group_size: How many inputs share a scale.
    """

    bits: int
    group_size: int

    def largest_error(self) -> float:
        """Half a step between values, and the rounding of the scale to bfloat16, which moves the largest value."""
        return 1 / (2**self.bits - 1) + 2.0**-8

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Groups must divide the inputs."""
        size = self.group_size
        return f"{shape[1]} inputs are not divisible by groups of {size}" if shape[1] % size else None

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Words, scales, and the shape of the weight."""
        rows, columns = shape
        return {
            f"{name}_packed": ((rows, columns * self.bits // 32), np.dtype(np.int32)),
            f"{name}_scale": ((rows, columns // self.group_size), _BFLOAT16),
            f"{name}_shape": ((2,), np.dtype(np.int64)),
        }

    def encode(self, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        """As compressed-tensors does: the largest magnitude of a group lies half a step beyond the largest value."""
        rows, columns = weight.shape
        half = 2 ** (self.bits - 1)
        packed = np.empty((rows, columns * self.bits // 8), np.uint8)
        scales = np.empty((rows, columns // self.group_size), _BFLOAT16)
        for start in range(0, rows, _BLOCK):  # some rows at a time, to limit memory
            part = weight[start : start + _BLOCK].astype(np.float32)
            part = part.reshape(len(part), -1, self.group_size)
            scale = (_largest(name, part, 2) / np.float32(half - 0.5)).astype(_BFLOAT16)
            scale[scale == 0] = 1
            steps = np.rint(np.clip(part / scale.astype(np.float32)[..., None], -half, half - 1))
            values = (steps + half).astype(np.uint8).reshape(len(part), columns)
            packed[start : start + _BLOCK] = values if self.bits == 8 else _nibbles(values)
            scales[start : start + _BLOCK] = scale
        shape = np.array(weight.shape, np.int64)
        return {f"{name}_packed": packed.view("<i4"), f"{name}_scale": scales, f"{name}_shape": shape}

    def config(self, ignored: Collection[str]) -> dict[str, Any]:
        """One group of layers, all that are linear."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "strategy": "group",
            "group_size": self.group_size,
            "symmetric": True,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
        }


@attrs.frozen
class Mxfp4Format(WeightFormat):
    """4-bit floats with a power of two for each 32 inputs (OCP Microscaling Formats v1.0), for GPT-OSS's experts.

    Weights are those of all experts, `[experts, in, out]`.
    """

    def largest_error(self) -> float:
        """From 5 to 4 or 6, where 5 is the largest magnitude."""
        return 1 / 5

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Blocks must divide the inputs."""
        return f"{shape[1]} inputs are not divisible by blocks of {_MX_BLOCK}" if shape[1] % _MX_BLOCK else None

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, TensorSpec]:
        """Blocks of 16 bytes, and the exponent of each."""
        experts, inputs, outputs = shape
        blocks = (experts, outputs, inputs // _MX_BLOCK)
        byte = np.dtype(np.uint8)
        return {f"{name}_blocks": ((*blocks, _MX_BLOCK // 2), byte), f"{name}_scales": (blocks, byte)}

    def encode(self, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The exponent is the smallest one with which no value is beyond 6, as in the kernels of GPT-OSS."""
        parts = {part: np.empty(shape, dtype) for part, (shape, dtype) in self.parts(name, weight.shape).items()}
        blocks, scales = parts.values()
        for number, matrix in enumerate(weight):  # one expert at a time, to limit memory
            values = matrix.astype(np.float32).T.reshape(*blocks.shape[1:3], _MX_BLOCK)
            mantissa, exponent = np.frexp(_largest(name, values, 2) / np.float32(_FLOAT4_MAX))
            exponent = np.clip(exponent - (mantissa == 0.5), -_MX_BIAS, _MX_BIAS)
            scaled = np.clip(np.ldexp(values, -exponent[..., None]), -_FLOAT4_MAX, _FLOAT4_MAX)
            blocks[number] = _nibbles(scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
            scales[number] = exponent + _MX_BIAS
        return parts

    def config(self, ignored: Collection[str]) -> dict[str, Any]:
        """The fields of the published GPT-OSS."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignored)}


def _largest(name: str, part: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    largest = np.abs(part).max(axes)
    if not np.isfinite(largest).all():
        raise WeightsError(f"{name}: holds NaN or infinity, which cannot be quantized")
    return largest


def _nibbles(values: np.ndarray) -> np.ndarray:
    """Two values a byte, the first one in the lower bits; along the last axis."""
    return values[..., 0::2] | values[..., 1::2] << 4


METHODS = ("fp8", "mxfp4", "int8", "int4")
"""Names of the formats."""


@attrs.frozen
class QuantizedLayout:
    """The tensors of a checkpoint of which some are quantized.

    Attributes:
        format: How those are stored.
        weight_of: The name of the quantized weight, by the names of its parts.
        stored: Shape and dtype of the tensors of the files, by name.
        config: `quantization_config`.
        notes: Remarks for the user.
    """

    format: WeightFormat
    weight_of: Mapping[str, str]
    stored: Mapping[str, TensorSpec]
    config: Mapping[str, Any]
    notes: tuple[str, ...]


def layout(
    method: str, tensors: Mapping[str, TensorSpec], linears: Collection[str], model_type: str
) -> QuantizedLayout:
    """Chooses which weights are quantized.

    A module, such as the attention of a layer, is quantized as a whole or not at all, since servers join its matrices.
    Norms, embeddings, the head and routers are not quantized.

    Args:
        method: One of `METHODS`.
        tensors: Shape and dtype of the tensors, by name.
        linears: Names of the weights of linear layers and experts.
        model_type: The Hub's name of the family.

    Raises:
        WeightsError: The family cannot be stored in this format, or no weight has a shape that fits.
    """
    shapes = {name: tensors[name][0] for name in linears}
    stacked = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    if method == "mxfp4":
        if model_type != "gpt_oss":
            raise WeightsError(f"quantization: mxfp4 is the format of the experts of gpt_oss, not of {model_type}")
        shapes = stacked
    elif stacked:
        raise WeightsError(
            f"quantization: {model_type} stores the experts of a layer in one tensor ({next(iter(stacked))}), which "
            f"{method} cannot; " + ("use mxfp4" if model_type == "gpt_oss" else "write it in bfloat16")
        )
    form = _format(method, shapes)
    unfit = {name: problem for name, shape in shapes.items() if (problem := form.problem(shape)) is not None}
    modules = {_module(name) for name in unfit}
    chosen = {name for name in shapes if _module(name) not in modules}
    for name, problem in unfit.items():
        if not chosen or ".experts." in name:  # nothing, or not what most of the weights are
            raise WeightsError(f"quantization: {method} cannot store {name} of shape {shapes[name]}: {problem}")
    weight_of: dict[str, str] = {}
    stored: dict[str, TensorSpec] = {}
    for name, tensor in tensors.items():
        if name in chosen:
            parts = form.parts(name, tensor[0])
            stored |= parts
            weight_of |= dict.fromkeys(parts, name)
        else:
            stored[name] = tensor
    notes = ()
    if unfit:
        name, problem = next(iter(unfit.items()))
        count = len(shapes) - len(chosen)
        notes = (
            f"{count} of {len(shapes)} linear layers are not quantized, such as those of {_module(name)}: {problem}",
        )
    # All matrices that are not quantized, whether or not transformers has a linear layer for them; a head that is tied
    # to the embedding has no tensor.
    matrices = [name for name, (shape, _) in tensors.items() if len(shape) == 2 and name.endswith(".weight")]
    ignored = sorted({"lm_head", *(name.removesuffix(".weight") for name in matrices if name not in chosen)})
    return QuantizedLayout(form, weight_of, stored, form.config(ignored), notes)


def largest_error(method: str) -> float:
    """Bound of the error of a weight as read, in bfloat16, as a fraction of the largest magnitude in its tensor."""
    return _format(method, {}).largest_error() + 2.0**-8


def _format(method: str, shapes: Mapping[str, tuple[int, ...]]) -> WeightFormat:
    if method == "fp8":
        return BlockFloat8Format()
    if method == "mxfp4":
        return Mxfp4Format()
    fitting = (size for size in _GROUPS if all(inputs % size == 0 for _, inputs in shapes.values()))
    return PackedIntFormat({"int8": 8, "int4": 4}[method], next(fitting, _GROUPS[-1]))


def _module(name: str) -> str:
    """The module that a layer's weight belongs to: its name without the last two parts."""
    return name.removesuffix(".weight").rpartition(".")[0]
