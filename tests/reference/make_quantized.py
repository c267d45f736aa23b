"""Makes the stored figures of weights as transformers and compressed-tensors quantize them.

Run it in an environment that has torch, transformers and compressed-tensors (stored here: torch 2.13, transformers
5.23, compressed-tensors 0.20):

    python tests/reference/make_quantized.py

It writes tests/reference/quantized.npz: a matrix `weight` [out, in] float32; its 8-bit floats in blocks of 128 x 128
(`fp8`, as bytes, and `fp8_scale`); for 4 and 8 bits in groups of 32 and 128 inputs the packed words, the scales and the
dequantized values (`int4_packed`, `int4_scale`, `int4`, ...); and for 8 bits and one group the integers unpacked.
Scales of integers and dequantized values are bfloat16, as their bits (uint16).

    python tests/reference/make_quantized.py check DIRECTORY QUANTIZED

loads a checkpoint that `nnxdsl convert QUANTIZED DIRECTORY --to hub` made of a quantized one, and the quantized one,
and prints how many of their parameters differ in any bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import (
    AutoConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

SIZES = {"int4": (4, 32), "int8": (8, 128), "channel": (8, 256)}


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor's bits."""
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()


def integers(weight: torch.Tensor, count: int, group: int, form: str) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores for a weight, and `value`, what it makes of that."""
    arguments = QuantizationArgs(num_bits=count, type="int", strategy="group", group_size=group, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    groups = weight.unflatten(-1, (-1, group))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    scale = scale.to(torch.bfloat16)
    compressor = BaseCompressor.get_value_from_registry(form)
    # In float32, as scales are: else quotients are rounded to bfloat16 before they are rounded to integers.
    state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
    stored = compressor.compress(state, scheme) | {"weight_scale": scale}
    return {**stored, "value": compressor.decompress(stored, scheme)["weight"]}


def main() -> None:
    """Writes the figures."""
    draw = np.random.default_rng(12)
    weight = draw.standard_normal((128, 256)).astype(np.float32) * np.exp(draw.standard_normal((128, 1)) * 2)
    weight = weight.astype(np.float32)
    weight[3, :32] = 0  # a group of zeros
    ours = torch.tensor(weight)
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    eight = Fp8Quantize(SimpleNamespace(quantization_config=settings))._quantize_one("x.weight", ours)
    result = {
        "weight": weight,
        "fp8": eight["x.weight"].view(torch.uint8).numpy(),
        "fp8_scale": eight["x.weight_scale_inv"].numpy(),
    }
    for name, (count, group) in SIZES.items():
        form = "int-quantized" if name == "channel" else "pack-quantized"
        stored = integers(ours, count, group, form)
        values = stored["weight" if name == "channel" else "weight_packed"]
        result |= {f"{name}_packed": values.numpy(), f"{name}_scale": bits(stored["weight_scale"])}
        result[name] = bits(stored["value"])
    np.savez_compressed(Path(__file__).parent / "quantized.npz", **result)


def check(directory: str, quantized: str) -> None:
    """Prints how many parameters differ."""
    named = json.loads((Path(directory) / "config.json").read_text())["architectures"][0]
    kind = getattr(transformers, named)
    model, about = kind.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    rendered = about["missing_keys"]  # of encoders, which are not written
    plain = {name: value for name, value in model.state_dict().items() if name not in rendered}
    method = AutoConfig.from_pretrained(quantized).quantization_config["quant_method"]
    kinds = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig}
    settings = kinds[method](dequantize=True)
    model = kind.from_pretrained(quantized, dtype=torch.bfloat16, quantization_config=settings)
    ours = model.state_dict()
    differing = [name for name, value in plain.items() if name not in ours or not torch.equal(ours[name], value)]
    print(f"{len(plain)} parameters, {len(differing)} differ: {differing[:3]}")


if __name__ == "__main__":
    check(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else main()
