"""Losses that read entropies: equal to TRL's code, in value and gradients, over any micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnxdsl import AdaptiveEntropy, Objective, Reward, losses
from nnxdsl.data.batch import RolloutBatch
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.losses.policy_gradient import RolloutOutputs
from nnxdsl.optim import entropy_control
from nnxdsl.program import heads
from nnxdsl.program.forward import ForwardOutput
from nnxdsl.program.loss_fn import EntropyBonus, LossFn, divide
from nnxdsl.rollouts.rollouts import high_entropy

FIGURES = Path(__file__).parents[1] / "reference" / "policy" / "grpo.npz"
FIELDS: dict[str, Any] = {
    "rewards": (Reward("exact_answer"),),
    "num_iterations": 2,
    "beta": 0.3,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
}
IN_TRL: dict[str, Any] = {
    "bonus": Objective.GRPO(entropy_coef=0.05, **FIELDS),
    "quantile": Objective.GRPO(top_entropy_quantile=0.4, **FIELDS),
    "quantile_gspo": Objective.GSPO(top_entropy_quantile=0.4, **FIELDS),
    "both": Objective.DAPO(entropy_coef=0.05, top_entropy_quantile=0.4, **FIELDS),
}
"""TRL's settings in `make_policy.py`."""


@pytest.fixture(scope="module")
def figures() -> Any:
    with np.load(FIGURES) as file:
        return dict(file)


def batch_of(figures: Any, share: float) -> RolloutBatch:
    """The completions, whose tokens do not matter."""
    rows, length = figures["logp"].shape
    mask = np.arange(length) < figures["lengths"][:, None]
    chosen = high_entropy(figures["entropy"].astype(np.float32), mask, share) if share < 1 else None
    ids, ones = np.zeros((rows, length), np.int32), np.ones(rows, np.float32)
    advantages = np.broadcast_to(figures["advantage"].reshape(-1, 1), mask.shape).astype(np.float32)
    old = figures["old"].astype(np.float32)
    return RolloutBatch(
        ids, figures["lengths"], ids, figures["lengths"], mask, ones, advantages, ones * 9, old, entropy_mask=chosen
    )


def output(logps: Any, entropy: Any, batch: RolloutBatch) -> ForwardOutput:
    mask = jnp.asarray(batch.loss_mask, jnp.float32)
    stats = TokenStats(logps * mask, 0 * mask, entropy * mask, 0 * mask, mask)
    inputs = RolloutOutputs(
        stats, batch.advantages, batch.max_completion_length, batch.old_logps, entropy_mask=batch.entropy_mask
    )
    return ForwardOutput(inputs, stats, None)


@pytest.mark.parametrize("rows", [12, 5])
@pytest.mark.parametrize("name", IN_TRL)
def test_what_trl_computes(name: str, rows: int, figures: Any) -> None:
    objective = IN_TRL[name]
    bonus = EntropyBonus(-objective.entropy_coef, mean_over=objective.mean_over)
    loss = LossFn(losses.build(objective), heads.build(objective), (bonus,) if objective.entropy_coef else ())
    batch = batch_of(figures, objective.top_entropy_quantile)
    of_batch = loss.for_batch(batch)

    def mean(logps: jax.Array, entropy: jax.Array) -> Any:
        totals = []
        for start in range(0, len(logps), rows):
            part = jax.tree.map(lambda x: x[start : start + rows], batch)  # noqa: B023
            out = output(logps[start : start + rows], entropy[start : start + rows], part)
            reference = output(jnp.asarray(figures["reference"], jnp.float32)[start : start + rows], 0.0, part)
            totals.append(of_batch(out, reference.loss_inputs, part))
        terms = totals[0]
        for more in totals[1:]:
            terms = terms.added_to(more)
        return loss.mean(terms), terms

    inputs = jnp.asarray(figures["logp"], jnp.float32), jnp.asarray(figures["entropy"], jnp.float32)
    (value, terms), gradients = jax.jit(jax.value_and_grad(mean, argnums=(0, 1), has_aux=True))(*inputs)
    assert float(value) == pytest.approx(float(figures[f"{name}.loss"]), rel=2e-6, abs=2e-7)
    by_entropy = figures.get(f"{name}.entropy_gradient", np.zeros_like(figures["logp"]))
    for actual, expected in zip(gradients, (figures[f"{name}.gradient"], by_entropy), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-7)
    if objective.entropy_coef:
        policy = terms.metrics["policy_loss"]
        assert float(policy.total / policy.count) == pytest.approx(float(figures[f"{name}.policy_loss"]), rel=2e-6)


def test_an_adaptive_weight_is_that_of_trl(figures: Any) -> None:
    adaptive = AdaptiveEntropy(target=0.7, delta=0.04, min_coef=0.05, max_coef=0.15)
    objective = Objective.GRPO(entropy_coef=0.1, adaptive_entropy=adaptive, **FIELDS)
    loss = LossFn(losses.build(objective), heads.build(objective), (EntropyBonus(0.0, mean_over=objective.mean_over),))
    batch = batch_of(figures, 1)
    logps = jnp.asarray(figures["logp"], jnp.float32)
    reference = output(jnp.asarray(figures["reference"], jnp.float32), 0.0, batch).loss_inputs

    @jax.jit
    def step(entropy: jax.Array, optimizer: Any) -> Any:
        weighted = loss.with_coef(EntropyBonus.name, -entropy_control.coef(adaptive, optimizer))
        terms = weighted(output(logps, entropy, batch), reference, batch)
        after = entropy_control.after_step(adaptive, optimizer, divide(*terms.metrics[EntropyBonus.name]))
        return weighted.mean(terms), after

    optimizer: Any = entropy_control.wrap(optax.identity(), 0.1).init({})
    steps = (figures[f"adaptive.{name}"] for name in ("factors", "loss", "coef"))
    for factor, expected, coef in zip(*steps, strict=True):
        value, optimizer = step(jnp.asarray(factor * figures["entropy"], jnp.float32), optimizer)
        assert float(value) == pytest.approx(float(expected), rel=2e-6, abs=2e-7)
        assert float(optimizer.coef) == pytest.approx(float(coef), rel=1e-6)


def test_a_share_of_the_tokens_of_highest_entropy() -> None:
    entropy = np.array([[0.5, 0.1, 9.0], [0.2, 0.4, 0.3]], np.float32)
    mask = np.array([[True, True, False], [True, True, True]])
    assert high_entropy(entropy, mask, 0.5).tolist() == [[True, False, False], [False, True, True]]
    assert high_entropy(entropy, mask, 0.01).tolist() == [[True, False, False], [False, False, False]]
    assert not high_entropy(entropy, mask & False, 0.5).any()
