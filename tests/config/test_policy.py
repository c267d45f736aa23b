"""Experiments with rollouts: settings without effect, group sizes, kinds of rows."""

from __future__ import annotations

from typing import Any

import pytest

from nnxdsl import Batching, Data, Experiment, Memory, Model, Objective, Optimizer, Reward, Schedule, SpecError, reward

REWARDS = (Reward("exact_answer"),)


def asked(**fields: Any) -> Experiment:
    options: dict[str, Any] = {
        "name": "grpo",
        "model": Model.Gemma3("tiny"),
        "objective": Objective.GRPO(rewards=REWARDS, num_generations=4),
        "data": Data.Prompts("prompts.jsonl"),
        "optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        "batch_size": 8,
        "steps": 2,
    }
    return Experiment(**{**options, **fields})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"batch_size": 6}, "objective.num_generations: 4 completions of a prompt do not divide batch_size=6"),
        (
            {"batching": Batching.Packed()},
            "batching: Batching.Packed arranges rows of a file, and completions are in none; leave it out",
        ),
        (
            {"data": Data.Text("rows.jsonl")},
            "data: Objective.GRPO reads prompts, Data.Text yields texts; use Data.Prompts",
        ),
        (
            {"memory": Memory(reference="cached")},
            "memory.reference: reference log-probs can only be cached for preference pairs, Objective.GRPO reads "
            "prompts; use 'online'",
        ),
        (
            {"objective": Objective.GRPO(rewards=REWARDS, beta=0.0), "memory": Memory(reference="online")},
            "memory.reference: 'online' has no effect: Objective.GRPO has no reference",
        ),
        (
            {"objective": Objective.SFT()},
            "data: Objective.SFT reads conversations or texts, Data.Prompts yields prompts; use Data.Conversations or "
            "Data.Text",
        ),
    ],
)
def test_parts_that_do_not_fit(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as error:
        asked(**fields)
    assert str(error.value) == f"1 problem in Experiment 'grpo'\n  {problem}"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rewards": ()}, "rewards: is empty; there is nothing to learn from"),
        ({"rewards": REWARDS * 2}, "rewards.1.name: 'exact_answer' is named twice; give it one weight"),
        (
            {"rewards": (Reward.MathAccuracy(), Reward.MathAccuracy(after="</think>"))},
            "rewards.1.name: 'math_accuracy' is named twice; give it one weight, or one of the two another name",
        ),
        (
            {"epsilon_high": 0.28},
            "epsilon_high: has no effect with num_iterations=1, where every probability is that of sampling",
        ),
        ({"beta": 0.0, "kl_estimator": "k1"}, "kl_estimator: has no effect with beta=0, which takes no reference"),
        (
            {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": True},
            "use_bias_correction_kl: corrects k3, not k2; set kl_estimator='k3'",
        ),
        ({"loss_type": "dapo"}, "loss_type: GRPO has no field 'loss_type'; write Objective.DAPO(...)"),
        (
            {"loss_type": "bnpo"},
            "loss_type: GRPO has no field 'loss_type'; each algorithm is a class, such as Objective.DAPO",
        ),
        ({"num_generations": 1}, "num_generations: expected a value >= 2, got 1"),
    ],
)
def test_settings_that_could_not_act(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as error:
        Objective.GRPO(**{"rewards": REWARDS, **fields})
    assert str(error.value) == f"1 problem in Objective.GRPO\n  {problem}"


@pytest.mark.parametrize("name", [":", " ", "my_lab:", ":short", "my lab:short", "my_lab:short:er", "my_lab..a:short"])
def test_names_that_no_function_could_have(name: str) -> None:
    problem = f"name: expected a registered name without ':', or module:function, got {name!r}"
    with pytest.raises(SpecError) as error:
        Reward(name)
    assert str(error.value).splitlines()[-1] == f"  {problem}"
    with pytest.raises(SpecError, match="registered name"):
        reward(name)


@pytest.mark.parametrize("name", ["short", "ends well", "my_lab:short", "my_lab.rewards:Short.score"])
def test_names_that_functions_have(name: str) -> None:
    assert Reward(name).name == name


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Objective.DAPO, {"epsilon_high": 0.3}),
        (Objective.DrGRPO, {"delta": 2.0}),
        (Objective.GSPO, {"epsilon": 0.1}),
        (Objective.CISPO, {"max_ratio": 2.0}),
        (Objective.SAPO, {"temperature_negative": 2.0}),
        (Objective.GMPO, {"epsilon": 0.1}),
        (Objective.LUSPO, {"epsilon": 0.1}),
        (Objective.VESPO, {"k_negative": 1.0}),
        (Objective.DPPO, {"max_divergence": 0.1}),
        (Objective.RLOO, {"epsilon": 0.1}),
        (Objective.ReinforcePlusPlus, {"epsilon": 0.1}),
    ],
)
def test_bounds_need_a_second_update(cls: Any, fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(SpecError, match=f"{name}: has no effect with num_iterations=1"):
        cls(rewards=REWARDS, **fields)
    cls(rewards=REWARDS, num_iterations=2, **fields)


def test_a_reference_is_there_where_it_is_read() -> None:
    assert asked().reference_mode == "online"
    assert asked(objective=Objective.GRPO(rewards=REWARDS, beta=0.0)).reference_mode == "none"
