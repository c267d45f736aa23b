"""Answers are those of the plain model: the cache, the padding and the batch change no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.models import tree
from nnxdsl.models.attention import right_padded
from nnxdsl.models.config import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.run.generate import Sampler, Sampling

LENGTH, NEW = 64, 9
CONFIG = DecoderConfig(
    vocab_size=50, embed_dim=32, mlp_dim=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, window=4,
    window_pattern=3, rope_scale=2.0, query_scale=12**-0.5, max_length=LENGTH,
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(1, 20)))
Leaves = dict[str, jax.Array]


@pytest.fixture(scope="module")
def template() -> tree.Template:
    return tree.abstract(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def leaves(template: tree.Template) -> Leaves:
    rng = np.random.default_rng(1)
    return {
        path: jnp.asarray(rng.normal(size=leaf.shape) * (0.3 if path.endswith("scale") else 0.5), leaf.dtype)
        for path, leaf in template.variables.items()
    }


@pytest.fixture(scope="module")
def last_logits(template: tree.Template, leaves: Leaves) -> Callable[[Sequence[int]], np.ndarray]:
    """Logits after the last of some tokens, by one whole forward pass without a cache."""

    @jax.jit
    def forward(leaves: Leaves, tokens: jax.Array, length: jax.Array) -> jax.Array:
        model = template.merge(leaves)
        hidden, _ = model(tokens, right_padded(length, LENGTH), dtype=jnp.float32)
        return hidden[0, length[0] - 1] @ model.head().T

    def logits(tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(forward(leaves, padded, np.array([len(tokens)], np.int32)))

    return logits


@pytest.fixture(scope="module")
def sampler(template: tree.Template) -> Sampler:
    return Sampler(template, CONFIG, jnp.float32, stop_ids=())


def naive(last_logits: Callable[[Sequence[int]], np.ndarray], prompt: Sequence[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(last_logits(tokens).argmax()))
    return tokens[len(prompt) :]


def test_greedy_is_the_naive_loop(sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]) -> None:
    found = sampler(leaves, PROMPTS, Sampling(NEW))
    assert found == [naive(last_logits, prompt, NEW) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in found}) == len(PROMPTS)


def test_a_greedy_answer_does_not_depend_on_the_rest_of_the_batch(sampler: Sampler, leaves: Leaves) -> None:
    together = sampler(leaves, PROMPTS, Sampling(NEW))
    assert [sampler(leaves, [prompt], Sampling(NEW))[0] for prompt in PROMPTS[:2]] == together[:2]
    assert sampler(leaves, PROMPTS[::-1], Sampling(NEW)) == together[::-1]


def test_an_answer_ends_before_the_stop_token(
    template: tree.Template, sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]
) -> None:
    whole = sampler(leaves, PROMPTS, Sampling(NEW))
    stops = {whole[0][3], whole[1][0]}
    found = Sampler(template, CONFIG, jnp.float32, stops)(leaves, PROMPTS, Sampling(NEW))

    def cut(answer: list[int]) -> list[int]:
        return answer[: next((place for place, token in enumerate(answer) if token in stops), NEW)]

    assert found == [cut(answer) for answer in whole]
    assert found[1] == []
    assert len(found[0]) <= 3


def test_a_prompt_too_long_keeps_its_end(
    sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]
) -> None:
    prompt = [int(token) for token in np.random.default_rng(2).integers(0, 50, 100)]
    kept = prompt[-(LENGTH - NEW) :]
    assert sampler(leaves, [prompt], Sampling(NEW)) == [naive(last_logits, kept, NEW)]


def test_draws_are_reproducible_by_seed(sampler: Sampler, leaves: Leaves) -> None:
    one, same, other = (sampler(leaves, PROMPTS, Sampling(NEW, temperature=1.5, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_draws_follow_the_softmax(sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]) -> None:
    temperature, rows = 2.0, 4000
    drawn = sampler(leaves, [PROMPTS[0]] * rows, Sampling(1, temperature=temperature, seed=3))
    counted = np.bincount([answer[0] for answer in drawn], minlength=50) / rows
    logits = last_logits(PROMPTS[0]).astype(np.float64) / temperature
    wanted = np.exp(logits - logits.max())
    wanted /= wanted.sum()
    # five standard deviations of a count
    np.testing.assert_array_less(np.abs(counted - wanted), 5 * np.sqrt(wanted * (1 - wanted) / rows) + 1e-3)
