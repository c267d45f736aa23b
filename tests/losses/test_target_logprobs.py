"""Log-probabilities in tiles against naive float64 figures, and the packed layout of pairs against ordinary rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_lab.model import Small

from nnxdsl import Experiment, Objective, compile
from nnxdsl.data.batch import Batch, PairBatch, SequenceBatch
from nnxdsl.losses.lm_head import token_stats as logprobs
from nnxdsl.losses.lm_head.token_stats import token_stats
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.compile import TrainState
from nnxdsl.program.forward import Forward, ForwardOutput

B, N, D, V = 3, 7, 5, 11


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    hidden = draw.standard_normal((B, N, D)).astype(np.float32)
    head = (2 * draw.standard_normal((V, D))).astype(np.float32)
    targets = draw.integers(0, V, (B, N)).astype(np.int32)
    return hidden, head, targets, draw.random((B, N)) < 0.6


def naive(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, mask: np.ndarray, soft_cap: float | None = None
) -> dict[str, np.ndarray]:
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    log_z = np.log(np.exp(logits).sum(-1))
    log_p = logits - log_z[..., None]
    logp = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return {
        "logp": np.where(mask, logp, 0),
        "log_z": np.where(mask, log_z, 0),
        "entropy": np.where(mask, -(np.exp(log_p) * log_p).sum(-1), 0),
        "correct": np.where(mask, log_p.argmax(-1) == targets, 0).astype(np.float64),
        "mask": mask.astype(np.float64),
    }


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, bool], None]:
    """Sets the vocabulary entries and tokens of a tile, and whether a trained head's logits are saved."""

    def use(vocab_size: int, tokens: int, keep: bool) -> None:
        # Rows of the head take as much, so this is the size of a tile only where it has more tokens than they columns.
        monkeypatch.setattr(logprobs, "CPU", logprobs.TileSizes(4 * vocab_size * max(tokens, D), tokens))
        monkeypatch.setattr(logprobs, "LOGITS_BYTES", 2**20 if keep else 0)

    return use


cases = given(
    seed=st.integers(0, 99),
    vocab_size=st.sampled_from([1, 2, 3, 4, 5, 11]),
    tokens=st.sampled_from([1, 4, 21]),
    soft_cap=st.sampled_from([None, 3.0]),
    keep=st.booleans(),
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@cases
def test_equal_to_the_naive(
    small_tiles: Callable[..., None], seed: int, vocab_size: int, tokens: int, soft_cap: float | None, keep: bool
) -> None:
    small_tiles(vocab_size, tokens, keep)
    args = inputs(seed)
    actual = jax.jit(partial(token_stats, soft_cap=soft_cap))(*args)
    for name, expected in naive(*args, soft_cap).items():
        np.testing.assert_allclose(getattr(actual, name), expected, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("has_entropy_gradient", [True, False])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@cases
def test_gradients_of_hidden_states_and_head(
    small_tiles: Callable[..., None],
    seed: int,
    vocab_size: int,
    tokens: int,
    soft_cap: float | None,
    keep: bool,
    has_entropy_gradient: bool,
) -> None:
    small_tiles(vocab_size, tokens, keep)
    hidden, head, targets, mask = inputs(seed)
    weight = np.random.default_rng(1).standard_normal((2, B, N)).astype(np.float32)

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        stats = token_stats(hidden, head, targets, mask, soft_cap=soft_cap, has_entropy_gradient=has_entropy_gradient)
        # Correctness must give no gradient, and entropy only where it is asked for.
        scored = jnp.sum(stats.logp * weight[0]) + jnp.sum(jnp.square(stats.log_z) * weight[1])
        return scored + 3 * jnp.sum(stats.entropy) + jnp.sum(stats.correct)

    for_hidden, for_head = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)
    plain = hidden.astype(np.float64) @ head.astype(np.float64).T
    logits = plain if soft_cap is None else soft_cap * np.tanh(plain / soft_cap)
    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    probability = np.exp(logits - log_z)
    toward = (np.eye(V)[targets] - probability) * weight[0][..., None]
    toward = toward + 2 * log_z * probability * weight[1][..., None]
    if has_entropy_gradient:
        entropy = -np.sum(probability * (logits - log_z), axis=-1, keepdims=True)
        toward = toward - 3 * probability * (logits - log_z + entropy)
    toward = toward * mask[..., None]
    toward = toward if soft_cap is None else toward * (1 - np.tanh(plain / soft_cap) ** 2)
    np.testing.assert_allclose(for_hidden, toward @ head.astype(np.float64), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(for_head, np.einsum("bnv,bnd->vd", toward, hidden), rtol=1e-5, atol=1e-5)
    # With a frozen head nothing changes for the hidden states.
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(hidden, head), for_hidden, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("limit", [1, 2 * B, 1000])
def test_a_limit_on_tokens_changes_nothing(limit: int) -> None:
    args = inputs()
    for actual, expected in zip(token_stats(*args, limit), token_stats(*args), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("trained", "keep", "has_entropy_gradient", "products"),
    [
        ((), False, False, 1),
        ((), False, True, 1),
        ((0,), False, False, 2),
        ((0,), True, True, 2),
        ((0,), False, True, 3),
        ((0, 1), True, False, 3),
        ((0, 1), True, True, 3),
        ((0, 1), False, False, 4),
    ],
)
def test_how_many_products_with_the_head(
    small_tiles: Callable[..., None], trained: tuple[int, ...], keep: bool, has_entropy_gradient: bool, products: int
) -> None:
    small_tiles(4, 4, keep)
    hidden, head, targets, mask = inputs()

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.sum(token_stats(hidden, head, targets, mask, has_entropy_gradient=has_entropy_gradient).logp)

    run = jax.jit(jax.grad(loss, argnums=trained) if trained else loss)
    assert str(jax.make_jaxpr(run)(hidden, head)).count("dot_general[") == products


def test_the_logits_of_one_tile_exist_at_one_time() -> None:
    gpu = logprobs.ShardContext("gpu").sizes
    for tokens, vocab_size, width, limit in itertools.product(
        (1, 512, 1000, 16_384), (320, 128_256, 151_936, 262_144, 262_208), (640, 4096), (None, 100)
    ):
        for sizes in (gpu, logprobs.CPU):
            chunks, tile, keep = logprobs.tiles(tokens, vocab_size, width, limit, sizes)
            chunk = -(-tokens // chunks)
            assert chunk <= min(limit or sizes.chunk_tokens, sizes.chunk_tokens)
            assert 4 * tile * max(chunk, width) <= sizes.tile_bytes
            assert not keep or (4 * tokens * vocab_size <= logprobs.LOGITS_BYTES and tokens <= (limit or tokens))
            # Tiles that divide the vocabulary, where there are any that are not far smaller than they may be.
            assert vocab_size % tile == 0 or vocab_size not in (320, 128_256, 262_144)


def test_a_sure_models_entropy_and_gradient_are_not_lost_to_rounding() -> None:
    # Logits 40 and 40 - x of two tokens: every statistic is of the size of exp(-x).
    fall = np.array([4.0, 8.0, 12.0])
    hidden, head = np.stack([np.full(3, 40.0), 40 - fall], axis=1)[None].astype(np.float32), np.eye(2, dtype=np.float32)
    targets, mask = np.zeros((1, 3), np.int32), np.ones((1, 3), bool)
    other = 1 / (1 + np.exp(fall))
    entropy = -other * np.log(other) - (1 - other) * np.log1p(-other)

    def run(hidden: jax.Array) -> tuple[jax.Array, logprobs.TokenStats]:
        stats = token_stats(hidden, jnp.asarray(head), targets, mask)
        return jnp.sum(stats.logp), stats

    for_hidden, actual = jax.jit(jax.grad(run, has_aux=True))(hidden)
    np.testing.assert_allclose(actual.entropy[0], entropy, rtol=0, atol=3e-7)
    np.testing.assert_allclose(actual.logp[0], np.log1p(-other), rtol=0, atol=3e-7)
    np.testing.assert_allclose(for_hidden[0, :, 0], other, rtol=1e-5)
    np.testing.assert_array_equal(actual.correct, 1)


@pytest.mark.extended
def test_tokens_that_are_equally_likely_are_all_correct() -> None:
    hidden, head = jnp.ones((1, 3, 2)), jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    actual = token_stats(hidden, head, jnp.array([[0, 1, 2]]), jnp.ones((1, 3), bool))
    np.testing.assert_array_equal(actual.correct[0], [1, 1, 0])


@pytest.mark.extended
def test_bfloat16_hidden_states_are_multiplied_into_float32() -> None:
    hidden, head, targets, mask = inputs()
    low_hidden, low_head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    actual = token_stats(low_hidden, head, targets, mask)
    assert actual.logp.dtype == jnp.float32
    wide = np.asarray(low_hidden, np.float32), np.asarray(low_head, np.float32)
    np.testing.assert_allclose(actual.logp, naive(*wide, targets, mask)["logp"], rtol=0, atol=3e-6)

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.sum(token_stats(hidden, head, targets, mask).logp)

    # Weights and gradients are rounded to bfloat16 before they are multiplied, to 2^-9 of each.
    expected = jax.grad(loss, argnums=(0, 1))(*map(jnp.asarray, wide))
    both = jax.jit(jax.grad(loss, argnums=(0, 1)))(low_hidden, low_head)
    alone = jax.jit(jax.grad(loss))(low_hidden, low_head)
    for low, high in zip((*both, alone), (*expected, expected[0]), strict=True):
        assert low.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(low, np.float32), high, rtol=0.01, atol=0.03)


@pytest.mark.parametrize("trained", [False, True])
def test_masked_positions_may_hold_anything(trained: bool) -> None:
    hidden, head, targets, mask = inputs()
    mask[0, 2] = mask[1, 6] = False
    odd, odd_hidden = targets.copy(), hidden.copy()
    odd[0, 2], odd[1, 6] = 10**6, -(10**6)
    odd_hidden[0, 2], odd_hidden[1, 6] = np.nan, np.inf

    def run(hidden: np.ndarray, targets: np.ndarray) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
            stats = token_stats(hidden, head, targets, mask)
            return jnp.sum(stats.logp + jnp.square(stats.log_z))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1) if trained else (0,)))(hidden, head)

    for actual, expected in zip(*map(jax.tree.leaves, (run(odd_hidden, odd), run(hidden, targets))), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.extended
def test_vocabulary_rows_and_lengths_cut_over_devices(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("losses/on_cut_heads.py")
    assert set(report) == {"frozen", "trained"}
    # A device has 640 of 1280 rows of the head, once their other columns are gathered, and 30 of 120 tokens.
    rows, hidden, logits = 4 * 640 * 32, 4 * 120 * 32, 4 * 30 * 640
    assert hidden < logits / 4
    for name, actual in report.items():
        assert max(actual["differences"]) == pytest.approx(0, abs=2e-5), name
        assert actual["kinds"] == ["all-gather", "all-reduce"]
        # Only that, hidden states and statistics go from device to device: no logits, no other rows of the head.
        assert rows <= actual["outside"] < rows + hidden, name
    assert report["frozen"]["in loops"] == 0
    assert report["trained"]["in loops"] == 2 * rows  # the head's gradient, each tile added up over fsdp and context


def model_of(experiment: Experiment, trained: Callable[..., TrainState]) -> Decoder:
    program = compile(experiment)
    state = trained(program)
    template, leaves = program.policy(state)
    model = template.merge(leaves)
    assert isinstance(model, Decoder)
    return model


def read(decoder: Decoder, tokens: int, batch: Batch) -> ForwardOutput:
    """With `tokens` at one time."""
    return Forward(jnp.float32, "none", tokens, Kernels(decoder.config)).read(decoder, batch)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("model", [Small(), Small(layers=3, window=3)], ids=["periods", "tail"])
def test_packed_pairs_equal_ordinary_rows(
    model: Small,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:
    decoder = model_of(experiment(model=model), trained)
    batch = pairs(5, seed=3)
    actual, stats, *_ = jax.jit(
        lambda batch: Forward(jnp.float32, "none", 9, Kernels(decoder.config)).read(decoder, batch)
    )(batch)
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
    hidden, *_ = jax.jit(lambda t, n: decoder(t, positions_right_padded(n, 16), dtype=jnp.float32))(tokens, length)
    slots = np.arange(1, 16)
    mask = (slots >= first[:, None]) & (slots < length[:, None])
    expected = naive(np.asarray(hidden)[:, :-1], np.asarray(decoder.head()), tokens[:, 1:], mask)
    sums = expected["logp"].sum(1).reshape(5, 2)
    np.testing.assert_allclose(actual.chosen_logps, sums[:, 0], rtol=1e-6, atol=2e-5)
    np.testing.assert_allclose(actual.rejected_logps, sums[:, 1], rtol=1e-6, atol=2e-5)
    np.testing.assert_array_equal(actual.chosen_tokens, batch.chosen_length)
    np.testing.assert_array_equal(actual.rejected_tokens, batch.rejected_length)
    np.testing.assert_allclose(jnp.sum(stats.entropy), expected["entropy"].sum(), rtol=1e-5)
    assert float(jnp.sum(stats.correct)) == expected["correct"].sum()
    assert float(jnp.sum(stats.mask)) == mask.sum()


def test_the_sides_do_not_see_each_other(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    decoder = model_of(experiment(), trained)
    run = jax.jit(
        lambda batch: Forward(jnp.float32, "none", 64, Kernels(decoder.config)).read(decoder, batch).loss_inputs
    )
    batch = pairs(4)
    other = run(batch._replace(rejected=pairs(4, seed=9).rejected))
    np.testing.assert_array_equal(run(batch).chosen_logps, other.chosen_logps)
    assert not np.array_equal(run(batch).rejected_logps, other.rejected_logps)
    # Neither what stands in the padding matters, nor an id that a tokenizer might call its padding.
    padded = batch._replace(
        prompt=np.where(batch.prompt == 0, 7, batch.prompt), chosen=np.where(batch.chosen == 0, 7, batch.chosen)
    )
    np.testing.assert_array_equal(run(padded).chosen_logps, run(batch).chosen_logps)


def test_targets_of_sequences_are_predicted_from_the_token_before(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch], trained: Callable[..., TrainState]
) -> None:
    decoder = model_of(experiment(objective=Objective.SFT(loss_on="all")), trained)
    batch = sequences(4)
    actual = jax.jit(
        lambda batch: Forward(jnp.float32, "none", 10, Kernels(decoder.config)).read(decoder, batch).loss_inputs
    )(batch)
    hidden, *_ = jax.jit(lambda t, n: decoder(t, positions_right_padded(n, 16), dtype=jnp.float32))(
        batch.tokens, batch.length
    )
    expected = naive(
        np.asarray(hidden)[:, :-1], np.asarray(decoder.head()), batch.tokens[:, 1:], batch.loss_mask[:, 1:]
    )
    np.testing.assert_allclose(actual.logp, expected["logp"], rtol=1e-5, atol=1e-5)
    assert float(actual.mask.sum()) == batch.loss_mask.sum()
