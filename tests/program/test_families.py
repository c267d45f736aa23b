"""Networks of the families as the spec names them: placed on meshes, read from a directory, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nnxdsl import Adapter, Experiment, Mesh, Model, PlanError, Quantization, Weights
from nnxdsl.planning.flops import weights
from nnxdsl.program.blueprint import build_blueprint

REFERENCE = Path(__file__).parent.parent / "reference" / "families"
DENSE = ("qwen3_moe_dense_list", "qwen3_moe_dense_step")
"""Dense layers among those with experts."""
LARGE = [Model.Gemma2("27b"), Model.Mixtral("8x7b"), Model.Olmo3("32b"), Model.Qwen2("72b")]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("model", LARGE, ids=lambda model: type(model).__name__)
def test_large_ones_fit_a_mesh(model: Model, experiment: Callable[..., Experiment]) -> None:
    lora, small = Adapter.LoRA(rank=8), Quantization.NF4(block_size=32)
    blueprint = build_blueprint(
        experiment(model=model, adapter=lora, quantization=small, mesh=Mesh(fsdp=4, tensor=2), batch_size=8)
    )
    arrays = list(blueprint.layout)
    # Scales of blocks are cut over `tensor` alone.
    assert sum(array.device_bytes for array in arrays) < sum(array.bytes for array in arrays) / 5


def test_one_token_meets_its_own_experts_alone(experiment: Callable[..., Experiment]) -> None:
    """Of Mixtral 8x7B 13 billion parameters are active (arXiv:2401.04088), with the embedding and the head."""
    blueprint = build_blueprint(experiment(model=Model.Mixtral("8x7b"), adapter=Adapter.LoRA(rank=8)))
    of = weights(blueprint)
    assert of.trunk + 2 * of.head == pytest.approx(12.9e9, rel=0.005)
    assert blueprint.parameters["total"] == pytest.approx(46.7e9, rel=0.001)


def test_whatever_a_directory_says(experiment: Callable[..., Experiment]) -> None:
    path = str(REFERENCE / "olmo3")
    blueprint = build_blueprint(experiment(model=Model.HF(path, weights=Weights.HF(path))))
    assert blueprint.config.norm.placement == "post"
    with pytest.raises(PlanError) as caught:
        build_blueprint(experiment(model=Model.HF("nowhere", weights=Weights.Random())))
    assert "model.path: nowhere: no such directory" in str(caught.value)


def test_a_directory_of_another_family(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(PlanError) as caught:
        build_blueprint(experiment(model=Model.Qwen3("tiny", weights=Weights.HF(str(REFERENCE / "qwen2")))))
    assert "model: has attention.query_key_norm=head, but" in str(caught.value)
    assert "model: has attention.bias=none, but" in str(caught.value)


@pytest.mark.parametrize("name", DENSE)
def test_parameters_of_the_plan_are_those_of_transformers(name: str, experiment: Callable[..., Experiment]) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    path = str(REFERENCE / name)
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    blueprint = build_blueprint(experiment(model=Model.HF(path, weights=Weights.HF(path))))
    assert blueprint.parameters["total"] == sum(parameter.numel() for parameter in peer.parameters())
    # Of a layer with experts one token meets three of six; of a dense one the whole MLP.
    config = blueprint.config
    assert config.moe is not None
    attention = 2 * config.embed_dim * config.head_dim * (config.num_heads + config.num_kv_heads)
    widths = [config.mlp.dim if dense else 3 * config.moe.mlp_dim for dense in config.dense]
    assert weights(blueprint).trunk == sum(attention + 3 * config.embed_dim * width for width in widths)


def test_a_pipeline_is_cut_between_periods(experiment: Callable[..., Experiment]) -> None:
    listed, stepped = (Model.HF(path, weights=Weights.HF(path)) for path in (str(REFERENCE / name) for name in DENSE))
    assert build_blueprint(experiment(model=stepped, mesh=Mesh(stage=2))).layout.stages == 2
    with pytest.raises(
        PlanError, match=r"layers\.blocks\.\*\.mlp\.up\.kernel: axis 0 has 1 rows, not divisible by stage=2"
    ):
        build_blueprint(experiment(model=listed, mesh=Mesh(stage=2)))
