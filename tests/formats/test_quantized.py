"""Weights that are stored in few bits: the numbers that transformers makes of them, bit for bit; damage is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf, safetensors
from nnxdsl.formats.quantized import BlockFloat8, Mxfp4, dequantize
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.deepseek_v3 import DEEPSEEK_V3
from nnxdsl.models.families.gpt_oss import GPT_OSS

FIGURES = np.load(Path(__file__).parent.parent / "reference" / "few_bits.npz")
NAMES = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16"}
NAMES[np.dtype(ml_dtypes.float8_e4m3fn)] = "F8_E4M3"


def write(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, of more dtypes than ours writes."""
    header, offset = {}, 0
    for name, array in arrays.items():
        stop = offset + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def bits(array: np.ndarray) -> np.ndarray:
    assert array.dtype == ml_dtypes.bfloat16
    return np.ascontiguousarray(array).view(np.uint16)


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    eight = FIGURES["eight"].view(ml_dtypes.float8_e4m3fn)
    small = {"a_blocks": FIGURES["blocks"], "a_scales": FIGURES["scales"]}
    write(tmp_path / "x", {**small, "b.weight": eight, "b.weight_scale_inv": FIGURES["factors"]})
    actual = dict(dequantize(safetensors.index(tmp_path / "x")))
    assert actual.keys() == {"a", "b.weight"}
    assert isinstance(actual["a"], Mxfp4)
    assert isinstance(actual["b.weight"], BlockFloat8)
    for name, expected in (("a", FIGURES["mxfp4"]), ("b.weight", FIGURES["float8"])):
        assert actual[name].shape == expected.shape
        np.testing.assert_array_equal(bits(actual[name].read()), expected)


def test_the_last_block_of_a_matrix_may_be_cut(tmp_path: Path) -> None:
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows, which are four blocks and a half."""
    eight = FIGURES["eight"].view(ml_dtypes.float8_e4m3fn)[:192, :]
    write(tmp_path / "x", {"w": eight, "w_scale_inv": FIGURES["factors"]})
    ((_, actual),) = dequantize(safetensors.index(tmp_path / "x"))
    np.testing.assert_array_equal(bits(actual.read()), FIGURES["float8"][:192])


def directory(place: Path, config: DecoderConfig) -> tuple[dict[str, np.ndarray], Path]:
    """A checkpoint of random bfloat16 weights: its tensors, and its only file."""
    template = abstract_decoder(config)
    draw = np.random.default_rng(1)
    leaves = {
        path: draw.standard_normal(leaf.shape).astype(ml_dtypes.bfloat16) for path, leaf in template.variables.items()
    }
    hf.write(place, config, leaves)
    file = place / "model.safetensors"
    return {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}, file


def say(place: Path, **stored: object) -> None:
    """Adds to a directory's config.json how its weights are stored."""
    file = place / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": stored}))


def check(place: Path) -> list[str]:
    reader = hf.HubReader(place)
    template = params.abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    return [str(problem) for problem in reader.check(template)]


def test_a_published_gpt_oss_is_read(tmp_path: Path) -> None:
    tensors, file = directory(tmp_path, GPT_OSS["tiny"])
    draw = np.random.default_rng(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, into, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = draw.integers(0, 256, (experts, out, into // 32, 16), dtype=np.uint8)
        tensors[f"{name}_scales"] = draw.integers(118, 124, (experts, out, into // 32), dtype=np.uint8)
    write(file, tensors)
    say(tmp_path, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    assert check(tmp_path) == []
    reader = hf.HubReader(tmp_path)
    path = "layers.blocks.0.mlp.up.kernel"  # [periods, experts, in, out]: every second column of what is stored
    stored = dict(dequantize(safetensors.index(file)))["model.layers.2.mlp.experts.gate_up_proj"].read()
    np.testing.assert_array_equal(bits(reader.leaf(path)[1]), bits(stored[..., 1::2]))
    assert reader.dtype(path) == ml_dtypes.bfloat16


def test_a_published_deepseek_is_read(tmp_path: Path) -> None:
    tensors, file = directory(tmp_path, DEEPSEEK_V3["tiny"])
    small: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        is_matrix = name.endswith("proj.weight") or "kv_a_proj" in name or "kv_b_proj" in name
        if not is_matrix:
            small[name] = tensor
            continue
        small[name] = tensor.astype(ml_dtypes.float8_e4m3fn)
        blocks = tuple(-(-length // 128) for length in tensor.shape)
        small[f"{name}_scale_inv"] = np.full(blocks, 0.5, np.float32)
    assert any(name.endswith("_scale_inv") for name in small)
    write(file, small)
    say(tmp_path, quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    assert check(tmp_path) == []
    reader, name = hf.HubReader(tmp_path), "model.layers.0.mlp.down_proj.weight"
    halved = small[name].astype(np.float32).T * 0.5
    np.testing.assert_array_equal(reader.leaf("lead.blocks.0.mlp.down.kernel").astype(np.float32), halved)


def test_other_forms_are_refused_by_name(tmp_path: Path) -> None:
    directory(tmp_path, GPT_OSS["tiny"])
    say(tmp_path, quant_method="gptq", bits=4)
    message = "only quant_method 'mxfp4', 'fp8' and 'compressed-tensors' are read, got 'gptq'; convert the weights"
    with pytest.raises(WeightsError, match=message):
        hf.HubReader(tmp_path)


def test_scales_that_do_not_fit_are_told_of(tmp_path: Path) -> None:
    tensors, file = directory(tmp_path, GPT_OSS["tiny"])
    name = "model.layers.0.mlp.experts.down_proj"
    experts, into, out = tensors.pop(name).shape
    tensors[f"{name}_blocks"] = np.zeros((experts, out, into // 32, 16), np.uint8)
    tensors[f"{name}_scales"] = np.zeros((experts, out, into // 32 + 1), np.uint8)
    write(file, tensors)
    actual = "\n".join(check(tmp_path))
    assert f"expected a tensor {name} of shape" in actual
    assert f"{name}_blocks: {file}: no tensor of a text decoder" in actual
