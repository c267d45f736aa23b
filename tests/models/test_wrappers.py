"""Files of several modalities: the text decoder of `text_config`, experts in one tensor, parts that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nnxdsl.config.adapter import LoRA
from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf, peft
from nnxdsl.models.config.parts import GlobalHeads, PerLayerEmbedding
from nnxdsl.models.families import registry
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.mistral import MISTRAL
from nnxdsl.models.families.registry import family_named, from_hf, to_hf

REFERENCE = Path(__file__).parent.parent / "reference" / "families"


def fields_of(name: str) -> dict[str, Any]:
    return json.loads((REFERENCE / name / "config.json").read_text())


def stacked(tensors: dict[str, np.ndarray], experts: int) -> None:
    """Experts as published files of Qwen3.5-MoE have them: gate and up of all in one tensor, down of all in another."""
    for prefix in sorted({name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}):
        each = [
            [tensors.pop(f"{prefix}.{expert}.{matrix}_proj.weight") for matrix in ("gate", "up", "down")]
            for expert in range(experts)
        ]
        tensors[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
        tensors[f"{prefix}.down_proj"] = np.stack([down for *_, down in each])


def test_a_published_file_of_qwen3_5_moe(tmp_path: Path) -> None:
    name = "qwen3_5_moe"
    text = fields_of(name)
    tensors = load_file(REFERENCE / name / "model.safetensors")
    stacked(tensors, text["num_experts"])
    tensors = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = {"model_type": name, "text_config": text, "vision_config": {"depth": 27}, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    plain, wrapped = hf.HubReader(REFERENCE / name), hf.HubReader(tmp_path)
    assert wrapped.config == plain.config
    for path in plain._sources:
        if not path.startswith("mtp."):
            np.testing.assert_array_equal(wrapped.leaf(path), plain.leaf(path))


def test_a_family_without_a_class_of_its_text_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written as a file of several modalities, under the names that tensors have there; adapters likewise."""
    family = family_named("llama")
    assert family is not None
    encoders = {"model_type": "llama_seeing", "vision_config": {"num_hidden_layers": 0}}
    other = attrs.evolve(family, written_in=encoders, wrappers=("llama_seeing",), prefix=hf.PREFIXES[0])
    monkeypatch.setattr(registry, "FAMILIES", [other])
    plain = hf.HubReader(REFERENCE / "llama3")
    arrays = {path: plain.leaf(path) for path in plain._sources}
    hf.write(tmp_path, plain.config, arrays, fields={"eos_token_id": 7})
    fields = json.loads((tmp_path / "config.json").read_text())
    assert {name: fields[name] for name in encoders} == encoders
    assert (fields["text_config"]["model_type"], fields["text_config"]["eos_token_id"]) == ("llama", 7)
    stored = {name.removeprefix("model.language_model.") for name in load_file(tmp_path / "model.safetensors")}
    assert stored == {name.removeprefix("model.") for name in load_file(REFERENCE / "llama3" / "model.safetensors")}
    again = hf.HubReader(tmp_path)
    assert again.config == plain.config
    for path, array in arrays.items():
        np.testing.assert_array_equal(again.leaf(path), array)
    path = "layers.blocks.0.attention.query.kernel"
    entries = {f"{path}_lora_a": np.ones((5, 24, 2), np.float32), f"{path}_lora_b": np.ones((5, 2, 32), np.float32)}
    peft.write(tmp_path, plain.config, entries, adapter=LoRA(rank=2), base=None, model_type="llama")
    prefix = "base_model.model.model.language_model.layers.4.self_attn.q_proj.lora_A.weight"
    assert prefix in load_file(tmp_path / "adapter_model.safetensors")


def test_what_holds_for_the_whole_file() -> None:
    text = fields_of("qwen3_5")
    assert from_hf({"model_type": "qwen3_5", "text_config": text}).head.tied
    assert not from_hf({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}).head.tied
    with pytest.raises(WeightsError, match=r"text_config: a qwen3_5 config\.json holds the text decoder there"):
        from_hf({"model_type": "qwen3_5"})
    with pytest.raises(
        WeightsError, match="quantization_config: only quant_method 'mxfp4', 'fp8' and 'compressed-tensors' are read"
    ):
        from_hf({"model_type": "qwen3_5", "text_config": text, "quantization_config": {"quant_method": "awq"}})


def test_positions_of_several_modalities_are_those_of_text() -> None:
    text = fields_of("qwen3_5")
    rope = {**text["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert from_hf({**text, "rope_parameters": rope}) == from_hf(text)
    with pytest.raises(WeightsError, match="attn_output_gate: only True is implemented, got False"):
        from_hf({**text, "attn_output_gate": False})


def test_published_spellings_of_gemma_4() -> None:
    saved = fields_of("gemma4")
    published = {name: value for name, value in saved.items() if name != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    assert from_hf({"model_type": "gemma4", "text_config": published}) == from_hf(saved)
    # Without attention_k_eq_v there are as many heads of keys as elsewhere.
    heads = from_hf({**published, "attention_k_eq_v": False}).global_heads
    assert heads is not None
    assert (heads.num_kv_heads, heads.values) == (2, "projected")
    assert from_hf({**published, "layer_types": ["sliding_attention"] * 5}).layers.kinds == ("local",) * 4 + ("global",)
    one = {"2": {"head_dim": 16, "num_key_value_heads": 1}}
    for change, message in (
        ({"num_kv_shared_layers": 5}, "layers.num_kv_shared_layers=5: expected less than 5 layers"),
        (
            {"num_kv_shared_layers": 3},
            r"num_kv_shared_layers: no layer before the sharing ones is of the kinds \['global'\]",
        ),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: expected an integer from 0 to"),
        ({"use_double_wide_mlp": 1}, "use_double_wide_mlp: expected true or false, got 1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: only null and 'vision' are implemented"),
        ({"enable_moe_block": True}, "top_k_experts: expected an integer above 0, as enable_moe_block is true"),
        ({"per_layer_config": one}, "per_layer_config: expected one entry for all global layers, got"),
    ):
        with pytest.raises(WeightsError, match=message):
            from_hf({**published, **change})
    # What transformers takes of a file without them.
    assert from_hf(published).per_layer_embedding is None
    del published["hidden_size_per_layer_input"], published["vocab_size_per_layer_input"]
    assert from_hf(published).per_layer_embedding == PerLayerEmbedding(vocab_size=262_144, dim=256)
    assert from_hf({**published, "model_type": "gemma4_unified_text"}).per_layer_embedding is None


def test_layers_of_gemma_4_that_share_keys_and_values() -> None:
    config = from_hf(fields_of("gemma4_e2b"))
    assert (config.layers.num_kv_shared_layers, config.mlp.kv_shared_dim) == (4, 64)
    assert (config.mlp.dim, config.layers.kinds) == (32, ("local", "global") * 4)
    assert (config.layers.own_layers, config.layers.periods, config.layers.suffix) == (4, 2, ())
    assert (config.layers.kv_shared_pattern, config.layers.kv_shared_periods) == (("local", "global"), 2)
    assert [config.layers.path(layer) for layer in (3, 4, 7)] == [
        ("layers.blocks.1", 1),
        ("kv_sharing.blocks.0", 0),
        ("kv_sharing.blocks.1", 1),
    ]
    other = from_hf(fields_of("gemma4_e4b"))
    layers = other.layers
    assert (layers.periods, layers.suffix, layers.kv_shared) == (1, ("local",), ("global", "local", "global"))
    assert (other.layers.kv_shared_pattern, other.layers.kv_shared_periods) == (("global", "local", "global"), 1)
    # A width that the file cannot say is no Gemma 4's.
    wide = config.with_fields({"mlp.kv_shared_dim": 48})
    with pytest.raises(WeightsError, match=r"Gemma 4 has mlp\.kv_shared_dim=64 \(not 48\)"):
        to_hf(wide)


def test_layers_of_transformers_from_the_tenth_on() -> None:
    saved = fields_of("gemma4")
    kinds = ["sliding_attention", "full_attention"] * 6
    entries = {f"{layer:02d}": {"head_dim": 16} for layer in range(1, 12, 2)}
    many = {**saved, "num_hidden_layers": 12, "layer_types": kinds, "attention_k_eq_v": False}
    assert from_hf({**many, "per_layer_config": entries}).global_heads == GlobalHeads(head_dim=16, num_kv_heads=2)


def test_what_leaves_a_tensor_out_is_no_tensor_of_a_decoder() -> None:
    names = (
        *("model.visual.x", "vision_tower.x", "model.vision_adapter.x", "model.vision_projection.x"),
        *("model.audio_tower.x", "model.embed_vision.x", "mm_projector.x"),
    )
    assert all(hf._UNUSED.match(name) for name in names)
    assert not any(hf._UNUSED.match(name) for name in ("model.layers.0.x", "model.embed_tokens.weight", "lm_head.x"))


def test_published_spellings_of_later_families() -> None:
    smol = fields_of("smollm3")
    assert from_hf(smol).layers.kinds == ("global", "nope", "global", "global", "nope")
    every = {**smol, "no_rope_layers": None, "no_rope_layer_interval": 2}
    assert from_hf(every).layers.kinds == ("global", "nope", "global", "nope", "global")
    phi, ministral = fields_of("phi3"), fields_of("ministral3")
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    for fields, change, message in (
        (smol, {"layer_types": ["sliding_attention"] * 5}, "'sliding_attention' needs use_sliding_window=true"),
        (smol, {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 0 or 1 for each of 5 layers"),
        (phi, {"rope_parameters": None, "rope_scaling": rope}, "short_factor: expected 4 numbers, got 1"),
        (ministral, {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta: expected a number above 0"),
    ):
        with pytest.raises(WeightsError, match=message):
            from_hf({**fields, **change})
    # Other families' decoders are written as theirs, although these have them, too.
    assert to_hf(LLAMA3["tiny"])["model_type"] == "llama"
    assert to_hf(MISTRAL["tiny"])["model_type"] == "mistral"


def test_mistral_small_4_without_what_follows_from_other_fields() -> None:
    saved = fields_of("mistral4")
    assert saved["head_dim"] == saved["qk_nope_head_dim"] + saved["qk_rope_head_dim"]
    assert from_hf({"model_type": "mistral3", "text_config": saved}) == from_hf(saved)
    with pytest.raises(WeightsError, match="head_dim: expected 4, which follows from qk_rope_head_dim, got 7"):
        from_hf({**saved, "head_dim": 7})


def test_an_unknown_family_is_refused_with_the_nearest_and_what_differs() -> None:
    fields = json.loads((REFERENCE / "qwen3" / "config.json").read_text())
    with pytest.raises(WeightsError) as caught:
        from_hf({**fields, "model_type": "qwen3_5_x", "mixing": 2})
    assert "got 'qwen3_5_x'. The nearest is 'qwen3_5', but config.json is not a Qwen3.5 that can be read" in str(
        caught.value
    )
    assert "mixing=2: not understood, and it could change the mathematics" in str(caught.value)
    with pytest.raises(WeightsError, match=r"got 'qwen33'\. The nearest is 'qwen3', which has all fields of this file"):
        from_hf({**fields, "model_type": "qwen33"})


def test_a_file_of_olmo_hybrid_under_the_names_of_its_modules(tmp_path: Path) -> None:
    aliases = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    tensors = load_file(REFERENCE / "olmo_hybrid" / "model.safetensors")
    for name in list(tensors):
        part = name.split(".")[-2]
        tensors[name.replace(part, aliases.get(part, part))] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    fields = fields_of("olmo_hybrid")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plain, other = hf.HubReader(REFERENCE / "olmo_hybrid"), hf.HubReader(tmp_path)
    for path in plain._sources:
        np.testing.assert_array_equal(other.leaf(path), plain.leaf(path))
    with pytest.raises(WeightsError, match="rope_theta null"):
        from_hf({**fields, "rope_parameters": {"rope_type": "default", "rope_theta": None}})
