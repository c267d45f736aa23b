"""Networks of the families as the spec names them: placed on meshes, read from a directory, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nnxdsl import Adapter, Experiment, Mesh, Model, PlanError, Quantization, Weights
from nnxdsl.program.blueprint import draw
from nnxdsl.program.floor import weights

REFERENCE = Path(__file__).parent.parent / "reference" / "families"
LARGE = [Model.Gemma2("27b"), Model.Mixtral("8x7b"), Model.Olmo3("32b"), Model.Qwen2("72b")]


@pytest.mark.parametrize("model", LARGE, ids=lambda model: type(model).__name__)
def test_large_ones_fit_a_mesh(model: Model, experiment: Callable[..., Experiment]) -> None:
    lora, few = Adapter.LoRA(rank=8), Quantization.NF4(block_size=32)
    blueprint = draw(experiment(model=model, adapter=lora, quantization=few, mesh=Mesh(fsdp=4, tensor=2), batch_size=8))
    arrays = list(blueprint.layout)
    # Scales of blocks are cut over `tensor` alone.
    assert sum(array.device_bytes for array in arrays) < sum(array.bytes for array in arrays) / 5


def test_one_token_meets_its_own_experts_alone(experiment: Callable[..., Experiment]) -> None:
    """Of Mixtral 8x7B 13 billion parameters are active (arXiv:2401.04088), with the embedding and the head."""
    blueprint = draw(experiment(model=Model.Mixtral("8x7b"), adapter=Adapter.LoRA(rank=8)))
    of = weights(blueprint)
    assert of.trunk + 2 * of.head == pytest.approx(12.9e9, rel=0.005)
    assert blueprint.parameters["total"] == pytest.approx(46.7e9, rel=0.001)


def test_whatever_a_directory_says(experiment: Callable[..., Experiment]) -> None:
    path = str(REFERENCE / "olmo3")
    blueprint = draw(experiment(model=Model.HF(path, weights=Weights.HF(path))))
    assert blueprint.config.norms == "post"
    with pytest.raises(PlanError) as caught:
        draw(experiment(model=Model.HF("nowhere", weights=Weights.Random())))
    assert "model.path: nowhere: no such directory" in str(caught.value)


def test_a_directory_of_another_family(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(PlanError) as caught:
        draw(experiment(model=Model.Qwen3("tiny", weights=Weights.HF(str(REFERENCE / "qwen2")))))
    assert "model: it has query_key_norm=head, but" in str(caught.value)
    assert "model: it has attention_bias=none, but" in str(caught.value)
