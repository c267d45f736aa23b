"""Every source of weights refuses NaN and infinity, unless `allow_non_finite` is set."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, Weights, evolve
from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf, safetensors
from nnxdsl.program.compile import compile as compile_experiment
from nnxdsl.weights import sources
from nnxdsl.weights.convert import convert

REFERENCE = Path(__file__).parent.parent / "reference"
BASE = REFERENCE / "llama3" / "untied"
LORA = Adapter.LoRA(rank=4, alpha=3.0, targets=("attention.query", "attention.value", "mlp.down"))


def with_nan(source: Path, directory: Path, file: str) -> Path:
    """A copy whose last tensor begins with NaN."""
    shutil.copytree(source, directory)
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(directory / file).items()}
    list(arrays.values())[-1].reshape(-1)[0] = np.nan
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    safetensors.write(directory / file, shapes, arrays.__getitem__)
    return directory


def experiment(weights: Weights, **changes: Any) -> Experiment:
    return Experiment(
        name="finite",
        model=Model.HF(str(BASE), weights=weights),
        objective=Objective.DPO(),
        data=Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
        batch_size=2,
        steps=1,
        **changes,
    )


def hub_weights(place: Path, allow: bool) -> Experiment:
    bad = with_nan(BASE, place / "hub", "model.safetensors")
    return experiment(Weights.HF(str(bad), allow_non_finite=allow))


def weights_alone(place: Path, allow: bool) -> Experiment:
    convert(with_nan(BASE, place / "hub", "model.safetensors"), place / "alone", "checkpoint")
    return experiment(Weights.Checkpoint(str(place / "alone"), allow_non_finite=allow))


def peft_adapter(place: Path, allow: bool) -> Experiment:
    bad = with_nan(REFERENCE / "peft" / "llama3", place / "peft", "adapter_model.safetensors")
    lora = evolve(LORA, {"start": Weights.PEFT(str(bad), allow_non_finite=allow)})
    return experiment(Weights.HF(str(BASE)), adapter=lora)


def merged_adapter(place: Path, allow: bool) -> Experiment:
    bad = with_nan(REFERENCE / "peft" / "llama3", place / "peft", "adapter_model.safetensors")
    adapters = (Weights.PEFT(str(bad), allow_non_finite=allow),)
    return experiment(Weights.Merged(Weights.HF(str(BASE)), adapters=adapters, coefficients=(1.0,)))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("make", [hub_weights, weights_alone, peft_adapter, merged_adapter])
def test_refused_unless_asked(make: Callable[[Path, bool], Experiment], tmp_path: Path) -> None:
    refused = compile_experiment(make(tmp_path / "refused", False))
    with pytest.raises(WeightsError, match=r": 1 of [\d,]+ values are NaN or infinite") as caught:
        refused.init(sources.open_source(refused.blueprint, tmp_path))
    assert "set allow_non_finite=True" in str(caught.value)
    allowed = compile_experiment(make(tmp_path / "allowed", True))
    state = allowed.init(sources.open_source(allowed.blueprint, tmp_path))
    leaves = {**state.trainable, **state.frozen, **state.reference}
    assert any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in leaves.values())


def test_tools_that_look_at_weights_read_them_as_they_are(tmp_path: Path) -> None:
    bad = with_nan(BASE, tmp_path / "hub", "model.safetensors")
    convert(bad, tmp_path / "again", "hub")
    with pytest.raises(WeightsError, match="NaN or infinite"):
        [hf.HubReader(tmp_path / "again").leaf(path) for path in ("norm.scale", "lm_head.kernel")]
