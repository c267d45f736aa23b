"""Arrays that are not trained: no gradient, no optimizer state, no change; the others move as if all were trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
    Mesh,
    Objective,
    Optimizer,
    Order,
    PlanError,
    Schedule,
    SpecError,
    Tokenizer,
    Weights,
    compile,
)
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.run_weights import RunWeights

REPLAY = Path(__file__).parents[1] / "reference" / "replay"
FROZEN = ("embed", "*norm", "blocks.0.mlp.up")


@pytest.mark.slow
def test_what_is_named_is_not_trained(
    experiment: Callable[..., Experiment], pairs: Callable[..., Any], trained: Callable[..., Any]
) -> None:
    model = Small(layers=1, pattern=1)
    part, whole = (compile(experiment(model=model, frozen=frozen)) for frozen in (FROZEN, ()))
    names = set(part.blueprint.frozen)
    assert {name for name in names if "norm" not in name} == {"embed.embedding", "layers.blocks.0.mlp.up.kernel"}
    assert {name for name in whole.blueprint.trainable if name not in names} == set(part.blueprint.trainable)
    assert set(part.layout.arrays["reference"]) == set(part.blueprint.trainable)
    state, all_state, batch = trained(part), trained(whole), pairs(4)
    first = {path: np.asarray(leaf) for path, leaf in state.frozen.items()}
    for number in range(2):
        state, metrics = part.step(state, batch)
        all_state, expected = whole.step(all_state, batch)
        if number == 0:
            assert metrics["rewards/margins"] == 0.0
            assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
            # Without a norm to clip by and without a state, each array's first update is its own.
            for path, leaf in state.trainable.items():
                np.testing.assert_allclose(leaf, all_state.trainable[path], rtol=2e-5, atol=2e-6, err_msg=path)
            assert float(metrics["grad_norm"]) < float(expected["grad_norm"])
    assert all(np.array_equal(first[path], leaf) for path, leaf in state.frozen.items())
    template, leaves = part.policy(state)
    assert leaves.keys() == template.variables.keys()
    reference = part.reference(state)
    assert reference is not None
    assert reference[1].keys() == reference[0].variables.keys()


def test_there_is_no_optimizer_state_for_them(experiment: Callable[..., Experiment]) -> None:
    adamw = Optimizer.AdamW(schedule=Schedule.Constant(lr=0.1))
    fields: dict[str, Any] = {"optimizer": adamw, "objective": Objective.SFT(loss_on="all"), "batch_size": 8}
    blueprint = build_blueprint(experiment(**fields, frozen=("embed", "blocks.0"), mesh=Mesh(data=2, fsdp=2)))
    owners = {path.split(".mu.")[-1] for path in blueprint.layout.arrays["optimizer"] if ".mu." in path}
    assert owners == set(blueprint.trainable)
    assert not any(path.startswith(("embed", "layers.blocks.0")) for path in owners)
    assert blueprint.parameters["trainable"] < blueprint.parameters["total"]


def test_patterns_that_name_nothing_or_everything_or_have_no_effect(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(PlanError) as caught:
        build_blueprint(experiment(frozen=("embed", "mlp.upp")))
    assert "\n  frozen.1: 'mlp.upp' names no array; " in str(caught.value)
    with pytest.raises(PlanError) as caught:
        build_blueprint(experiment(frozen=("*",)))
    assert str(caught.value).endswith("  frozen: freezes every parameter; nothing is left to train")
    with pytest.raises(SpecError) as refused:
        experiment(frozen=("embed",), adapter=Adapter.LoRA(rank=2))
    assert "  frozen: has no effect: Adapter.LoRA leaves all of the model frozen" in str(refused.value)


@pytest.mark.slow
def test_what_a_run_ends_with_has_both(tmp_path: Path) -> None:
    first = Experiment(
        name="frozen",
        model=Small(layers=1, pattern=1, vocab_size=320, tokenizer=Tokenizer.Bytes()),
        data=Data.Text(str(REPLAY / "texts.jsonl"), max_length=32, order=Order.AsInFile()),
        objective=Objective.SFT(loss_on="all"),
        optimizer=Optimizer.Lion(schedule=Schedule.Constant(lr=1e-3)),
        batch_size=4,
        steps=2,
        frozen=("embed", "mlp.up"),
    )
    outcome = run(first, tmp_path, Display(quiet=True))
    saved, begun = RunWeights.open(outcome.directory), compile(first).init()
    frozen = "layers.blocks.0.mlp.up.kernel"
    assert np.array_equal(saved.weight(frozen), begun.frozen[frozen])
    moved = "layers.blocks.0.mlp.down.kernel"
    np.testing.assert_allclose(abs(saved.weight(moved) - begun.trainable[moved]).max(), 2e-3, rtol=1e-3)
    model = attrs.evolve(first.model, weights=Weights.From(first))
    later = attrs.evolve(first, name="later", model=model, frozen=(), steps=1)
    assert run(later, tmp_path, Display(quiet=True)).state == "finished"
