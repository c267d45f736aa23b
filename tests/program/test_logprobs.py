"""Log-probabilities in chunks against naive float64 figures, and the packed layout of pairs against ordinary rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lab.model import Small

from nnxdsl import Experiment, Objective, compile
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.models.attention import right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.program.compiler import State
from nnxdsl.program.forward import Forward
from nnxdsl.program.logprobs import token_stats

B, N, D, V = 3, 7, 5, 11


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    hidden = draw.standard_normal((B, N, D)).astype(np.float32)
    head = (2 * draw.standard_normal((V, D))).astype(np.float32)
    targets = draw.integers(0, V, (B, N)).astype(np.int32)
    return hidden, head, targets, draw.random((B, N)) < 0.6


def naive(hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logp = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return {
        "logp": np.where(mask, logp, 0),
        "entropy": np.where(mask, -(np.exp(log_p) * log_p).sum(-1), 0),
        "correct": np.where(mask, log_p.argmax(-1) == targets, 0).astype(np.float64),
        "mask": mask.astype(np.float64),
    }


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), chunk=st.sampled_from([1, 2, 3 * B, 5 * B, N * B, 1000]))
def test_equal_to_the_naive(seed: int, chunk: int) -> None:
    args = inputs(seed)
    found = token_stats(*args, chunk)
    for name, expected in naive(*args).items():
        np.testing.assert_allclose(getattr(found, name), expected, rtol=0, atol=3e-6, err_msg=name)


@pytest.mark.parametrize("chunk", [1, 2 * B, 1000])
def test_gradients_of_hidden_states_and_head(chunk: int) -> None:
    hidden, head, targets, mask = inputs()
    weight = np.random.default_rng(1).standard_normal((B, N)).astype(np.float32)

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        stats = token_stats(hidden, head, targets, mask, chunk)
        # Entropy and correctness must give no gradient.
        return jnp.sum(stats.logp * weight) + 3 * jnp.sum(stats.entropy) + jnp.sum(stats.correct)

    for_hidden, for_head = jax.grad(loss, argnums=(0, 1))(hidden, head)
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    toward = (np.eye(V)[targets] - probability) * (weight * mask)[..., None]
    np.testing.assert_allclose(for_hidden, toward @ head.astype(np.float64), rtol=0, atol=5e-6)
    np.testing.assert_allclose(for_head, np.einsum("bnv,bnd->vd", toward, hidden), rtol=0, atol=5e-6)
    # With a frozen head nothing changes for the hidden states.
    alone = jax.grad(lambda hidden: loss(hidden, jnp.asarray(head)))(hidden)
    np.testing.assert_allclose(alone, for_hidden, rtol=0, atol=1e-6)


def test_bfloat16_hidden_states_are_multiplied_into_float32() -> None:
    hidden, head, targets, mask = inputs()
    low_hidden, low_head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    found = token_stats(low_hidden, head, targets, mask, 6)
    assert found.logp.dtype == jnp.float32
    wide = naive(np.asarray(low_hidden, np.float32), np.asarray(low_head, np.float32), targets, mask)
    np.testing.assert_allclose(found.logp, wide["logp"], rtol=0, atol=3e-6)


def test_masked_positions_may_hold_anything() -> None:
    hidden, head, targets, mask = inputs()
    mask[0, 2] = mask[1, 6] = False
    odd = targets.copy()
    odd[0, 2], odd[1, 6] = 10**6, -(10**6)

    def run(targets: np.ndarray) -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(lambda h: jnp.sum(token_stats(h, head, targets, mask, 4).logp))(jnp.asarray(hidden))

    for found, expected in zip(run(odd), run(targets), strict=True):
        np.testing.assert_array_equal(found, expected)


def model_of(experiment: Experiment, trained: Callable[..., State]) -> Decoder:
    program = compile(experiment)
    state = trained(program)
    template, leaves = program.policy(state)
    model = template.merge(leaves)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("model", [Small(), Small(layers=3, window=3)], ids=["periods", "tail"])
def test_packed_pairs_equal_ordinary_rows(
    model: Small, experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., State]
) -> None:
    decoder = model_of(experiment(model=model), trained)
    batch = pairs(5, seed=3)
    found, stats = jax.jit(lambda batch: Forward(jnp.float32, "none", 9).pairs(decoder, batch))(batch)
    sizes = batch.prompt_length, batch.chosen_length, batch.rejected_length
    assert len(set(zip(*sizes, strict=True))) == 5
    tokens, first = np.zeros((10, 16), np.int32), np.zeros(10, np.int32)
    length = np.zeros(10, np.int32)
    for row in range(5):
        prompt = batch.prompt[row][batch.prompt.shape[1] - batch.prompt_length[row] :]
        for side, name in enumerate(("chosen", "rejected")):
            ids = np.concatenate([prompt, getattr(batch, name)[row][: getattr(batch, f"{name}_length")[row]]])
            tokens[2 * row + side, : len(ids)] = ids
            first[2 * row + side], length[2 * row + side] = len(prompt), len(ids)
    hidden, _ = jax.jit(lambda t, n: decoder(t, right_padded(n, 16), dtype=jnp.float32))(tokens, length)
    slots = np.arange(1, 16)
    mask = (slots >= first[:, None]) & (slots < length[:, None])
    expected = naive(np.asarray(hidden)[:, :-1], np.asarray(decoder.head()), tokens[:, 1:], mask)
    sums = expected["logp"].sum(1).reshape(5, 2)
    np.testing.assert_allclose(found.chosen, sums[:, 0], rtol=1e-6, atol=2e-5)
    np.testing.assert_allclose(found.rejected, sums[:, 1], rtol=1e-6, atol=2e-5)
    np.testing.assert_array_equal(found.chosen_tokens, batch.chosen_length)
    np.testing.assert_array_equal(found.rejected_tokens, batch.rejected_length)
    np.testing.assert_allclose(jnp.sum(stats.entropy), expected["entropy"].sum(), rtol=1e-5)
    assert float(jnp.sum(stats.correct)) == expected["correct"].sum()
    assert float(jnp.sum(stats.mask)) == mask.sum()


def test_the_sides_do_not_see_each_other(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., State]
) -> None:
    decoder = model_of(experiment(), trained)
    run = jax.jit(lambda batch: Forward(jnp.float32, "none", 64).pairs(decoder, batch)[0])
    batch = pairs(4)
    other = run(batch._replace(rejected=pairs(4, seed=9).rejected))
    np.testing.assert_array_equal(run(batch).chosen, other.chosen)
    assert not np.array_equal(run(batch).rejected, other.rejected)
    # Neither what stands in the padding matters, nor an id that a tokenizer might call its padding.
    padded = batch._replace(
        prompt=np.where(batch.prompt == 0, 7, batch.prompt), chosen=np.where(batch.chosen == 0, 7, batch.chosen)
    )
    np.testing.assert_array_equal(run(padded).chosen, run(batch).chosen)


def test_targets_of_sequences_are_predicted_from_the_token_before(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch], trained: Callable[..., State]
) -> None:
    decoder = model_of(experiment(objective=Objective.SFT(loss_on="all")), trained)
    batch = sequences(4)
    found = jax.jit(lambda batch: Forward(jnp.float32, "none", 10).sequences(decoder, batch))(batch)
    hidden, _ = jax.jit(lambda t, n: decoder(t, right_padded(n, 16), dtype=jnp.float32))(batch.tokens, batch.length)
    expected = naive(
        np.asarray(hidden)[:, :-1], np.asarray(decoder.head()), batch.tokens[:, 1:], batch.loss_mask[:, 1:]
    )
    np.testing.assert_allclose(found.logp, expected["logp"], rtol=1e-5, atol=1e-5)
    assert float(found.mask.sum()) == batch.loss_mask.sum()
