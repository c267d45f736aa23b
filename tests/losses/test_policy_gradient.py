"""Losses of a policy's own completions: equal to TRL's code and to the formulas, in value, gradient and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import ImportanceSampling, Objective, Reward, losses
from nnxdsl.losses.base import LossTerms, WeightedMean
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.policy_gradient import RolloutOutputs, kl
from nnxdsl.losses.sampler_weights import importance_weights

POLICY = Path(__file__).parents[1] / "reference" / "policy"
REWARDS = (Reward("exact_answer"),)
MAX_LENGTH = 9.0
SIDES = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")

IN_TRL: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "grpo": (Objective.GRPO, {"epsilon_high": 0.28}, SIDES),
    "dapo": (Objective.DAPO, {"epsilon_high": 0.28}, SIDES),
    "dr_grpo": (Objective.DrGRPO, {"epsilon_high": 0.28}, SIDES),
    "delta": (Objective.GRPO, {"epsilon_high": 0.28, "delta": 1.35}, SIDES),
    "gspo": (Objective.GSPO, {"epsilon": 0.01, "epsilon_high": 0.02}, SIDES),
    "cispo": (Objective.CISPO, {"max_ratio": 1.1}, ("cispo_clip_ratio",)),
    "sapo": (Objective.SAPO, {}, ()),
    "luspo": (Objective.LUSPO, {"epsilon": 0.01, "epsilon_high": 0.02}, SIDES),
    "vespo": (Objective.VESPO, {}, ("vespo/phi_seq_mean",)),
    "corrected": (Objective.GRPO, {"epsilon_high": 0.28, "use_bias_correction_kl": True}, SIDES),
    "gspo_corrected": (
        Objective.GSPO,
        {"epsilon": 0.2, "epsilon_high": 0.28, "use_bias_correction_kl": True},
        SIDES,
    ),
}
"""TRL's settings in `make_policy.py`: the class, its fields, and its metrics beside `kl`."""

EVERY = [
    Objective.GRPO,
    Objective.DAPO,
    Objective.DrGRPO,
    Objective.GSPO,
    Objective.CISPO,
    Objective.SAPO,
    Objective.GMPO,
    Objective.LUSPO,
    Objective.VESPO,
    Objective.DPPO,
    Objective.RLOO,
    Objective.ReinforcePlusPlus,
]


DIFFERENCE, RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"


@pytest.fixture(scope="module")
def figures() -> Any:
    with np.load(POLICY / "grpo.npz") as file:
        return dict(file)


def mask_of(figures: Any) -> np.ndarray:
    return np.arange(figures["logp"].shape[1]) < figures["lengths"][:, None]


def stats_of(logps: Any, lengths: Any) -> TokenStats:
    mask = jnp.asarray(np.arange(logps.shape[1]) < np.asarray(lengths)[:, None], jnp.float32)
    zeros = jnp.zeros_like(mask)
    return TokenStats(logps * mask, zeros, zeros, zeros, mask)


def inputs_of(figures: Any, logps: Any, *, is_on_policy: bool = False, advantages: Any = None) -> RolloutOutputs:
    advantages = figures["advantage"] if advantages is None else advantages
    per_token = jnp.asarray(np.broadcast_to(advantages.reshape(-1, 1), logps.shape), jnp.float32)
    old = None if is_on_policy else jnp.asarray(figures["old"], jnp.float32)
    stats, sampler = stats_of(logps, figures["lengths"]), jnp.asarray(figures["sampler"], jnp.float32)
    return RolloutOutputs(stats, per_token, jnp.full(len(logps), MAX_LENGTH), old, sampler)


def terms_of(objective: Any, figures: Any, logps: Any, **fields: Any) -> LossTerms:
    policy = inputs_of(figures, logps, **fields)
    reference = inputs_of(figures, jnp.asarray(figures["reference"], jnp.float32), **fields)
    weight = jnp.ones(len(logps))
    return losses.build(objective)(policy, reference if objective.needs_reference else None, weight)


def mean(ratio: WeightedMean) -> float:
    return float(ratio.total / ratio.count)


def value_and_grad(objective: Any, figures: Any, **fields: Any) -> tuple[float, LossTerms, np.ndarray]:
    def loss(logps: jax.Array) -> Any:
        terms = terms_of(objective, figures, logps, **fields)
        return terms.loss.total / terms.loss.count, terms

    logps = jnp.asarray(figures["logp"], jnp.float32)
    (value, terms), gradient = jax.value_and_grad(loss, has_aux=True)(logps)
    return float(value), terms, np.asarray(gradient)


@pytest.mark.parametrize("name", IN_TRL)
def test_what_trl_computes(name: str, figures: Any) -> None:
    cls, fields, metrics = IN_TRL[name]
    objective = cls(rewards=REWARDS, num_iterations=2, beta=0.3, **fields)
    value, terms, gradient = value_and_grad(objective, figures)
    assert value == pytest.approx(float(figures[f"{name}.loss"]), rel=2e-6, abs=2e-7)
    np.testing.assert_allclose(gradient, figures[f"{name}.gradient"], rtol=2e-5, atol=2e-7)
    assert set(terms.metrics) == {"kl", *metrics, f"{DIFFERENCE}/mean"}
    for metric in ("kl", *metrics):
        assert mean(terms.metrics[metric]) == pytest.approx(float(figures[f"{name}.{metric}"]), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_what_trl_computes_with_the_log_probs_of_another_sampler(level: Any, mode: Any, figures: Any) -> None:
    correction = ImportanceSampling(level=level, mode=mode, max_ratio=1.5, min_ratio=0.7)
    fields = {"epsilon_high": 0.28, "importance_sampling": correction}
    objective = Objective.DAPO(rewards=REWARDS, num_iterations=2, beta=0.3, **fields)
    value, terms, gradient = value_and_grad(objective, figures)
    name = f"{level}_{mode}"
    assert value == pytest.approx(float(figures[f"{name}.loss"]), rel=2e-6, abs=2e-7)
    np.testing.assert_allclose(gradient, figures[f"{name}.gradient"], rtol=2e-5, atol=2e-7)
    uncorrected, *_ = value_and_grad(attrs.evolve(objective, importance_sampling=None), figures)
    assert abs(value - uncorrected) > 1e-3
    # TRL reports ratios after the bounds alone; the raw ones say how far the sampler is.
    logs = np.where(mask_of(figures), figures["old"] - figures["sampler"], 0.0)
    raw = np.exp(logs if level == "token" else logs.sum(1, keepdims=True))
    counted = raw[mask_of(figures)] if level == "token" else raw
    assert mean(terms.metrics[f"{RATIO}/raw_mean"]) == pytest.approx(counted.mean(), rel=1e-6)
    is_out = (counted < 0.7) | (counted > 1.5)
    assert mean(terms.metrics[f"{RATIO}/clip_mean"]) == pytest.approx(is_out.mean())
    bounded = np.clip(counted, 0.7, 1.5) if mode == "truncate" else np.where(is_out, 0.0, counted)
    assert mean(terms.metrics[f"{RATIO}/mean"]) == pytest.approx(bounded.mean(), rel=1e-6)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_what_trl_computes_with_a_correction_in_the_ratio(mode: Any, figures: Any) -> None:
    correction = ImportanceSampling(level="token", mode=mode, max_ratio=1.5, min_ratio=0.7)
    fields = {"use_bias_correction_kl": True, "importance_sampling": correction}
    objective = Objective.VESPO(rewards=REWARDS, num_iterations=2, beta=0.3, **fields)
    value, terms, gradient = value_and_grad(objective, figures)
    name = f"vespo_token_{mode}"
    assert value == pytest.approx(float(figures[f"{name}.loss"]), rel=2e-6, abs=2e-7)
    np.testing.assert_allclose(gradient, figures[f"{name}.gradient"], rtol=2e-5, atol=2e-7)
    assert mean(terms.metrics["vespo/phi_seq_mean"]) == pytest.approx(
        float(figures[f"{name}.vespo/phi_seq_mean"]), rel=1e-5
    )


def test_what_trl_computes_with_an_off_policy_mask(figures: Any) -> None:
    fields = {"epsilon_high": 0.28, "off_policy_mask_threshold": 0.02}
    objective = Objective.DAPO(rewards=REWARDS, num_iterations=2, beta=0.3, **fields)
    value, terms, gradient = value_and_grad(objective, figures)
    assert value == pytest.approx(float(figures["masked.loss"]), rel=2e-6, abs=2e-7)
    np.testing.assert_allclose(gradient, figures["masked.gradient"], rtol=2e-5, atol=2e-7)
    mask = mask_of(figures)
    fallen = np.where(mask, figures["sampler"] - figures["logp"], 0.0).sum(1) / mask.sum(1)
    is_out = (figures["advantage"].reshape(-1) < 0) & (fallen > 0.02)
    assert 0 < is_out.mean() < 1
    assert mean(terms.metrics["sampling/off_policy_mask_ratio"]) == pytest.approx(is_out.mean())


def test_the_mean_ratio_of_a_completion_by_the_formula(figures: Any) -> None:
    settings = ImportanceSampling(level="sequence_mean", max_ratio=1.02, min_ratio=0.98, mode="mask")
    expected = [
        np.exp(np.mean((figures["old"] - figures["sampler"])[row, :length]))
        for row, length in enumerate(figures["lengths"])
    ]
    expected = [ratio if 0.98 <= ratio <= 1.02 else 0.0 for ratio in expected]
    assert 0 < np.count_nonzero(expected) < len(expected)
    logs = jnp.where(mask_of(figures), figures["old"] - figures["sampler"], 0.0)
    weights, _ = importance_weights(settings, logs, jnp.asarray(mask_of(figures)))
    np.testing.assert_allclose(weights[:, 0], expected, rtol=1e-6)


def test_how_far_the_sampler_is(figures: Any) -> None:
    # On policy, the probabilities of sampling are those of the update itself.
    for is_on_policy, name in ((True, "logp"), (False, "old")):
        _, terms, _ = value_and_grad(Objective.DAPO(rewards=REWARDS), figures, is_on_policy=is_on_policy)
        differences = np.abs(figures[name] - figures["sampler"])[mask_of(figures)]
        assert mean(terms.metrics[f"{DIFFERENCE}/mean"]) == pytest.approx(differences.mean(), rel=1e-6)
        assert terms.maxima is not None
        assert float(terms.maxima[f"{DIFFERENCE}/max"]) == pytest.approx(differences.max(), rel=1e-6)


def test_a_correction_needs_the_log_probs_of_the_sampler(figures: Any) -> None:
    objective = Objective.DAPO(rewards=REWARDS, importance_sampling=ImportanceSampling())
    masked = Objective.DAPO(rewards=REWARDS, off_policy_mask_threshold=0.1)
    inputs = inputs_of(figures, jnp.asarray(figures["logp"], jnp.float32))._replace(sampler_logps=None)
    with pytest.raises(ValueError, match="importance_sampling needs the log-probabilities of the sampler"):
        losses.build(objective)(inputs, None, jnp.ones(12))
    with pytest.raises(ValueError, match="off_policy_mask_threshold needs the log-probabilities of the sampler"):
        losses.build(masked)(inputs, None, jnp.ones(12))


def test_what_trl_computes_for_rloo(figures: Any) -> None:
    with np.load(POLICY / "rloo.npz") as file:
        expected = dict(file)
    objective = Objective.RLOO(rewards=REWARDS, num_iterations=2, beta=0.3, epsilon_high=0.28)
    value, terms, gradient = value_and_grad(objective, figures, advantages=expected["advantage"])
    assert value == pytest.approx(float(expected["loss"]), rel=2e-6)
    np.testing.assert_allclose(gradient, expected["gradient"], rtol=2e-5, atol=2e-7)
    for metric in SIDES:
        assert mean(terms.metrics[metric]) == pytest.approx(float(expected[metric]), rel=1e-5)


def test_gmpo_by_the_formula(figures: Any) -> None:
    objective = Objective.GMPO(rewards=REWARDS, num_iterations=2, epsilon=0.2)
    value, _, gradient = value_and_grad(objective, figures)
    advantages, lengths = figures["advantage"].reshape(-1), figures["lengths"]
    costs, slopes = [], np.zeros_like(figures["logp"])
    for row, (advantage, length) in enumerate(zip(advantages, lengths, strict=True)):
        x = (figures["logp"] - figures["old"])[row, :length]
        bounded = np.minimum(x, 0.2) if advantage > 0 else np.maximum(x, -0.2)
        ratio = np.exp(bounded.mean())
        costs.append(-ratio * advantage)
        slopes[row, :length] = -ratio * advantage * (bounded == x) / length / len(lengths)
    assert value == pytest.approx(np.mean(costs), rel=2e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=2e-5, atol=2e-7)


def test_dppo_by_the_formula(figures: Any) -> None:
    objective = Objective.DPPO(rewards=REWARDS, num_iterations=2, max_divergence=0.1, max_ratio=1.3)
    value, terms, gradient = value_and_grad(objective, figures)
    new, old = figures["logp"], figures["old"]
    mask = np.arange(new.shape[1]) < figures["lengths"][:, None]
    advantages = np.broadcast_to(figures["advantage"].reshape(-1, 1), new.shape)
    moved, ratio = np.exp(new) - np.exp(old), np.exp(new - old)
    is_dropped = np.where(advantages > 0, moved > 0.1, moved < -0.1) & (advantages != 0)
    counted = mask & ~is_dropped
    assert value == pytest.approx((-np.minimum(ratio, 1.3) * advantages * counted).sum() / mask.sum(), rel=2e-6)
    slopes = -ratio * (ratio < 1.3) * advantages * counted / mask.sum()
    np.testing.assert_allclose(gradient, slopes, rtol=2e-5, atol=2e-7)
    assert 0 < mean(terms.metrics["clip_ratio/region_mean"]) == pytest.approx((is_dropped & mask).sum() / mask.sum())


@pytest.mark.parametrize("cls", EVERY)
def test_the_first_update_has_the_gradient_of_reinforce(cls: Any, figures: Any) -> None:
    # With the policy that sampled, every ratio is 1: the gradient is -A, over what the loss is a mean over.
    objective = cls(rewards=REWARDS, beta=0.0)
    _, terms, gradient = value_and_grad(objective, figures, is_on_policy=True)
    advantages, lengths = figures["advantage"].reshape(-1, 1), figures["lengths"]
    mask = np.arange(gradient.shape[1]) < lengths[:, None]
    per_completion = {Objective.GRPO, Objective.GSPO, Objective.SAPO, Objective.GMPO}
    if cls in per_completion:
        divisor = lengths[:, None] * len(lengths)
    elif cls in {Objective.RLOO, Objective.LUSPO}:  # sums over the tokens of a completion
        divisor = len(lengths)
    else:
        divisor = MAX_LENGTH * len(lengths) if cls is Objective.DrGRPO else lengths.sum()
    np.testing.assert_allclose(gradient, -(advantages * mask) / divisor, rtol=2e-6, atol=1e-8)
    assert set(terms.metrics) == {f"{DIFFERENCE}/mean"}


def test_estimates_of_the_divergence() -> None:
    ratio = jnp.array([-0.5, 0.0, 2.0])
    np.testing.assert_allclose(kl("k1", ratio), [-0.5, 0.0, 2.0])
    np.testing.assert_allclose(kl("k2", ratio), [0.125, 0.0, 2.0])
    np.testing.assert_allclose(kl("k3", ratio), [np.exp(0.5) - 1.5, 0.0, np.exp(-2.0) + 1.0], rtol=1e-6)


def test_the_corrected_estimate_has_the_gradient_of_the_divergence(figures: Any) -> None:
    # On policy, the corrected k3 has k2's gradient, log-ratio by log-ratio; plain k3 has another, k1 a constant.
    def slopes(**fields: Any) -> np.ndarray:
        objective = Objective.DAPO(rewards=REWARDS, beta=1.0, **fields)
        zero = np.zeros_like(figures["advantage"])
        return value_and_grad(objective, figures, is_on_policy=True, advantages=zero)[2] * figures["lengths"].sum()

    mask = np.arange(figures["logp"].shape[1]) < figures["lengths"][:, None]
    log_ratio = np.where(mask, figures["logp"] - figures["reference"], 0)
    np.testing.assert_allclose(slopes(use_bias_correction_kl=True), log_ratio, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes(kl_estimator="k2"), log_ratio, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes(), -np.expm1(-log_ratio), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slopes(kl_estimator="k1"), mask, rtol=1e-5)


@pytest.mark.parametrize("cls", EVERY)
def test_rows_that_fill_a_batch_do_not_count(cls: Any, figures: Any) -> None:
    objective = cls(rewards=REWARDS, beta=0.1, num_iterations=2)
    policy, reference = (inputs_of(figures, jnp.asarray(figures[name], jnp.float32)) for name in ("logp", "reference"))
    rows = len(figures["lengths"])
    whole = losses.build(objective)(policy, reference, jnp.ones(rows))
    filled = (jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), inputs) for inputs in (policy, reference))
    more = losses.build(objective)(*filled, jnp.concatenate([jnp.ones(rows), jnp.zeros(2)]))
    assert mean(more.loss) == pytest.approx(mean(whole.loss), rel=1e-6)
    assert whole.maxima is not None
    nothing = losses.build(objective)(policy, reference, jnp.zeros(rows)).maxima
    assert nothing is not None
    assert set(map(float, nothing.values())) == {-np.inf}
    assert whole.maxima == more.maxima
    for name in whole.metrics:
        assert mean(more.metrics[name]) == pytest.approx(mean(whole.metrics[name]), rel=1e-6)


@pytest.mark.parametrize("cls", EVERY)
def test_parts_of_a_batch_add_up_to_it(cls: Any, figures: Any) -> None:
    # Trainers that divide each micro-batch by its own tokens or rows give another loss for another cut.
    objective = cls(rewards=REWARDS, beta=0.1, num_iterations=2)
    inputs = [inputs_of(figures, jnp.asarray(figures[name], jnp.float32)) for name in ("logp", "reference")]
    loss = losses.build(objective)
    whole = loss(*inputs, jnp.ones(12)).loss
    parts, summed = [], loss(*inputs, jnp.ones(12)).zeros()
    for start, stop in ((0, 2), (2, 7), (7, 12)):
        cut = [jax.tree.map(lambda x: x[start:stop], each) for each in inputs]  # noqa: B023
        terms = loss(*cut, jnp.ones(stop - start))
        parts, summed = [*parts, terms.loss], summed.added_to(terms)
    assert float(sum(part.count for part in parts)) == float(whole.count)
    assert float(sum(part.total for part in parts)) == pytest.approx(float(whole.total), rel=2e-6)
    assert summed.maxima == loss(*inputs, jnp.ones(12)).maxima
    assert float(summed.loss.total) == pytest.approx(float(whole.total), rel=2e-6)
