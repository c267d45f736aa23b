"""Heads other than log-probabilities: an objective on scores, in one file of somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from small_lab.ranking import Ranking
from small_lab.tiny_family import Pico

from nnxdsl import Adapter, Evaluation, Experiment, Optimizer, Schedule, compile, from_json, to_json
from nnxdsl.data.batch import PairBatch
from nnxdsl.errors import PlanError, WeightsError
from nnxdsl.generate.sampler import Sampler
from nnxdsl.models.families.registry import family_named, to_hf
from nnxdsl.planning.plan import plan
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import TrainState

LR = 0.05
Array = npt.NDArray[np.float64]


def norm(x: Array, scale: Array) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def rotary(x: Array, theta: float = 10_000.0) -> Array:
    """Queries or keys `[T, N, H]`, the halves of each head rotated against each other."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def last_state(leaves: Mapping[str, Array], ids: npt.NDArray[np.int32]) -> Array:
    """The final hidden state of a sequence's last token, by Pico's formulas in float64."""
    x = leaves["embed.embedding"][ids]
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for layer in range(2):
        fields = {
            path.removeprefix("layers.blocks.0."): leaf[layer]
            for path, leaf in leaves.items()
            if path.startswith("layers.blocks.0.")
        }
        y = norm(x, fields["pre_attention_norm.scale"])
        query, key = (
            rotary(
                norm(y @ fields[f"attention.{name}.kernel"], fields[f"attention.{name}_norm.scale"]).reshape(
                    len(ids), -1, 8
                )
            )
            for name in ("query", "key")
        )
        value = (y @ fields["attention.value.kernel"]).reshape(len(ids), -1, 8)
        scores = np.where(causal, np.einsum("tnh,sh->nts", query, key[:, 0]) * 8**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("nts,sh->tnh", weights, value[:, 0]).reshape(len(ids), -1)
        x = x + mixed @ fields["attention.output.kernel"]
        y = norm(x, fields["pre_mlp_norm.scale"])
        gate = y @ fields["mlp.gate.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ fields["mlp.up.kernel"])) @ fields["mlp.down.kernel"]
    return norm(x, leaves["norm.scale"])[-1]


def replayed(leaves: Mapping[str, Array], batch: PairBatch, margin: float) -> tuple[float, Array]:
    """The loss of a batch, and its gradient by the head `[1, D]`, in float64."""
    losses, grads = [], []
    for row in range(len(batch.weight)):
        prompt = batch.prompt[row, batch.prompt.shape[1] - batch.prompt_length[row] :]
        chosen, rejected = (
            last_state(leaves, np.concatenate([prompt, ids[row, : lengths[row]]]))
            for ids, lengths in ((batch.chosen, batch.chosen_length), (batch.rejected, batch.rejected_length))
        )
        short = max(0.0, margin - float(leaves["score.kernel"][0] @ (chosen - rejected)))
        losses.append(short**2)
        grads.append(-2 * short * (chosen - rejected))
    return float(np.mean(losses)), np.mean(grads, axis=0)[None]


@pytest.fixture
def ranking(experiment: Callable[..., Experiment]) -> Callable[..., Experiment]:
    """Makes an experiment with the objective; its learning rate is `LR`."""

    def make(**fields: Any) -> Experiment:
        sgd = Optimizer.SGD(schedule=Schedule.Constant(lr=LR), max_grad_norm=None)
        return experiment(objective=Ranking(margin=0.5), model=Pico("tiny"), optimizer=sgd, **fields)

    return make


def test_an_objective_with_a_scalar_head_trains_from_one_file(
    ranking: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    asked = ranking()
    assert from_json(to_json(asked)) == asked
    program, batch = compile(asked), pairs(4)
    assert program.layout.arrays["trainable"]["score.kernel"].shape == (1, 16)
    assert "lm_head.kernel" not in program.blueprint.base
    state, actual = trained(program), []
    for _ in range(4):
        leaves = {path: np.asarray(leaf, np.float64) for path, leaf in state.trainable.items()}
        loss, grad = replayed(leaves, batch, 0.5)
        state, metrics = program.step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(
            state.trainable["score.kernel"], leaves["score.kernel"] - LR * grad, rtol=0, atol=1e-5
        )
        actual.append({name: float(value) for name, value in metrics.items()})
    assert actual[-1]["loss"] < actual[0]["loss"]
    assert "rewards/accuracies" in actual[0]
    assert not {"entropy", "mean_token_accuracy", "logps/chosen"} & actual[0].keys()


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("fields", [{"microbatch_size": 2}, {"adapter": Adapter.LoRA(rank=2)}], ids=str)
def test_a_scalar_head_under_micro_batches_and_beside_an_adapter(
    fields: dict[str, Any], ranking: Callable[..., Experiment], pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:  # fmt: skip
    whole, other = compile(ranking()), compile(ranking(**fields))
    expected, metrics = whole.step(trained(whole), pairs(4))
    state, actual = other.step(trained(other), pairs(4))
    assert float(actual["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    # The head is trained in full, also beside an adapter, which begins as the identity.
    np.testing.assert_allclose(state.trainable["score.kernel"], expected.trainable["score.kernel"], rtol=0, atol=1e-6)


def test_what_needs_a_vocabulary_is_refused(ranking: Callable[..., Experiment]) -> None:
    with pytest.raises(PlanError, match=r"evaluation\.prompts: Ranking has no output head over the vocabulary"):
        build_blueprint(ranking(evaluation=Evaluation(every_steps=5, prompts=("Why?",))))
    glm = family_named("glm4_moe")
    assert glm is not None
    with pytest.raises(WeightsError, match=r"GLM-4\.5 has no class for sequence classification in transformers"):
        to_hf(glm.sizes["tiny"].with_fields({"head.num_labels": 1}))
    blueprint = build_blueprint(ranking())
    with pytest.raises(WeightsError, match="gives scores of labels and no tokens, so it generates nothing"):
        Sampler(blueprint.base_template, blueprint.config, blueprint.compute, {0})


def test_a_plan_has_no_logits_over_the_vocabulary(ranking: Callable[..., Experiment]) -> None:
    actual = {part["name"]: part for part in plan(ranking())["memory"]}
    assert "vocab_size 48" not in actual["workspace"]["formula"]
