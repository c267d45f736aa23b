"""The loss of a policy's own answers: equal to TRL's own code and to the formulas, in value, gradient and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import Objective, Reward, losses
from nnxdsl.losses.base import LossTerms, WeightedMean
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.policy_gradient import RolloutOutputs, advantages, kl

FIGURES = Path(__file__).parents[1] / "reference" / "policy" / "grpo.npz"
REWARDS = (Reward("exact_answer"),)
LIMIT = 9.0


@pytest.fixture(scope="module")
def figures() -> Any:
    return np.load(FIGURES)


def of_tokens(logp: Any, lengths: Any) -> TokenStats:
    mask = jnp.asarray(np.arange(logp.shape[1]) < np.asarray(lengths)[:, None], jnp.float32)
    nothing = jnp.zeros_like(mask)
    return TokenStats(logp * mask, nothing, nothing, nothing, mask)


def terms_of(objective: Any, figures: Any, logp: Any, *, is_process_0: bool = False) -> LossTerms:
    rows = len(figures["lengths"])
    limit, old = jnp.full(rows, LIMIT), None if is_process_0 else jnp.asarray(figures["old"], jnp.float32)
    policy, other = (of_tokens(x, figures["lengths"]) for x in (logp, jnp.asarray(figures["reference"], jnp.float32)))
    gain = jnp.asarray(figures["advantage"].reshape(-1), jnp.float32)
    compared = RolloutOutputs(other, gain, limit, old) if objective.beta else None
    return losses.build(objective)(RolloutOutputs(policy, gain, limit, old), compared, jnp.ones(rows))


def mean(ratio: WeightedMean) -> float:
    return float(ratio.total / ratio.count)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_it_is_what_trl_computes(loss_type: Any, figures: Any) -> None:
    objective = Objective.GRPO(rewards=REWARDS, num_iterations=2, epsilon_high=0.28, beta=0.3, loss_type=loss_type)

    def loss(logp: jax.Array) -> Any:
        terms = terms_of(objective, figures, logp)
        return terms.loss.total / terms.loss.count, terms

    (value, terms), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(figures["logp"], jnp.float32))
    assert float(value) == pytest.approx(float(figures[f"{loss_type}.loss"]), rel=2e-6)
    np.testing.assert_allclose(gradient, figures[f"{loss_type}.gradient"], rtol=2e-5, atol=2e-7)
    for name in ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert mean(terms.metrics[name]) == pytest.approx(float(figures[f"{loss_type}.{name}"]), rel=1e-5)


def test_advantages_are_what_trl_computes(figures: Any) -> None:
    found = advantages(figures["rewards"], "group")
    np.testing.assert_allclose(found, figures["advantage"], rtol=1e-12)
    assert np.all(found[1] == 0)  # answers that are worth the same teach nothing


def test_advantages_by_hand() -> None:
    rewards = np.array([[0.0, 1.0], [1.0, 5.0]])
    np.testing.assert_allclose(advantages(rewards, "none"), [[-0.5, 0.5], [-2.0, 2.0]])
    spread = np.sqrt(((rewards - 1.75) ** 2).sum() / 3) + 1e-4
    np.testing.assert_allclose(advantages(rewards, "batch"), np.array([[-0.5, 0.5], [-2.0, 2.0]]) / spread)


def test_answers_without_a_reward_take_no_part() -> None:
    """As in TRL: they are in no mean and no deviation, and their advantage is 0."""
    none = np.nan
    rewards = np.array([[1.0, none, 3.0], [none, none, none], [none, 5.0, none]])
    np.testing.assert_array_equal(advantages(rewards, "none"), [[-1, 0, 1], [0, 0, 0], [0, 0, 0]])
    scale = np.sqrt(2) + 1e-4
    np.testing.assert_allclose(advantages(rewards, "group"), [[-1 / scale, 0, 1 / scale], [0, 0, 0], [0, 0, 0]])
    scale = 2 + 1e-4  # of 1, 3 and 5
    np.testing.assert_allclose(advantages(rewards, "batch"), [[-1 / scale, 0, 1 / scale], [0, 0, 0], [0, 0, 0]])


def test_the_first_update_has_the_gradient_of_reinforce(figures: Any) -> None:
    # With the policy that drew, ratios are 1 and the loss is minus the mean advantage; its gradient is -A / tokens.
    objective = Objective.GRPO(rewards=REWARDS, beta=0.0, loss_type="dapo")
    logp, lengths = jnp.asarray(figures["logp"], jnp.float32), figures["lengths"]
    terms, back = jax.vjp(lambda x: terms_of(objective, figures, x, is_process_0=True).loss.total, logp)
    gain, mask = figures["advantage"].reshape(-1, 1), np.arange(logp.shape[1]) < lengths[:, None]
    assert float(terms) == pytest.approx(float(-(gain * mask).sum()), rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(back(jnp.ones(()))[0], -(gain * mask), rtol=1e-6, atol=1e-7)
    assert not any(name.startswith("clip") for name in terms_of(objective, figures, logp, is_process_0=True).metrics)


def test_estimates_of_the_divergence() -> None:
    ratio = jnp.array([-0.5, 0.0, 2.0])
    np.testing.assert_allclose(kl("k1", ratio), [-0.5, 0.0, 2.0])
    np.testing.assert_allclose(kl("k2", ratio), [0.125, 0.0, 2.0])
    np.testing.assert_allclose(kl("k3", ratio), [np.exp(0.5) - 1.5, 0.0, np.exp(-2.0) + 1.0], rtol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_rows_that_fill_a_batch_do_not_count(loss_type: Any, figures: Any) -> None:
    objective = Objective.GRPO(rewards=REWARDS, loss_type=loss_type)
    whole = terms_of(objective, figures, jnp.asarray(figures["logp"], jnp.float32), is_process_0=True)

    def filled(x: Any) -> Any:
        return jnp.concatenate([x, x[:2]])

    both = []
    for name in ("logp", "reference"):
        stats = of_tokens(jnp.asarray(figures[name], jnp.float32), figures["lengths"])
        gain = jnp.asarray(figures["advantage"].reshape(-1), jnp.float32)
        both.append(jax.tree.map(filled, RolloutOutputs(stats, gain, jnp.full(len(gain), LIMIT), None)))
    weight = jnp.concatenate([jnp.ones(len(figures["lengths"])), jnp.zeros(2)])
    more = losses.build(objective)(*both, weight)
    assert mean(more.loss) == pytest.approx(mean(whole.loss), rel=1e-6)
    assert mean(more.metrics["kl"]) == pytest.approx(mean(whole.metrics["kl"]), rel=1e-6)
