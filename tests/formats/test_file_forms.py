"""Every stored checkpoint in the forms of published files: shards with an index, bfloat16, the older `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.families.registry import from_hf

REFERENCE = Path(__file__).parent.parent / "reference" / "families"
NAMES = sorted(path.name for path in REFERENCE.iterdir())
SHARDS = 3
BFLOAT16 = np.dtype(jnp.bfloat16)
KINDS = {"sliding_attention", "full_attention"}


def fields_of(name: str) -> dict[str, Any]:
    return json.loads((REFERENCE / name / "config.json").read_text())


def write_shards(name: str, directory: Path, dtype: np.dtype) -> None:
    """Deals a checkpoint's tensors to several files, so that those of one array are in all of them."""
    tensors = {key: array.astype(dtype) for key, array in load_file(REFERENCE / name / "model.safetensors").items()}
    files = [f"model-{number:05d}-of-{SHARDS:05d}.safetensors" for number in range(1, SHARDS + 1)]
    file_of = {key: files[number % SHARDS] for number, key in enumerate(tensors)}
    for file in files:
        save_file({key: array for key, array in tensors.items() if file_of[key] == file}, directory / file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(fields_of(name)))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_several_files_are_one(name: str, dtype: np.dtype, tmp_path: Path) -> None:
    write_shards(name, tmp_path, dtype)
    whole, parts = hf.HubReader(REFERENCE / name), hf.HubReader(tmp_path)
    assert parts.config == whole.config
    paths = [path for path in whole._sources if not path.startswith("mtp.")]  # which no stored checkpoint has
    for path in paths:
        actual, wanted = parts.leaf(path), whole.leaf(path).astype(dtype)
        assert (actual.dtype, actual.shape) == (dtype, wanted.shape), path
        assert actual.tobytes() == wanted.tobytes(), path


def older_text(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a text decoder as transformers 4 writes them."""
    fields = dict(fields)
    if "dtype" in fields:
        fields["torch_dtype"] = fields.pop("dtype")
    rope = dict(fields.pop("rope_parameters"))
    if rope.keys() <= KINDS:  # Gemma 3 and OLMo 3: one entry of both kinds of layers
        local, rope = rope["sliding_attention"], dict(rope["full_attention"])
        if "gemma3" in fields["model_type"]:
            fields["rope_local_base_freq"] = local["rope_theta"]
    fields["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return fields


def older(name: str) -> dict[str, Any]:
    """The `config.json` of a stored checkpoint as transformers 4 writes it."""
    fields = fields_of(name)
    if "text_config" not in fields:
        return older_text(fields)
    dtype = fields.pop("dtype", "float32")
    return {**fields, "torch_dtype": dtype, "text_config": older_text(fields["text_config"])}


# Not Gemma 4: transformers 4 never knew it, and positions of its two kinds of layers have no other names.
# Nemotron-H has no positions.
WITH_OLDER = [name for name in NAMES if not name.startswith(("gemma4", "nemotron_h"))]


@pytest.mark.parametrize("name", WITH_OLDER)
def test_both_spellings_are_one_decoder(name: str) -> None:
    fields = older(name)
    text = fields.get("text_config", fields)
    assert not {"rope_parameters", "dtype"} & (fields.keys() | text.keys())
    config = from_hf(fields_of(name))
    assert from_hf(fields) == config
    # What is said there counts.
    assert from_hf({**text, "rope_theta": 2 * text["rope_theta"], "layer_rope_theta": None}) != config


# Not OLMo 3: transformers 5.23 gives an older rope_theta to its global layers alone, and 500,000 to the others. That is
# the theta of published files, but not of this one.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_OLDER if name != "olmo3"])
def test_transformers_reads_the_older_spelling_alike(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    both = []
    for fields in (fields_of(name), older(name)):
        kind = type(transformers.AutoConfig.for_model(fields["model_type"]))
        config = kind.from_dict(json.loads(json.dumps(fields))).get_text_config()
        kept = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # beside what it makes of them
        both.append({key: value for key, value in config.to_dict().items() if key not in kept})
    assert both[0] == both[1]


def test_parts_that_transformers_cuts_evenly(tmp_path: Path) -> None:
    """OLMo Hybrid's convolutions: transformers joins those of queries, keys and values, and writes thirds of that."""
    config = hf.read_config(REFERENCE / "olmo_hybrid")
    assert isinstance(config.linear_attention, GatedDeltaNetConfig)
    wide = attrs.evolve(config, linear_attention=attrs.evolve(config.linear_attention, value_head_dim=20))
    template = abstract_decoder(wide)
    draw = np.random.default_rng(0)
    leaves = {path: draw.normal(size=leaf.shape).astype(np.float32) for path, leaf in template.variables.items()}
    hf.write(tmp_path, wide, leaves, like="olmo_hybrid")
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.0.linear_attn.{name}_conv1d.weight" for name in "qkv"]
    joined = np.concatenate([tensors[name] for name in names])
    assert [len(tensors[name]) for name in names] == [16, 16, 40]
    save_file(tensors | dict(zip(names, np.split(joined, 3), strict=True)), tmp_path / "model.safetensors")
    reader = hf.HubReader(tmp_path)
    assert reader.check(template) == []
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(reader.leaf(path), leaf, err_msg=path)
    save_file(tensors | {names[0]: tensors[names[0]][:8]}, tmp_path / "model.safetensors")  # no parts of the same rows
    assert "q_conv1d.weight: expected shape (16, 1, 4), got (8, 1, 4)" in str(hf.HubReader(tmp_path).check(template)[0])
