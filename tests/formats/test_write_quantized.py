"""Weights written quantized: bits as transformers and compressed-tensors make them, errors within bounds, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nnxdsl import RunError, WeightsError, cli
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf, quantize, safetensors
from nnxdsl.formats.quantized import dequantize
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.deepseek_v3 import DEEPSEEK_V3
from nnxdsl.models.families.gpt_oss import GPT_OSS
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.llama4 import LLAMA4
from nnxdsl.weights.convert import convert

REFERENCE = Path(__file__).parent.parent / "reference"
FIGURES = np.load(REFERENCE / "quantized.npz")
WEIGHT = FIGURES["weight"]
FORMATS = {
    "fp8": quantize.BlockFloat8Format(),
    "int4": quantize.PackedIntFormat(4, 32),
    "int8": quantize.PackedIntFormat(8, 128),
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def bits(array: np.ndarray) -> np.ndarray:
    assert array.dtype == BFLOAT16
    return np.ascontiguousarray(array).view(np.uint16)


def read(place: Path, parts: dict[str, np.ndarray]) -> np.ndarray:
    """What our reader makes of the parts of one weight."""
    file = place / "x.safetensors"
    safetensors.write(file, {name: (part.shape, part.dtype) for name, part in parts.items()}, parts.__getitem__)
    ((name, tensor),) = dequantize(safetensors.index(file))
    assert name == "x.weight"
    return tensor.read()


def test_eight_bit_floats_are_those_of_transformers() -> None:
    parts = FORMATS["fp8"].encode("x.weight", WEIGHT)
    np.testing.assert_array_equal(parts["x.weight"].view(np.uint8), FIGURES["fp8"])
    # To the last bit but one: torch divides a number by a tensor as a product with the reciprocal.
    np.testing.assert_allclose(parts["x.weight_scale_inv"], FIGURES["fp8_scale"], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_integers_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    parts = FORMATS[name].encode("x.weight", WEIGHT)
    empty = (WEIGHT.reshape(*parts["x.weight_scale"].shape, -1) == 0).all(-1)  # any scale will do there
    assert empty.any() == (name == "int4")
    same = bits(parts["x.weight_scale"]) == FIGURES[f"{name}_scale"]
    assert (same | empty).all()
    np.testing.assert_array_equal(parts["x.weight_packed"], FIGURES[f"{name}_packed"])
    assert tuple(parts["x.weight_shape"]) == WEIGHT.shape
    np.testing.assert_array_equal(bits(read(tmp_path, parts)), FIGURES[name])


def test_integers_that_are_not_packed_are_read(tmp_path: Path) -> None:
    scale = FIGURES["channel_scale"].view(BFLOAT16)
    actual = read(tmp_path, {"x.weight": FIGURES["channel_packed"], "x.weight_scale": scale})
    np.testing.assert_array_equal(bits(actual), FIGURES["channel"])


def test_published_mxfp4_is_written_as_the_same_values(tmp_path: Path) -> None:
    """Random blocks and scales, and what transformers makes of them: all of it can be stored without an error."""
    figures = np.load(REFERENCE / "few_bits.npz")
    values = figures["mxfp4"].view(BFLOAT16)
    parts = quantize.Mxfp4Format().encode("x.weight", values)
    np.testing.assert_array_equal(read(tmp_path, parts).astype(np.float32), values.astype(np.float32))


def blocks_of(name: str, weight: np.ndarray) -> np.ndarray:
    """The largest magnitude in the block of each element."""
    if name == "fp8":
        whole = (
            np.abs(weight).reshape(-1, min(128, len(weight)), weight.shape[1] // 128, 128).max((1, 3), keepdims=True)
        )
        return np.broadcast_to(whole, (whole.shape[0], 128, whole.shape[2], 128)).reshape(weight.shape)
    size = {"int4": 32, "int8": 128, "mxfp4": 32}[name]
    whole = np.abs(weight).reshape(len(weight), -1, size).max(-1)
    return np.repeat(whole, size, axis=1)


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_errors_are_within_the_bounds_of_the_format(name: str, tmp_path: Path) -> None:
    """Of every element, as a fraction of the largest one in its block; and the bound is not a loose one."""
    draw = np.random.default_rng(3)
    weight = (draw.standard_normal((128, 256)) * np.exp(draw.standard_normal((128, 1)))).astype(np.float32)
    if name == "mxfp4":
        form: quantize.WeightFormat = quantize.Mxfp4Format()
        actual = read(tmp_path, form.encode("x.weight", weight.T[None]))[0].T
    else:
        form = FORMATS[name]
        actual = read(tmp_path, form.encode("x.weight", weight))
    error = np.abs(actual.astype(np.float32) - weight) / blocks_of(name, weight)
    bound = form.largest_error() + 2.0**-8  # read in bfloat16
    assert bound / 2 < error.max() <= bound
    assert bound == quantize.largest_error(name)
    if name == "fp8":  # floats: the relative error of each element that is no subnormal is bounded
        normal = np.abs(weight) >= blocks_of(name, weight) * 2.0**-6 / 448
        assert (np.abs(actual.astype(np.float32) - weight)[normal] <= np.abs(weight)[normal] * bound).all()


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e30])
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_zeros_and_extreme_magnitudes(name: str, scale: float, tmp_path: Path) -> None:
    weight = np.random.default_rng(4).uniform(0.5, 1, (128, 128)).astype(np.float32) * np.float32(scale)
    form = quantize.Mxfp4Format() if name == "mxfp4" else FORMATS[name]
    actual = read(tmp_path, form.encode("x.weight", weight[None] if name == "mxfp4" else weight)).astype(np.float32)
    assert np.abs(actual - weight).max() <= max(quantize.largest_error(name) * scale, 1e-38)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_what_is_not_finite_is_refused(form: quantize.WeightFormat, value: float) -> None:
    weight = WEIGHT.copy()
    weight[100, 200] = value
    with pytest.raises(WeightsError, match=r"x\.weight: holds NaN or infinity"):
        form.encode("x.weight", weight)


def directory(place: Path, config: DecoderConfig) -> dict[str, np.ndarray]:
    """A checkpoint of random float32 weights, and its tensors."""
    template = abstract_decoder(config)
    draw = np.random.default_rng(1)
    leaves = {
        path: draw.standard_normal(leaf.shape).astype(np.float32) for path, leaf in sorted(template.variables.items())
    }
    hf.write(place, config, leaves)
    return {name: np.array(tensor.read()) for name, tensor in safetensors.index(place / hf.SINGLE).items()}


def problems(place: Path) -> list[str]:
    reader = hf.HubReader(place)
    template = params.abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    return [str(problem) for problem in reader.check(template)]


CASES = [("fp8", LLAMA3), ("int4", LLAMA3), ("int8", DEEPSEEK_V3), ("mxfp4", GPT_OSS)]


@pytest.mark.parametrize(("method", "sizes"), CASES, ids=[method for method, _ in CASES])
def test_a_checkpoint(method: str, sizes: dict[str, DecoderConfig], tmp_path: Path) -> None:
    """Linear layers alone are quantized, from float32; the rest is rounded to bfloat16, and is named."""
    before = directory(tmp_path / "a", sizes["tiny"])
    done = convert(tmp_path / "a", tmp_path / "b", "hub", quantization=method, max_shard_bytes=200_000)
    files = hf.files_of(tmp_path / "b")
    assert len(files) > 2
    assert done.size == sum(file.stat().st_size for file in files)
    assert problems(tmp_path / "b") == []
    stored = {name: tensor for file in files for name, tensor in safetensors.index(file).items()}
    after = dict(dequantize(stored))
    assert after.keys() == before.keys()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    actual = config["quantization_config"]
    kept = set(actual["ignore" if method.startswith("int") else "modules_to_not_convert"])
    for name, values in before.items():
        is_kept = name in stored and stored[name].dtype == "BF16"
        if is_kept:
            np.testing.assert_array_equal(bits(after[name].read()), bits(values.astype(BFLOAT16)))
        else:
            error = np.abs(after[name].read().astype(np.float32) - values).max()
            assert 0 < error <= quantize.largest_error(method) * np.abs(values).max()
        is_matrix = values.ndim == 2 and name.endswith(".weight")
        assert (name.removesuffix(".weight") in kept) == (is_kept and is_matrix)
        is_linear = name.endswith("_proj.weight") or "kv_a_proj" in name
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        assert is_kept != (is_expert if method == "mxfp4" else is_linear)
    assert "lm_head" in kept


def test_modules_that_blocks_do_not_divide_stay_whole(tmp_path: Path) -> None:
    """A projection of 192 inputs: no projection of the attention is quantized; experts are."""
    directory(tmp_path / "a", DEEPSEEK_V3["tiny"])
    done = convert(tmp_path / "a", tmp_path / "b", "hub", quantization="fp8")
    (note,) = done.notes
    assert note == (
        "20 of 104 linear layers are not quantized, such as those of model.layers.0.self_attn: 192 is not divisible "
        "by blocks of 128"
    )
    stored = safetensors.index(tmp_path / "b" / hf.SINGLE)
    assert {stored[name].dtype for name in stored if ".self_attn." in name} == {"BF16"}
    assert {stored[name].dtype for name in stored if name.endswith("proj.weight") and ".mlp." in name} == {"F8_E4M3"}
    assert problems(tmp_path / "b") == []


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for name, sizes in (("llama3", LLAMA3), ("llama4", LLAMA4), ("gpt_oss", GPT_OSS)):
        directory(tmp_path / name, sizes["tiny"])

    def refused(name: str, method: str) -> str:
        with pytest.raises(WeightsError) as caught:
            convert(tmp_path / name, tmp_path / "out", "hub", quantization=method)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert refused("llama3", "mxfp4") == "quantization: mxfp4 is the format of the experts of gpt_oss, not of llama"
    assert refused("gpt_oss", "int4").endswith("which int4 cannot; use mxfp4")
    assert refused("llama4", "fp8") == (
        "quantization: llama4_text stores the experts of a layer in one tensor "
        "(model.layers.0.feed_forward.experts.gate_up_proj), which fp8 cannot; write it in bfloat16"
    )
    small = REFERENCE / "families" / "qwen3_moe"
    with pytest.raises(WeightsError, match=r"int4 cannot store .* inputs are not divisible by groups of 32"):
        convert(small, tmp_path / "out", "hub", quantization="int4")
    for settings, message in (
        ({"to": "linen", "quantization": "fp8"}, "quantization has no effect to 'linen'"),
        ({"to": "hub", "quantization": "nf4"}, "quantization: expected one of fp8, mxfp4, int8, int4, got 'nf4'"),
        (
            {"to": "hub", "quantization": "fp8", "dtype": "float32"},
            "dtype: what is not quantized is bfloat16, got 'float32'",
        ),
    ):
        with pytest.raises(RunError, match=message):
            convert(tmp_path / "llama3", tmp_path / "out", **settings)


def test_the_command_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantized checkpoint is converted to bfloat16 as it is read; another format is made of it."""
    directory(tmp_path / "a", LLAMA3["tiny"])
    argv = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hub", "--quantization", "int4"]
    assert cli.main(argv) == 0
    assert "hub, from hub" in capsys.readouterr().out
    convert(tmp_path / "b", tmp_path / "plain", "hub")
    quantized, plain = hf.HubReader(tmp_path / "b"), hf.HubReader(tmp_path / "plain")
    path = "layers.blocks.0.mlp.up.kernel"
    np.testing.assert_array_equal(bits(quantized.leaf(path)), bits(plain.leaf(path)))
    assert "quantization_config" not in hf.read_fields(tmp_path / "plain")


SCHEME = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"symmetric": False}, "'symmetric': False"),
        ({"num_bits": 3}, "'num_bits': 3"),
        ({"type": "float"}, "'type': 'float'"),
        ({"actorder": "group"}, "'actorder': 'group'"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused(change: dict[str, object], word: str, tmp_path: Path) -> None:
    directory(tmp_path, LLAMA3["tiny"])
    file = tmp_path / "config.json"
    stored = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME | change}},
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": stored}))
    with pytest.raises(WeightsError, match="quantization_config: group_0: only symmetric integers") as caught:
        hf.HubReader(tmp_path)
    assert word in str(caught.value)
