"""Distances from a teacher: TRL's and float64's figures, in value and gradient, whatever the tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from nnxdsl import Distance, Model, Objective
from nnxdsl.losses import distillation
from nnxdsl.losses.distillation import TeacherOutputs, divergence
from nnxdsl.losses.lm_head import token_stats

FIGURES = Path(__file__).parents[1] / "reference" / "policy" / "jsd.npz"
DISTANCES: dict[str, Any] = {
    "0.0": Distance.ForwardKL(),
    "0.25": Distance.JSD(beta=0.25),
    "0.5": Distance.JSD(),
    "1.0": Distance.ReverseKL(),
}


def asked(kind: Any, temperature: float = 1.0) -> Any:
    return Objective.Distill(teacher=Model.Gemma3("tiny"), distance=kind, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", DISTANCES)
def test_it_is_what_trl_computes(beta: str, temperature: float) -> None:
    # With the identity for a head, hidden states are logits.
    figures = np.load(FIGURES)
    student, teacher = (jnp.asarray(figures[name], jnp.float32)[None] for name in ("student", "teacher"))
    head, mask = jnp.eye(student.shape[-1]), jnp.ones(student.shape[:2], bool)

    def total(hidden: jax.Array) -> jax.Array:
        return jnp.sum(
            divergence(hidden, head, TeacherOutputs(teacher, head), mask, asked(DISTANCES[beta], temperature))
        )

    value, gradient = jax.jit(jax.value_and_grad(total))(student)
    assert float(value) == pytest.approx(float(figures[f"{beta}/{temperature}.loss"]), rel=2e-6)
    np.testing.assert_allclose(gradient[0], figures[f"{beta}/{temperature}.gradient"], rtol=2e-5, atol=3e-7)


def in_float64(s: np.ndarray, t: np.ndarray, beta: str) -> np.ndarray:
    q, p = log_softmax(s, axis=-1), log_softmax(t, axis=-1)
    if beta == "0.0":
        return (np.exp(p) * (p - q)).sum(-1)
    if beta == "1.0":
        return (np.exp(q) * (q - p)).sum(-1)
    b = float(beta)
    m = np.logaddexp(np.log(b) + p, np.log1p(-b) + q)
    return (b * np.exp(p) * (p - m) + (1 - b) * np.exp(q) * (q - m)).sum(-1)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("beta", ["0.0", "0.25", "1.0"])
def test_tiles_change_nothing(beta: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A student and a teacher of other widths, capped logits, 3 chunks by 5 tiles of which the last overlaps, a mask.
    draw = np.random.default_rng(3)
    vocab_size, caps = 47, (5.0, 4.0)
    hidden, taught = draw.normal(size=(2, 9, 6)), draw.normal(size=(2, 9, 10))
    head, other = draw.normal(size=(vocab_size, 6)), draw.normal(size=(vocab_size, 10))
    mask = draw.random((2, 9)) < 0.7
    objective = asked(DISTANCES[beta], 1.5)

    def capped(hidden: np.ndarray, head: np.ndarray, cap: float) -> np.ndarray:
        return cap * np.tanh(hidden @ head.T / cap) / 1.5

    expected = in_float64(capped(hidden, head, caps[0]), capped(taught, other, caps[1]), beta) * mask

    def total(hidden: jax.Array, head: jax.Array) -> Any:
        inputs = TeacherOutputs(jnp.asarray(taught, jnp.float32), jnp.asarray(other, jnp.float32), caps[1])
        result = divergence(hidden, head, inputs, jnp.asarray(mask), objective, caps[0])
        return jnp.sum(result * jnp.arange(1.0, 10.0)), result

    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    whole = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*arrays)
    monkeypatch.setattr(token_stats, "CPU", token_stats.TileSizes(4 * 10 * 10, 7))
    chunks = token_stats.Chunks.of(jnp.asarray(mask), (vocab_size, 10), None, token_stats.ShardContext())
    assert (chunks.count, chunks.tile_vocab) == (3, 10)
    tiled = jax.jit(jax.value_and_grad(lambda *x: total(*x), argnums=(0, 1), has_aux=True))(*arrays)
    for (_, actual), _ in (whole, tiled):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    for one, other_ in zip(whole[1], tiled[1], strict=True):
        np.testing.assert_allclose(one, other_, rtol=1e-4, atol=2e-6)

    # Against central differences of the float64 formula, for one direction of states and head together.
    steps = draw.normal(size=hidden.shape), draw.normal(size=head.shape)
    weight, size = mask * np.arange(1.0, 10.0), 1e-5
    ends = [
        (
            in_float64(
                capped(hidden + sign * steps[0], head + sign * steps[1], caps[0]), capped(taught, other, caps[1]), beta
            )
            * weight
        ).sum()
        for sign in (size, -size)
    ]
    along = sum(float(np.sum(np.asarray(g) * step)) for g, step in zip(tiled[1], steps, strict=True))
    assert along == pytest.approx((ends[0] - ends[1]) / (2 * size), rel=1e-4)
    frozen = jax.jit(jax.grad(lambda x: total(x, arrays[1])[0]))(arrays[0])  # of a head that is not trained
    np.testing.assert_allclose(frozen, tiled[1][0], rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_equal_models_are_no_distance_apart() -> None:
    draw = np.random.default_rng(4)
    hidden, head = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((1, 4, 6), (20, 6)))
    for kind in DISTANCES.values():
        inputs = TeacherOutputs(hidden, head)
        actual, back = jax.vjp(
            lambda x, values=inputs, kind=kind: divergence(x, head, values, jnp.ones((1, 4), bool), asked(kind)), hidden
        )
        np.testing.assert_allclose(actual, np.zeros((1, 4)), atol=1e-6)
        np.testing.assert_allclose(back(jnp.ones((1, 4)))[0], jnp.zeros_like(hidden), atol=1e-6)


def test_the_loss_mixes_hard_labels_and_scales_with_the_square_of_the_temperature() -> None:
    stats = token_stats.TokenStats(*jnp.array([[[-2.0, -3.0]], [[0, 0]], [[0, 0]], [[0, 0]], [[1.0, 1.0]]]))
    read = distillation.DistillationInputs(stats, jnp.array([[0.5, 0.25]]))
    objective = Objective.Distill(teacher=Model.Gemma3("tiny"), temperature=2.0, hard_weight=0.25)
    terms = distillation.build(objective)(read, None, jnp.ones(1))
    assert float(terms.loss.total / terms.loss.count) == pytest.approx(0.75 * 4 * 0.375 + 0.25 * 2.5)
    assert float(terms.metrics["distill_loss"].total / 2) == pytest.approx(0.375)
    assert float(terms.metrics["nll_loss"].total / 2) == pytest.approx(2.5)
