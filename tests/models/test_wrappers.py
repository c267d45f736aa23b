"""Files of several modalities: the text decoder of `text_config`, experts in one tensor, parts that are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf
from nnxdsl.models.families.registry import from_hf

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


def test_what_holds_for_the_whole_file() -> None:
    text = fields_of("qwen3_5")
    assert from_hf({"model_type": "qwen3_5", "text_config": text}).tied_head
    assert not from_hf({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}).tied_head
    with pytest.raises(WeightsError, match=r"text_config: a qwen3_5 config\.json holds the text decoder there"):
        from_hf({"model_type": "qwen3_5"})
    with pytest.raises(WeightsError, match="quantization_config: only quant_method 'mxfp4' and 'fp8' are read"):
        from_hf({"model_type": "qwen3_5", "text_config": text, "quantization_config": {"quant_method": "awq"}})


def test_positions_of_several_modalities_are_those_of_text() -> None:
    text = fields_of("qwen3_5")
    rope = {**text["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert from_hf({**text, "rope_parameters": rope}) == from_hf(text)
    with pytest.raises(WeightsError, match="attn_output_gate: only True is implemented, got False"):
        from_hf({**text, "attn_output_gate": False})
