"""Advantages of completions: equal to TRL's and to the formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nnxdsl import Objective, Reward
from nnxdsl.losses.advantages import completion_advantages, token_advantages, whitened

POLICY = Path(__file__).parents[1] / "reference" / "policy"
REWARDS = (Reward("exact_answer"),)


def figures_of(name: str) -> dict[str, np.ndarray]:
    with np.load(POLICY / f"{name}.npz") as file:
        return dict(file)


def test_of_groups_as_trl_computes_them() -> None:
    figures = figures_of("grpo")
    actual = completion_advantages(figures["rewards"], "mean", "group")
    np.testing.assert_allclose(actual, figures["advantage"], rtol=1e-12)
    assert np.all(actual[1] == 0)  # completions of equal reward teach nothing


def test_by_hand() -> None:
    rewards = np.array([[0.0, 1.0], [1.0, 5.0]])
    np.testing.assert_allclose(completion_advantages(rewards), [[-0.5, 0.5], [-2.0, 2.0]])
    std = np.sqrt(((rewards - 1.75) ** 2).sum() / 3) + 1e-4
    actual = completion_advantages(rewards, "mean", "batch")
    np.testing.assert_allclose(actual, np.array([[-0.5, 0.5], [-2.0, 2.0]]) / std)
    np.testing.assert_allclose(completion_advantages(rewards, "leave_one_out"), [[-1.0, 1.0], [-4.0, 4.0]])
    np.testing.assert_allclose(completion_advantages(rewards, "none"), rewards)


def test_completions_without_a_reward_take_no_part() -> None:
    """As in TRL: they are in no mean and no deviation, and their advantage is 0."""
    none = np.nan
    rewards = np.array([[1.0, none, 3.0], [none, none, none], [none, 5.0, none]])
    for baseline, expected in (
        ("mean", [[-1, 0, 1], [0, 0, 0], [0, 0, 0]]),
        ("leave_one_out", [[-2, 0, 2], [0, 0, 0], [0, 0, 0]]),
        ("none", [[1, 0, 3], [0, 0, 0], [0, 5, 0]]),
    ):
        np.testing.assert_array_equal(completion_advantages(rewards, baseline), expected)  # pyright: ignore[reportArgumentType]
    for scale, std in (("group", np.sqrt(2) + 1e-4), ("batch", 2 + 1e-4)):  # of the batch: of 1, 3 and 5
        actual = completion_advantages(rewards, "mean", scale)  # pyright: ignore[reportArgumentType]
        np.testing.assert_allclose(actual, [[-1 / std, 0, 1 / std], [0, 0, 0], [0, 0, 0]])
    mask = np.ones((4, 2), bool)
    objective = Objective.ReinforcePlusPlus(rewards=REWARDS, num_generations=2)
    actual = token_advantages(objective, np.array([1.0, none, 3.0, 5.0]), mask)
    assert np.all(actual[1] == 0)
    np.testing.assert_allclose(actual[[0, 2, 3], 0], np.array([-2, 0, 2]) / (np.sqrt(16 / 5) + 1e-4))


def test_leave_one_out_with_the_divergence_in_the_reward_as_trl_computes_it() -> None:
    figures, expected = figures_of("grpo"), figures_of("rloo")
    mask = np.arange(figures["logp"].shape[1]) < figures["lengths"][:, None]
    objective = Objective.RLOO(rewards=REWARDS, num_generations=4, beta=0.3)
    actual = token_advantages(objective, figures["rewards"].reshape(-1), mask, figures["old"] - figures["reference"])
    np.testing.assert_allclose(actual[:, 0], expected["advantage"].reshape(-1), rtol=1e-12)
    assert np.all(actual[~mask] == 0)


@pytest.mark.parametrize("baseline", ["none", "mean"])
def test_of_reinforce_plus_plus_token_by_token(baseline: str) -> None:
    draw = np.random.default_rng(0)
    rewards, log_ratios = draw.normal(size=4), draw.normal(size=(4, 5))
    mask = np.arange(5) < np.array([5, 2, 3, 1])[:, None]
    objective = Objective.ReinforcePlusPlus(rewards=REWARDS, num_generations=2, beta=0.5, baseline=baseline)
    actual = token_advantages(objective, rewards, mask, log_ratios)

    returns = []
    for row in range(4):
        group = rewards[row // 2 * 2 : row // 2 * 2 + 2]
        start = rewards[row] - (group.mean() if baseline == "mean" else 0)
        length = int(mask[row].sum())
        returns += [start - 0.5 * sum(log_ratios[row, token:length]) for token in range(length)]
    values = np.array(returns)
    np.testing.assert_allclose(actual[mask], (values - values.mean()) / (values.std(ddof=1) + 1e-4), rtol=1e-10)
    assert np.all(actual[~mask] == 0)


def test_whitening() -> None:
    mask = np.array([[True, True, False], [True, False, False]])
    actual = whitened(np.array([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]]), mask)
    assert actual[mask].mean() == pytest.approx(0, abs=1e-12)
    assert actual[mask].std(ddof=1) == pytest.approx(1, abs=1e-4)
    assert np.all(whitened(np.ones((1, 1)), np.ones((1, 1), bool)) == 0)
