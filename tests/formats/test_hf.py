"""Hub directories: written and read again, in several layouts, and what is said of damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf, safetensors

REFERENCE = Path(__file__).parent.parent / "reference" / "gemma3"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A copy of the reference in one file, to be damaged."""
    return Path(shutil.copytree(REFERENCE / "plain", tmp_path / "plain"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of the reference in several files, to be damaged."""
    return Path(shutil.copytree(REFERENCE / "scaled", tmp_path / "scaled"))


def edit(file: Path, change) -> None:
    """Rewrites a safetensors file with its arrays, by name, changed in place by `change`."""
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}
    change(arrays)
    safetensors.write(file, {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__)


def problems(directory: Path) -> list[str]:
    reader = hf.HubReader(directory)
    return [str(problem) for problem in reader.check(abstract_decoder(reader.config))]


@pytest.mark.parametrize("name", ["plain", "scaled"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_written_and_read_again_bit_for_bit(name: str, dtype: type, tmp_path: Path) -> None:
    reader = hf.HubReader(REFERENCE / name)
    template = abstract_decoder(reader.config)
    leaves = {path: jnp.asarray(reader.leaf(path).astype(dtype)) for path in template.variables}
    hf.write(tmp_path / "new" / "copy", reader.config, leaves)
    again = hf.HubReader(tmp_path / "new" / "copy")
    assert again.config == reader.config
    assert again.check(template) == []
    for path, leaf in leaves.items():
        assert again.leaf(path).dtype == dtype
        assert np.array_equal(again.leaf(path), leaf)
    if dtype is np.float32:  # the very tensors that transformers wrote
        mine = safetensors.index(tmp_path / "new" / "copy" / "model.safetensors")
        theirs = {
            k: t for f in sorted((REFERENCE / name).glob("*.safetensors")) for k, t in safetensors.index(f).items()
        }
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key].read(), tensor.read()) for key, tensor in theirs.items())


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_multimodal_layouts(prefix: str, plain: Path) -> None:
    def rename(arrays: dict[str, np.ndarray]) -> None:
        for name in list(arrays):
            arrays[prefix + name.removeprefix("model.")] = arrays.pop(name)
        vision = "vision_tower.x" if prefix.startswith("language") else "model.vision_tower.x"
        arrays[vision] = np.zeros((2, 2), np.float32)

    wanted = hf.HubReader(plain).leaf("layers.blocks.2.mlp.up.kernel").copy()
    edit(plain / "model.safetensors", rename)
    text = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert problems(plain) == []
    assert np.array_equal(hf.HubReader(plain).leaf("layers.blocks.2.mlp.up.kernel"), wanted)


def test_a_stored_head_must_be_the_embedding(plain: Path) -> None:
    file = plain / "model.safetensors"
    edit(file, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"]}))
    assert problems(plain) == []
    edit(file, lambda arrays: arrays.update({"lm_head.weight": arrays["lm_head.weight"] + 1}))
    assert problems(plain) == [
        f"lm_head.weight: {file}: differs from model.embed_tokens.weight, but config.json says that the two are tied"
    ]


def test_everything_wrong_is_said_at_once(plain: Path) -> None:
    file = plain / "model.safetensors"

    def damage(arrays: dict[str, np.ndarray]) -> None:
        del arrays["model.layers.7.mlp.up_proj.weight"]
        arrays["model.layers.2.self_attn.q_proj.weight"] = np.zeros((32, 25), np.float32)
        arrays["model.layers.8.mlp.up_proj.weight"] = np.zeros((1,), np.float32)
        arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros((1,), np.float32)

    edit(file, damage)
    assert problems(plain) == [
        f"layers.blocks.2.attention.query.kernel: {file}: model.layers.2.self_attn.q_proj.weight: expected shape "
        "(32, 24), got (32, 25)",
        f"tail.blocks.1.mlp.up.kernel: {file}: expected a tensor model.layers.7.mlp.up_proj.weight of shape (32, 24), "
        "there is none",
        f"model.layers.8.mlp.up_proj.weight: {file}: no tensor of a text decoder of 8 layers",
        f"model.layers.0.self_attn.q_proj.bias: {file}: no tensor of a text decoder of 8 layers",
    ]
    with pytest.raises(WeightsError) as caught:
        hf.HubReader(plain).leaf("tail.blocks.1.mlp.up.kernel")
    assert str(caught.value) == (
        f"tail.blocks.1.mlp.up.kernel: {file}: expected a tensor model.layers.7.mlp.up_proj.weight, there is none"
    )


def test_a_tensor_missing_from_its_shard_names_the_shard(sharded: Path) -> None:
    name = "model.layers.4.mlp.gate_proj.weight"
    shard = sharded / json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"][name]
    edit(shard, lambda arrays: arrays.pop(name))
    assert problems(sharded) == [
        f"layers.blocks.1.mlp.gate.kernel: {shard}: expected a tensor {name} of shape (32, 24), there is none"
    ]


def test_another_decoder_than_the_template(plain: Path) -> None:
    reader = hf.HubReader(plain)
    other = abstract_decoder(hf.read_config(REFERENCE / "scaled"))
    assert f"layers.blocks.0.mlp.up.kernel: {plain / 'config.json'}: 1 layer groups, expected 2" in [
        str(problem) for problem in reader.check(other)
    ]


def test_dtype_that_is_not_understood(plain: Path) -> None:
    file = plain / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "I32"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    message = f"norm.scale: {file}: model.norm.weight: expected dtype F64, F32, F16 or BF16, got I32"
    assert problems(plain) == [message]
    with pytest.raises(WeightsError) as caught:
        hf.HubReader(plain).leaf("norm.scale")
    assert str(caught.value) == message


def test_damaged_files(plain: Path) -> None:
    file = plain / "model.safetensors"
    raw = file.read_bytes()
    last = max(safetensors.index(file).items(), key=lambda item: item[1].stop)[0]

    def message() -> str:
        with pytest.raises(WeightsError) as caught:
            hf.HubReader(plain)
        return str(caught.value)

    file.write_bytes(raw[:-100])
    assert message() == (
        f"{file}: damaged: {last} should end at byte {len(raw)}, the file has {len(raw) - 100} bytes; "
        "download the file again"
    )
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[:500])
    assert message() == f"{file}: damaged: the header should take {length} bytes, the file has 500"
    file.write_bytes(raw[:3])
    assert message() == f"{file}: damaged: the file has 3 bytes, too few for a safetensors file"
    file.write_bytes(raw[:8] + b"x" * (len(raw) - 8))
    said = "its header is not that of a safetensors file: invalid JSON in header: expected value at line 1 column 1"
    assert message() == f"{file}: damaged: {said}"
    file.unlink()
    said = f"{plain}: expected model.safetensors or model.safetensors.index.json, there is neither; "
    assert message() == said + "to train a model from scratch, set weights=Weights.Random()"


def test_damaged_index_and_config(sharded: Path) -> None:
    def message() -> str:
        with pytest.raises(WeightsError) as caught:
            hf.HubReader(sharded)
        return str(caught.value)

    listing, config = sharded / "model.safetensors.index.json", sharded / "config.json"
    (sharded / "model-00002-of-00004.safetensors").unlink()
    assert message() == f"{sharded / 'model-00002-of-00004.safetensors'}: cannot be read: No such file or directory"
    listing.write_text("{}")
    assert message() == f"{listing}: expected a 'weight_map' of tensor names to file names"
    listing.write_text("[]")
    assert message() == f"{listing}: expected a JSON object, got list"
    config.write_text(json.dumps({"model_type": "bert"}))
    assert message().startswith(f"{config}: model_type: expected one of 'deepseek_v2', 'deepseek_v3', ")
    config.write_text("{")
    assert message().startswith(f"{config}: damaged: not JSON: ")
    config.unlink()
    assert message() == f"{config}: cannot be read: No such file or directory"


def test_only_plain_leaves_can_be_written(tmp_path: Path) -> None:
    reader = hf.HubReader(REFERENCE / "plain")
    leaves = {path: reader.leaf(path) for path in abstract_decoder(reader.config).variables}
    leaves["tail.blocks.0.mlp.up.kernel_lora_a"] = leaves.pop("norm.scale")
    with pytest.raises(WeightsError) as caught:
        hf.write(tmp_path / "out", reader.config, leaves)
    assert str(caught.value) == "\n  ".join(
        [
            f"{tmp_path / 'out'}: cannot be written:",
            "norm.scale: missing",
            "tail.blocks.0.mlp.up.kernel_lora_a: no array of the base model",
        ]
    )
    assert not (tmp_path / "out").exists()
