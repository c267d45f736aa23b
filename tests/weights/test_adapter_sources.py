"""Adapters that continue another one, whose reference is the earlier adapter; checkpoints of weights only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import pytest

from nnxdsl import (
    Adapter,
    Checkpoint,
    Data,
    Experiment,
    Memory,
    Model,
    Objective,
    Optimizer,
    Order,
    PlanError,
    Precision,
    RunError,
    Schedule,
    SpecError,
    Tokenizer,
    Weights,
    compile,
    evolve,
)
from nnxdsl.data.batch import PairBatch
from nnxdsl.errors import WeightsError
from nnxdsl.formats import safetensors
from nnxdsl.formats.hf import HubReader
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.runs.saved_experiment import saved_experiment
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights import sources
from nnxdsl.weights.convert import convert

REFERENCE = Path(__file__).parents[1] / "reference"
REPLAY = REFERENCE / "replay"
BEGUN = Adapter.LoRA(rank=3, alpha=6.0, start=Weights.PEFT(str(REPLAY / "adapter")))


def continued(**fields: Any) -> Experiment:
    options: dict[str, Any] = {
        "name": "continued",
        "model": Model.HF(
            str(REPLAY / "model"), weights=Weights.HF(str(REPLAY / "model")), tokenizer=Tokenizer.Bytes()
        ),
        "data": Data.Preferences(
            str(REPLAY / "pairs.jsonl"), max_prompt_length=16, max_completion_length=16, order=Order.AsInFile()
        ),
        "objective": Objective.DPO(beta=0.1),
        "optimizer": Optimizer.AdamW(schedule=Schedule.Constant(lr=4e-3)),
        "adapter": BEGUN,
        "batch_size": 4,
        "steps": 4,
        "precision": Precision(compute="float32"),
    }
    return Experiment(**options | fields)


def first_batch() -> PairBatch:
    rows = [json.loads(line) for line in (REPLAY / "pairs.jsonl").read_text().splitlines()[:4]]
    arrays = {name: np.zeros((4, 16), np.int32) for name in ("prompt", "chosen", "rejected")}
    for number, row in enumerate(rows):
        arrays["prompt"][number, 16 - len(row["prompt_ids"]) :] = row["prompt_ids"]
        for side in ("chosen", "rejected"):
            arrays[side][number, : len(row[f"{side}_ids"])] = row[f"{side}_ids"]
    lengths = {f"{name}_length": np.array([len(row[f"{name}_ids"]) for row in rows], np.int32) for name in arrays}
    return PairBatch(**arrays, **lengths, weight=np.ones(4, np.float32))


@pytest.mark.slow
def test_the_reference_is_the_adapter_as_it_began() -> None:
    """Asked at every step: equal to the policy before the first one, and it stays so, wherever the policy goes."""
    program = compile(continued(memory=Memory(reference="online")))
    state = program.init()
    tensors = safetensors.index(REPLAY / "adapter" / "adapter_model.safetensors")
    for number in (0, 1):  # layers of a period of two are stacked
        name = f"base_model.model.model.layers.{2 * number}.mlp.up_proj.lora_B.weight"
        actual = np.asarray(state.trainable["layers.blocks.0.mlp.up.kernel_lora_b"][number])
        np.testing.assert_array_equal(actual, tensors[name].read().T)
    assert set(state.reference) == set(state.trainable)
    assert program.blueprint.reference.is_base is False
    began = jax.device_get(state.reference)
    batch = first_batch()
    wanted = json.loads((REPLAY / "expected.json").read_text())["dpo-continued-adamw"][0]
    state, metrics = program.step(state, batch)
    assert float(metrics["rewards/margins"]) == 0.0
    for name in ("logps/chosen", "logps/rejected", "loss"):
        assert float(metrics[name]) == pytest.approx(wanted[name], rel=1e-5)
    evaluated = {name: float(ratio.total / ratio.count) for name, ratio in program.evaluate(state, batch).items()}
    assert evaluated["rewards/margins"] != 0.0
    reference = evaluated["logps/chosen"] - evaluated["rewards/chosen"] / 0.1
    assert reference == pytest.approx(wanted["logps/chosen"], rel=1e-5)
    for path, leaf in began.items():
        np.testing.assert_array_equal(state.reference[path], leaf)


@pytest.mark.slow
def test_a_resume_has_the_same_reference(tmp_path: Path) -> None:
    place = Path(shutil.copytree(REPLAY / "adapter", tmp_path / "adapter"))
    adapter = attrs.evolve(BEGUN, start=Weights.PEFT(str(place)))
    experiment = continued(adapter=adapter, checkpoint=Checkpoint(every_steps=2, keep=2))
    quiet = Display(quiet=True)
    whole = run(experiment, tmp_path / "whole", quiet)
    part = run(experiment, tmp_path / "part", quiet)
    shutil.rmtree(part.directory / "checkpoints" / "00000004")  # as if it had been killed at step 2

    def rows(directory: Path) -> list[dict[str, float]]:
        timed = ("tokens_per_second", "attempt", "step_seconds", "mfu")
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return [
            {k: v for k, v in json.loads(line).items() if not k.endswith(timed) and "per_" not in k} for line in lines
        ]

    status = json.loads((part.directory / "status.json").read_text())
    (part.directory / "status.json").write_text(json.dumps({**status, "state": "running"}))
    again = run(experiment, tmp_path / "part", quiet)
    assert again.state == "finished"
    wanted, actual = rows(whole.directory), rows(part.directory)
    for name in ("loss", "rewards/margins", "logps/chosen", "grad_norm"):
        assert [row[name] for row in actual] == [row[name] for row in wanted]

    # Another adapter in the same place is another reference.
    file = place / "adapter_model.safetensors"
    arrays = {name: np.array(tensor.read()) * 1.5 for name, tensor in safetensors.index(file).items()}
    safetensors.write(file, {name: (a.shape, a.dtype) for name, a in arrays.items()}, lambda name: arrays[name])
    shutil.rmtree(part.directory / "checkpoints" / "00000004")
    (part.directory / "status.json").write_text(json.dumps({**status, "state": "running"}))
    with pytest.raises(RunError, match="the frozen weights or the reference have changed"):
        run(experiment, tmp_path / "part", quiet)


def test_an_adapter_that_is_not_the_one_asked_for() -> None:
    with pytest.raises(PlanError) as raised:
        compile(continued(adapter=attrs.evolve(BEGUN, rank=4, targets=("attention",), scaling="sqrt_rank"))).init()
    start = "as in adapter_config.json of adapter.start"
    assert str(raised.value).splitlines()[1:] == [
        f"  adapter.scaling: expected 'rank', {start}, got 'sqrt_rank'",
        f"  adapter.targets: expected ('attention', 'mlp'), {start}, got ('attention',)",
        f"  adapter.rank: expected 3 at blocks.0.attention.key, {start}, got 4",
    ]


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_run(finished: Any) -> None:
    dpo = finished.run("dpo")
    earlier = saved_experiment(dpo)
    fields = {"name": "more", "evaluation": None}
    for start in (Weights.Checkpoint(str(dpo)), Weights.From(earlier)):
        asked = evolve(earlier, {**fields, "adapter.start": start})
        assert asked.id.rpartition("-")[2] != earlier.id.rpartition("-")[2]
        source = sources.open_source(build_blueprint(asked), dpo.parent)
        saved = sources.open_source(
            build_blueprint(evolve(earlier, {**fields, "model.weights": Weights.Checkpoint(str(dpo))})), dpo
        )
        path = "layers.blocks.0.mlp.up.kernel"
        b = np.asarray(source.leaf(path + "_lora_b"))
        assert np.abs(b).max() > 1e-4
        merged = np.asarray(source.leaf(path)) + 2.0 * np.einsum("lir,lro->lio", source.leaf(path + "_lora_a"), b)
        np.testing.assert_allclose(merged, saved.leaf(path), rtol=1e-5, atol=1e-6)
    other = evolve(earlier, {**fields, "adapter.start": Weights.Checkpoint(str(dpo)), "adapter.rank": 2})
    with pytest.raises(PlanError, match=r"adapter.rank: expected 4, which adapter.start was trained with, got 2"):
        sources.open_source(build_blueprint(other), dpo.parent)
    with pytest.raises(SpecError) as raised:
        evolve(
            earlier, {"adapter.start": Weights.From(earlier), "adapter.alpha": 1.0, "model.weights": Weights.Random()}
        )
    assert [line.split(":")[0].strip() for line in str(raised.value).splitlines()[1:]] == [
        "adapter.alpha",
        "adapter.start",
    ]
    trained = evolve(earlier, {**fields, "adapter.start": Weights.Checkpoint(str(finished.run("sft")))})
    with pytest.raises(
        WeightsError, match=r"trained all weights and has no adapter; start from it with model\.weights"
    ):
        sources.open_source(build_blueprint(trained), dpo.parent)


@pytest.mark.extended
def test_several_adapters_are_merged(finished: Any, tmp_path: Path) -> None:
    model = Weights.HF(str(REPLAY / "model"))
    shutil.copytree(REPLAY / "adapter", tmp_path / "high")
    config = json.loads((tmp_path / "high" / "adapter_config.json").read_text())
    (tmp_path / "high" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 12, "use_rslora": True}))
    places = tuple(Weights.PEFT(str(place)) for place in (REPLAY / "adapter", tmp_path / "high"))

    def source(weights: Weights) -> Any:
        experiment = continued(adapter=None)
        return sources.open_source(build_blueprint(evolve(experiment, {"model.weights": weights})), tmp_path)

    path = "tail.blocks.0.attention.query.kernel"
    plain = np.asarray(source(model).leaf(path), np.float64)
    one, other = (
        np.asarray(source(Weights.Merged(model, adapters=(place,), coefficients=(1.0,))).leaf(path)) for place in places
    )
    assert np.abs(one - plain).max() > 0.01
    np.testing.assert_allclose(other - plain, (one - plain) * 2 * 3**0.5, atol=1e-5)
    both = source(Weights.Merged(model, adapters=places, coefficients=(0.5, -2.0)))
    np.testing.assert_allclose(both.leaf(path), plain + 0.5 * (one - plain) - 2 * (other - plain), atol=1e-5)
    np.testing.assert_array_equal(both.leaf("norm.scale"), source(model).leaf("norm.scale"))

    dpo = finished.run("dpo")
    earlier = saved_experiment(dpo)
    merged = Weights.Merged(earlier.model.weights, adapters=(Weights.From(earlier),), coefficients=(1.0,))
    asked = build_blueprint(
        evolve(earlier, {"name": "more", "adapter": None, "memory.offload": (), "model.weights": merged})
    )
    whole = build_blueprint(evolve(asked.experiment, {"model.weights": Weights.Checkpoint(str(dpo))}))
    actual, wanted = (sources.open_source(blueprint, dpo.parent) for blueprint in (asked, whole))
    path = "layers.blocks.0.mlp.up.kernel"
    np.testing.assert_allclose(actual.leaf(path), wanted.leaf(path), atol=1e-6)
    assert sources.tokenizer_owner(asked.experiment) == sources.tokenizer_owner(whole.experiment)
    with pytest.raises(PlanError, match=r"model.weights.adapters: its adapter belongs to Weights.From"):
        source(Weights.Merged(model, adapters=(Weights.Checkpoint(str(dpo)),), coefficients=(1.0,)))


def test_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    hub = REFERENCE / "llama3" / "untied"
    convert(hub, tmp_path / "alone", "checkpoint")
    experiment = evolve(
        continued(adapter=None),
        {"model": Model.HF(str(hub), weights=Weights.Checkpoint(str(tmp_path / "alone")), tokenizer=Tokenizer.Bytes())},
    )
    blueprint, reader = build_blueprint(experiment), HubReader(hub)
    source = sources.open_source(blueprint, tmp_path / "runs")
    for path in blueprint.base:
        np.testing.assert_array_equal(np.asarray(source.leaf(path)), reader.leaf(path))
    assert sources.tokenizer_directory(evolve(experiment, {"model.tokenizer": Tokenizer.Auto()}), tmp_path) == (
        tmp_path / "alone"
    )
    other = evolve(experiment, {"model.path": str(REPLAY / "model")})
    with pytest.raises(WeightsError) as raised:
        sources.open_source(build_blueprint(other), tmp_path / "runs")
    assert str(raised.value).splitlines()[0].endswith("arrays do not fit:")
    assert any("expected an array of shape" in line for line in str(raised.value).splitlines())


def test_a_base_without_its_principal_components(tmp_path: Path) -> None:
    """PiSSA's: also of a run that continues a run, and not merged with other adapters."""
    place = Path(shutil.copytree(REPLAY / "adapter", tmp_path / "adapter"))
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": "pissa"}))
    adapter = attrs.evolve(BEGUN, start=Weights.PEFT(str(place)))
    plain, actual = (
        sources.open_source(build_blueprint(continued(adapter=each)), tmp_path) for each in (BEGUN, adapter)
    )
    path = "tail.blocks.0.attention.query.kernel"
    taken = np.asarray(plain.leaf(path), np.float64) - np.asarray(actual.leaf(path), np.float64)
    values = np.linalg.svd(np.asarray(plain.leaf(path), np.float64), compute_uv=False)
    np.testing.assert_allclose(np.linalg.svd(taken, compute_uv=False)[:4], [*values[:3], 0], atol=1e-5)
    for name in (path + "_lora_a", path + "_lora_b", "norm.scale"):
        np.testing.assert_array_equal(actual.leaf(name), plain.leaf(name))
    later = continued(name="later", adapter=attrs.evolve(BEGUN, start=Weights.From(continued(adapter=adapter))))
    assert sources.starts_from_pissa(later)
    assert not sources.starts_from_pissa(continued())
    merged = Weights.Merged(continued().model.weights, adapters=(Weights.PEFT(str(place)),), coefficients=(1.0,))
    blueprint = build_blueprint(evolve(continued(adapter=None), {"model.weights": merged}))
    with pytest.raises(WeightsError, match="stands on another base than others, with which it is not merged"):
        sources.open_source(blueprint, tmp_path)


def test_an_embedding_and_a_head_as_a_whole(tmp_path: Path) -> None:
    """They are merged with the model, and training on from such an adapter is refused."""
    hub, place = REFERENCE / "llama3" / "untied", REFERENCE / "peft" / "saved"
    model = Model.HF(str(hub), weights=Weights.HF(str(hub)), tokenizer=Tokenizer.Bytes())

    def source(weights: Weights = model.weights, adapter: Adapter | None = None) -> Any:
        experiment = continued(model=attrs.evolve(model, weights=weights), adapter=adapter)
        return sources.open_source(build_blueprint(experiment), tmp_path)

    adapters = (Weights.PEFT(str(place)),)
    plain = source()
    whole, half = (
        source(Weights.Merged(model.weights, adapters=adapters, coefficients=(number,))) for number in (1.0, 0.5)
    )
    tensors = safetensors.index(place / "adapter_model.safetensors")
    for path, name in (("embed.embedding", "model.embed_tokens"), ("lm_head.kernel", "lm_head")):
        stored, before = tensors[f"base_model.model.{name}.weight"].read(), np.asarray(plain.leaf(path))
        assert np.abs(stored - before).max() > 0.01
        np.testing.assert_allclose(whole.leaf(path), stored, atol=1e-6)
        np.testing.assert_allclose(half.leaf(path), (stored + before) / 2, atol=1e-6)
    np.testing.assert_array_equal(whole.leaf("norm.scale"), plain.leaf("norm.scale"))
    begun = Adapter.LoRA(rank=3, alpha=5.0, targets=("attention.query",), start=adapters[0])
    with pytest.raises(PlanError, match=r"adapter.start: .*saved replaces the embedding or the head as a whole"):
        source(adapter=begun)
