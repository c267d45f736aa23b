"""Divergences over a teacher's top-k tokens: TRL's figures and float64's, in value and gradient, in any tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

from nnxdsl import Distance, Model, Objective
from nnxdsl.losses.distillation import TeacherOutputs, divergence
from nnxdsl.losses.lm_head import token_stats
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, teacher_top_k, top_k_divergence

FIGURES = Path(__file__).parents[1] / "reference" / "policy" / "top_words.npz"
DISTANCES: dict[str, Any] = {
    "0.0": Distance.ForwardKL(),
    "0.25": Distance.JSD(beta=0.25),
    "0.5": Distance.JSD(),
    "1.0": Distance.ReverseKL(),
}


def asked(kind: Any, top_k: int, temperature: float = 1.0) -> Any:
    return Objective.Distill(teacher=Model.Gemma3("tiny"), distance=kind, temperature=temperature, top_k=top_k)


CASES = [(beta, temperature, top_k) for beta in DISTANCES for temperature in (1.0, 2.5) for top_k in (1, 4)]
SHORT = [("0.0", 2.5, 4), ("0.5", 1.0, 1)]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("beta", "temperature", "top_k"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_it_is_what_trl_computes(beta: str, temperature: float, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the identity for a head, hidden states are logits. 3 chunks by 3 tiles of 5 tokens, which overlap.
    monkeypatch.setattr(token_stats, "CPU", token_stats.TileSizes(4 * 13 * 5, 2))
    figures = np.load(FIGURES)
    student, teacher = (jnp.asarray(figures[name], jnp.float32)[None] for name in ("student", "teacher"))
    head, mask = jnp.eye(student.shape[-1]), jnp.ones(student.shape[:2], bool)
    chunks = token_stats.Chunks.of(mask, head.shape, None, token_stats.ShardContext())
    assert (chunks.count, chunks.tile_vocab) == (3, 5)
    objective = asked(DISTANCES[beta], top_k, temperature)

    def total(hidden: jax.Array, top: TeacherTopK) -> jax.Array:
        return jnp.sum(top_k_divergence(hidden, head, top, mask, objective))

    top = jax.jit(lambda x: teacher_top_k(x, head, mask, objective))(teacher)
    np.testing.assert_array_equal(top.token_ids[0], figures[f"{temperature}/{top_k}.words"])
    np.testing.assert_allclose(top.logp[0], figures[f"{temperature}/{top_k}.logp"], rtol=2e-6, atol=1e-6)
    value, gradient = jax.jit(jax.value_and_grad(total))(student, top)
    name = f"{beta}/{temperature}/{top_k}"
    assert float(value) == pytest.approx(float(figures[f"{name}.loss"]), rel=3e-6)
    np.testing.assert_allclose(gradient[0], figures[f"{name}.gradient"], rtol=3e-5, atol=5e-7)


def in_float64(s: np.ndarray, t: np.ndarray, beta: str, top_k: int) -> np.ndarray:
    q, p = log_softmax(s, axis=-1), log_softmax(t, axis=-1)
    order = np.argsort(-p, axis=-1, kind="stable")
    q, p = (np.take_along_axis(x, order, axis=-1) for x in (q, p))
    if top_k < s.shape[-1]:
        q, p = (np.append(x[..., :top_k], logsumexp(x[..., top_k:], axis=-1)[..., None], axis=-1) for x in (q, p))
    if beta == "0.0":
        return (np.exp(p) * (p - q)).sum(-1)
    if beta == "1.0":
        return (np.exp(q) * (q - p)).sum(-1)
    b = float(beta)
    m = np.logaddexp(np.log(b) + p, np.log1p(-b) + q)
    return (b * np.exp(p) * (p - m) + (1 - b) * np.exp(q) * (q - m)).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize(("beta", "top_k"), [("0.0", 3), ("0.25", 14), ("1.0", 47)])
def test_tiles_change_nothing(beta: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other widths, capped logits, 3 chunks by 5 tiles of which the last overlaps, a mask; a `k` larger than a tile.
    draw = np.random.default_rng(3)
    vocab_size, caps = 47, (5.0, 4.0)
    hidden, taught = draw.normal(size=(2, 9, 6)), draw.normal(size=(2, 9, 10))
    head, other = draw.normal(size=(vocab_size, 6)), draw.normal(size=(vocab_size, 10))
    mask = draw.random((2, 9)) < 0.7
    objective = asked(DISTANCES[beta], top_k, 1.5)

    def capped(hidden: np.ndarray, head: np.ndarray, cap: float) -> np.ndarray:
        return cap * np.tanh(hidden @ head.T / cap) / 1.5

    theirs = capped(taught, other, caps[1])
    expected = in_float64(capped(hidden, head, caps[0]), theirs, beta, top_k) * mask

    def total(hidden: jax.Array, head: jax.Array) -> Any:
        inputs = jnp.asarray(taught, jnp.float32), jnp.asarray(other, jnp.float32)
        top = teacher_top_k(*inputs, jnp.asarray(mask), objective, caps[1])
        result = top_k_divergence(hidden, head, top, jnp.asarray(mask), objective, caps[0])
        return jnp.sum(result * jnp.arange(1.0, 10.0)), (result, top)

    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    whole = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*arrays)
    monkeypatch.setattr(token_stats, "CPU", token_stats.TileSizes(4 * 10 * 10, 7))
    assert token_stats.Chunks.of(jnp.asarray(mask), (vocab_size, 10), None, token_stats.ShardContext()).count == 3
    tiled = jax.jit(jax.value_and_grad(lambda *x: total(*x), argnums=(0, 1), has_aux=True))(*arrays)
    order = np.argsort(-theirs, axis=-1, kind="stable")[..., :top_k]
    for (_, (actual, top)), _ in (whole, tiled):
        np.testing.assert_array_equal(np.asarray(top.token_ids)[mask], order[mask])
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    for one, other_ in zip(whole[1], tiled[1], strict=True):
        np.testing.assert_allclose(one, other_, rtol=1e-4, atol=2e-6)

    # Against central differences of the float64 formula, for one direction of states and head together.
    steps = draw.normal(size=hidden.shape), draw.normal(size=head.shape)
    weight, size = mask * np.arange(1.0, 10.0), 1e-5
    ends = [
        (
            in_float64(capped(hidden + sign * steps[0], head + sign * steps[1], caps[0]), theirs, beta, top_k) * weight
        ).sum()
        for sign in (size, -size)
    ]
    along = sum(float(np.sum(np.asarray(g) * step)) for g, step in zip(tiled[1], steps, strict=True))
    assert along == pytest.approx((ends[0] - ends[1]) / (2 * size), rel=1e-4)
    frozen = jax.jit(jax.grad(lambda x: total(x, arrays[1])[0]))(arrays[0])  # of a head that is not trained
    np.testing.assert_allclose(frozen, tiled[1][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        Distance.ForwardKL(),
        pytest.param(Distance.ReverseKL(), marks=pytest.mark.slow),
        pytest.param(Distance.JSD(beta=0.3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_k_of_the_vocabulary_size_it_is_the_full_divergence(kind: Any) -> None:
    """No others are left: no NaN comes of their empty class, neither in value nor in gradient."""
    draw = np.random.default_rng(4)
    hidden, taught, head, other = (
        jnp.asarray(draw.normal(size=size), jnp.float32) for size in ((2, 4, 6), (2, 4, 5), (20, 6), (20, 5))
    )
    mask = jnp.asarray(draw.random((2, 4)) < 0.8)
    objective = asked(kind, 20, 2.0)
    top = jax.jit(lambda x, w: teacher_top_k(x, w, mask, objective))(taught, other)
    assert np.all(np.asarray(top.logp)[..., -1][np.asarray(mask)] < -1e29)

    def here(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(top_k_divergence(x, w, top, mask, objective))

    def full(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(divergence(x, w, TeacherOutputs(taught, other), mask, objective))

    (value, actual), (expected, whole) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, head) for f in (here, full)
    )
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(actual, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_a_sure_model_leaves_to_the_others_is_not_lost() -> None:
    """Of a student that gives the others e^-30, which is nothing beside one in float32, forward KL is still right."""
    logits = jnp.array([[[30.0, 0.0, -1.0]]])
    top = TeacherTopK(jnp.array([[[0]]]), jnp.log(jnp.array([[[0.75, 0.25]]])))
    mask, objective = jnp.ones((1, 1), bool), asked(Distance.ForwardKL(), 1)
    actual = jax.jit(lambda x: top_k_divergence(x, jnp.eye(3), top, mask, objective))(logits)
    rest = np.log1p(np.exp(-1.0)) - 30
    assert float(actual[0, 0]) == pytest.approx(0.75 * np.log(0.75) + 0.25 * (np.log(0.25) - rest), rel=1e-6)
