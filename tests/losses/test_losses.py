"""What the losses say, against numbers reckoned by hand and against the formulas of the papers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import Objective, losses
from nnxdsl.losses.base import PairLogps, WeightedMean
from nnxdsl.losses.lm_head.token_stats import TokenStats


def pairs(chosen: list[float], rejected: list[float]) -> PairLogps:
    one = jnp.ones(len(chosen))
    return PairLogps(jnp.array(chosen), jnp.array(rejected), one, one)


def mean(ratio: WeightedMean) -> float:
    return float(ratio.total / ratio.count)


# Two pairs: log-ratios (policy minus reference) of chosen 0.5 and -1, of rejected -1.5 and 0; so d is 2 and -1.
POLICY = pairs([-9.5, -21.0], [-11.5, -30.0])
REFERENCE = pairs([-10.0, -20.0], [-10.0, -30.0])
ONES = jnp.ones(2)


def test_dpo_by_hand() -> None:
    terms = losses.build(Objective.DPO(beta=0.1))(POLICY, REFERENCE, ONES)
    # log(1 + exp(-0.2)) = 0.598139, log(1 + exp(0.1)) = 0.744397
    assert mean(terms.loss) == pytest.approx((0.598138869 + 0.744396660) / 2, rel=1e-6)
    assert mean(terms.metrics["rewards/chosen"]) == pytest.approx(0.1 * (0.5 - 1.0) / 2, rel=1e-6)
    assert mean(terms.metrics["rewards/rejected"]) == pytest.approx(0.1 * (-1.5 + 0.0) / 2, rel=1e-6)
    assert mean(terms.metrics["rewards/margins"]) == pytest.approx(0.1 * (2.0 - 1.0) / 2, rel=1e-6)
    assert mean(terms.metrics["rewards/accuracies"]) == 0.5


def test_label_smoothing_by_hand() -> None:
    terms = losses.build(Objective.DPO(beta=0.1, label_smoothing=0.3))(POLICY, REFERENCE, ONES)
    first = 0.7 * 0.598138869 + 0.3 * 0.798138869
    second = 0.7 * 0.744396660 + 0.3 * 0.644396660
    assert mean(terms.loss) == pytest.approx((first + second) / 2, rel=1e-6)


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5, 2.0])
def test_beta_is_applied_once(beta: float) -> None:
    # The trap: beta in the difference and again in the sigmoid. Equal models cannot show it; a difference of 2 does.
    one = losses.build(Objective.DPO(beta=beta))(pairs([-8.0], [-10.0]), pairs([-10.0], [-10.0]), jnp.ones(1))
    assert mean(one.loss) == pytest.approx(math.log1p(math.exp(-beta * 2.0)), rel=1e-6)
    # And the gradient at d = 0 is -beta / 2 for each unit of d.
    at_zero = jax.grad(
        lambda c: (
            losses.build(Objective.DPO(beta=beta))(
                PairLogps(c, *pairs([0.0], [0.0])[1:]), pairs([0.0], [0.0]), jnp.ones(1)
            ).loss.total
        )
    )(jnp.zeros(1))
    assert float(at_zero[0]) == pytest.approx(-beta / 2, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_equal_models_give_ln_2(smoothing: float) -> None:
    terms = losses.build(Objective.DPO(beta=0.1, label_smoothing=smoothing))(POLICY, POLICY, ONES)
    assert mean(terms.loss) == pytest.approx(math.log(2), abs=1e-7)
    assert all(mean(value) == 0.0 for value in terms.metrics.values())


def test_swapping_negates_the_margin() -> None:
    def swapped(x: PairLogps) -> PairLogps:
        return PairLogps(x.rejected_logps, x.chosen_logps, x.rejected_tokens, x.chosen_tokens)

    loss = losses.build(Objective.DPO(beta=0.7))
    other = loss(POLICY, REFERENCE, ONES)
    back = loss(swapped(POLICY), swapped(REFERENCE), ONES)
    assert mean(back.metrics["rewards/margins"]) == -mean(other.metrics["rewards/margins"])
    assert mean(back.metrics["rewards/chosen"]) == mean(other.metrics["rewards/rejected"])
    # -log sigmoid(z) - (-log sigmoid(-z)) = -z, pair by pair.
    assert mean(other.loss) - mean(back.loss) == pytest.approx(-mean(other.metrics["rewards/margins"]), abs=1e-6)


def test_rows_of_weight_zero_do_not_count() -> None:
    loss = losses.build(Objective.DPO(beta=0.1))
    alone = loss(pairs([-9.5], [-11.5]), pairs([-10.0], [-10.0]), jnp.ones(1))
    filled = loss(pairs([-9.5, math.nan], [-11.5, 1e9]), pairs([-10.0, 0.0], [-10.0, 0.0]), jnp.array([1.0, 0.0]))
    assert jax.tree.map(float, filled) == jax.tree.map(float, alone)


def test_sft_divides_once_over_all_tokens() -> None:
    logp = jnp.array([[-1.0, -2.0, -3.0], [-10.0, 0.0, 0.0]])
    mask = jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    zero = jnp.zeros_like(mask)
    terms = losses.build(Objective.SFT())(TokenStats(logp, zero, zero, zero, mask), None, ONES)
    assert (float(terms.loss.total), float(terms.loss.count)) == (16.0, 4.0)  # 4, and not the mean of means 6
    terms = losses.build(Objective.SFT())(TokenStats(logp, zero, zero, zero, mask), None, jnp.array([1.0, 0.0]))
    assert (float(terms.loss.total), float(terms.loss.count)) == (6.0, 3.0)


def test_z_loss_by_hand() -> None:
    logp, log_z = jnp.array([[-1.0, -2.0, 0.0]]), jnp.array([[3.0, -4.0, 7.0]])
    mask = jnp.array([[1.0, 1.0, 0.0]])
    stats = TokenStats(logp, log_z, jnp.zeros_like(mask), jnp.zeros_like(mask), mask)
    terms = losses.build(Objective.SFT(z_loss=0.01))(stats, None, jnp.ones(1))
    assert float(terms.loss.total) == pytest.approx(1 + 2 + 0.01 * (9 + 16), rel=1e-6)
    assert float(terms.loss.count) == 2


def test_the_published_vector() -> None:
    # The inputs of the DPO test of google/tunix (Apache-2.0) and the values that it expects.
    np.random.seed(0)
    policy = np.random.normal(0, 5, size=(8, 4)).sum(axis=-1)
    reference = np.random.normal(0, 5, size=(8, 4)).sum(axis=-1)
    both = [pairs(list(side[:4]), list(side[4:])) for side in (policy, reference)]
    for smoothing, expected in ((0.0, 0.753059), (0.3, 0.925447)):
        loss = losses.build(Objective.DPO(beta=0.1, label_smoothing=smoothing))
        assert mean(loss(*both, jnp.ones(4)).loss) == pytest.approx(expected, abs=1e-6)
    doubled = losses.build(Objective.DPO(beta=0.1**2))
    assert mean(doubled(*both, jnp.ones(4)).loss) == pytest.approx(0.668556, abs=1e-6)
