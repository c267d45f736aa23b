"""The multi-token-prediction layer in converted, loaded, trained and exported weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl.formats import safetensors
from nnxdsl.formats.hf import HubReader
from nnxdsl.generate.pretrained import load
from nnxdsl.weights.convert import convert
from nnxdsl.weights.export import export

FIGURES = Path(__file__).parent.parent / "reference" / "mtp"


def test_it_goes_through_every_format_and_answers_do_without_it(tmp_path: Path) -> None:
    first = FIGURES / "deepseek_v3"
    convert(first, tmp_path / "tree", "linen")
    convert(tmp_path / "tree", tmp_path / "arrays", "checkpoint")
    convert(tmp_path / "arrays", tmp_path / "again", "hub")
    before, after = (safetensors.index(path / "model.safetensors") for path in (first, tmp_path / "again"))
    assert after.keys() == before.keys()
    assert all(np.array_equal(tensor.read(), after[key].read()) for key, tensor in before.items())
    model = load(first)
    assert model.config.mtp_layers == 0
    assert not [path for path in model.leaves if path.startswith("mtp.")]


@pytest.mark.slow
def test_it_is_trained_exported_and_goes_along_with_an_adapter(lab: Any) -> None:
    tiny = "Model.DeepSeekV3('tiny'{})"

    def run(name: str, model: str, *argv: str) -> Path:
        fields = ("evaluation=None", f"name={name}", f"model={tiny.format(model)}", *argv)
        code, _, err = lab.python("sft.py", "run", "--quiet", *fields)
        assert code == 0, err
        (actual,) = (lab.place / "runs").glob(f"{name}-*")
        return actual

    def tensors(directory: Path) -> dict[str, np.ndarray]:
        return {name: tensor.read() for name, tensor in safetensors.index(directory / "model.safetensors").items()}

    first = run("first", ", mtp_layers=1", "steps=6", "objective=Objective.SFT(mtp_loss_weight=0.3)")
    rows = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    losses = [row["mtp_loss"] for row in rows if "mtp_loss" in row]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    export(first, lab.place / "hub")
    trained = tensors(lab.place / "hub")
    assert HubReader(lab.place / "hub").config.mtp_layers == 1
    layer = {name for name in trained if name.startswith("model.layers.4.")}
    assert {f"model.layers.4.{name}.weight" for name in ("eh_proj", "embed_tokens", "shared_head.head")} <= layer
    # What goes on without the layer leaves it behind; an adapter leaves it as it is.
    weights = "weights=Weights.Checkpoint('runs/" + first.name + "')"
    export(run("without", f", {weights}", "steps=1"), lab.place / "without")
    assert tensors(lab.place / "without").keys() == trained.keys() - layer
    adapter = ("steps=2", "adapter=Adapter.LoRA(rank=2)", "quantization=Quantization.Int8(block_size=16)")
    weights = f"weights=Weights.HF('{lab.place / 'hub'}')"
    export(run("adapted", f", mtp_layers=1, {weights}", *adapter), lab.place / "adapted")
    adapted = tensors(lab.place / "adapted")
    assert adapted.keys() == trained.keys()
    assert all(np.array_equal(adapted[name], trained[name]) for name in layer)
    assert any(not np.array_equal(adapted[name], trained[name]) for name in trained.keys() - layer)
