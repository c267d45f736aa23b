"""Answers are those of the plain model: the cache, the padding and the batch change no token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models import params
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.attention import AttentionConfig
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.layer_pattern import LayerPattern, local_then_global
from nnxdsl.models.config.rope import Rope

LENGTH, NEW = 64, 9
CONFIG = DecoderConfig(
    vocab_size=50, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, window=4,
    mlp=MLPConfig(dim=64, activation="gelu_tanh"), layers=LayerPattern(num_layers=4, pattern=local_then_global(3)),
    rope_global=Rope(theta=1_000_000.0, factor=2.0),
    attention=AttentionConfig(query_scale=12**-0.5, query_key_norm="head"),
    max_length=LENGTH,
)  # fmt: skip
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(1, 20)))
Leaves = dict[str, jax.Array]


@pytest.fixture(scope="module")
def template() -> params.AbstractModel:
    return abstract_decoder(CONFIG)


@pytest.fixture(scope="module")
def leaves(template: params.AbstractModel) -> Leaves:
    """Values with which answers go by all tokens before: token vectors are small, or each would only say itself."""
    rng, spread = np.random.default_rng(1), {"scale": 0.3, "embedding": 0.03}
    return {
        path: jnp.asarray(rng.normal(size=leaf.shape) * spread.get(path.rpartition(".")[2], 0.5), leaf.dtype)
        for path, leaf in template.variables.items()
    }


@pytest.fixture(scope="module")
def last_logits(template: params.AbstractModel, leaves: Leaves) -> Callable[[Sequence[int]], np.ndarray]:
    """Logits after the last of some tokens, by one whole forward pass without a cache."""

    @jax.jit
    def forward(leaves: Leaves, tokens: jax.Array, length: jax.Array) -> jax.Array:
        model = template.merge(leaves)
        hidden, *_ = model(tokens, positions_right_padded(length, LENGTH), dtype=jnp.float32)
        return hidden[0, length[0] - 1] @ model.head().T

    def logits(tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(forward(leaves, padded, np.array([len(tokens)], np.int32)))

    return logits


@pytest.fixture(scope="module")
def sampler(template: params.AbstractModel) -> Sampler:
    return Sampler(template, CONFIG, jnp.float32, stop_ids=())


def naive(last_logits: Callable[[Sequence[int]], np.ndarray], prompt: Sequence[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(last_logits(tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.gpu
def test_greedy_is_the_naive_loop(sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]) -> None:
    actual = sampler(leaves, PROMPTS, Sampling(NEW))
    assert actual == [naive(last_logits, prompt, NEW) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in actual}) == len(PROMPTS)
    assert all(len(set(answer)) > 2 for answer in actual)


@pytest.mark.extended
def test_a_greedy_answer_does_not_depend_on_the_rest_of_the_batch(sampler: Sampler, leaves: Leaves) -> None:
    joined = sampler(leaves, PROMPTS, Sampling(NEW))
    assert [sampler(leaves, [prompt], Sampling(NEW))[0] for prompt in PROMPTS[:2]] == joined[:2]
    assert sampler(leaves, PROMPTS[::-1], Sampling(NEW)) == joined[::-1]


@pytest.mark.gpu
def test_an_answer_ends_before_the_stop_token(
    template: params.AbstractModel, sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]
) -> None:
    whole = sampler(leaves, PROMPTS, Sampling(NEW))
    stops = {whole[0][3], whole[1][0]}
    actual = Sampler(template, CONFIG, jnp.float32, stops)(leaves, PROMPTS, Sampling(NEW))

    def cut(answer: list[int]) -> list[int]:
        return answer[: next((place for place, token in enumerate(answer) if token in stops), NEW)]

    assert actual == [cut(answer) for answer in whole]
    assert actual[1] == []
    assert len(actual[0]) <= 3


@pytest.mark.extended
def test_a_prompt_too_long_keeps_its_end(
    sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]
) -> None:
    prompt = [int(token) for token in np.random.default_rng(2).integers(0, 50, 100)]
    kept = prompt[-(LENGTH - NEW) :]
    assert sampler(leaves, [prompt], Sampling(NEW)) == [naive(last_logits, kept, NEW)]


@pytest.mark.extended
def test_draws_are_reproducible_by_seed(sampler: Sampler, leaves: Leaves) -> None:
    one, same, other = (sampler(leaves, PROMPTS, Sampling(NEW, temperature=1.5, seed=seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.extended
def test_capped_logits_are_drawn_from(sampler: Sampler, leaves: Leaves) -> None:
    config = CONFIG.with_fields({"head.soft_cap": 1e-4})
    template = abstract_decoder(config)
    capped = Sampler(template, config, jnp.float32, stop_ids=())
    actual = capped(leaves, PROMPTS, Sampling(NEW, temperature=1.0, seed=1))
    # All words are about as likely then, as they are at a high temperature.
    assert actual == sampler(leaves, PROMPTS, Sampling(NEW, temperature=1e5, seed=1))
    assert actual != sampler(leaves, PROMPTS, Sampling(NEW, temperature=1.0, seed=1))


@pytest.mark.extended
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(sampler: Sampler, leaves: Leaves) -> None:
    hot = Sampling(NEW, temperature=1.5, seed=1)
    one = sampler(leaves, PROMPTS, hot)
    assert sampler(leaves, PROMPTS[::-1], hot) == one[::-1]
    first, again, second = sampler(leaves, (PROMPTS[0], PROMPTS[0], PROMPTS[2]), hot)
    assert (first, second) == (one[0], one[2])
    assert first != again  # the same prompt given twice has two answers


@pytest.mark.gpu
@pytest.mark.extended
def test_models_answer_together_as_each_alone(
    template: params.AbstractModel, sampler: Sampler, leaves: Leaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {path: -leaf if "attention.value" in path else leaf for path, leaf in leaves.items()}
    greedy = Sampling(NEW)
    alone = [sampler(model, PROMPTS, greedy) for model in (leaves, changed)]
    assert sampler.sample_models([leaves, changed], PROMPTS, greedy) == alone
    assert alone[0] != alone[1]
    # A weight of both stands in products over the rows of both, and never twice beside itself.
    seen: list[str] = []
    advance = sampler._advance

    def lowered(*args: Any, **options: Any) -> Any:
        seen.append(jax.jit(sampler._loop.advance, static_argnames=[*options]).lower(*args, **options).as_text())
        return advance(*args, **options)

    monkeypatch.setattr(sampler, "_advance", lowered)
    sampler.sample_models([leaves, changed], PROMPTS, greedy)
    products = [line for line in seen[0].splitlines() if "dot_general" in line]
    assert any("tensor<2x32x16xf32>" in line for line in products)  # the changed one
    assert any("tensor<32x64xf32>" in line for line in products)
    assert not any("tensor<2x32x64xf32>" in line for line in products)


@pytest.mark.extended
@pytest.mark.parametrize("sampling", [Sampling(NEW), Sampling(NEW, temperature=1.5, top_k=20, top_p=0.9, seed=4)])
def test_a_stream_has_the_tokens_of_one_loop(
    template: params.AbstractModel, sampler: Sampler, leaves: Leaves, sampling: Sampling
) -> None:
    whole = sampler(leaves, PROMPTS, sampling)
    ending = Sampler(template, CONFIG, jnp.float32, {whole[0][3], whole[1][0]})
    for one in (sampler, ending):
        wanted = [each.ids for each in one.complete(leaves, PROMPTS, sampling)]
        for every in (1, 2, 4, NEW, 100):
            pieces = list(one.stream(leaves, PROMPTS, sampling, every))
            assert [list(itertools.chain(*parts)) for parts in zip(*pieces, strict=True)] == wanted
            longest = max(map(len, wanted))
            assert len(pieces) == -(-longest // every)  # and no piece after the last row has ended
            assert all(len(added) <= every for piece in pieces for added in piece)
    assert [len(answer) for answer in wanted][1] == 1  # it ended at once, and its row got nothing more
    assert list(sampler.stream(leaves, [], sampling)) == []
    with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
        next(sampler.stream(leaves, PROMPTS, sampling, 0))
    with pytest.raises(ValueError, match="max_new_tokens=64 must be less than max_length=64"):
        next(sampler.stream(leaves, PROMPTS, Sampling(64)))


@pytest.mark.extended
def test_a_stream_compiles_its_pieces_once(sampler: Sampler, leaves: Leaves) -> None:
    advance = sampler._advance
    list(sampler.stream(leaves, PROMPTS, Sampling(7), 2))
    compiled = advance._cache_size()
    for every in (1, 3):
        list(sampler.stream(leaves, PROMPTS, Sampling(7), every))
    assert advance._cache_size() == compiled


@pytest.mark.extended
def test_the_likeliest_of_one_or_of_no_mass_is_greedy(sampler: Sampler, leaves: Leaves) -> None:
    samples = sampler(leaves, PROMPTS, Sampling(NEW, temperature=1.5, top_k=7, top_p=1e-6))
    assert samples == sampler(leaves, PROMPTS, Sampling(NEW))


def test_what_a_model_cannot_do_is_refused(sampler: Sampler, leaves: Leaves) -> None:
    with pytest.raises(ValueError, match="max_new_tokens=64 must be less than max_length=64"):
        sampler(leaves, PROMPTS, Sampling(64))
    with pytest.raises(ValueError, match="top_k=51 exceeds the vocabulary size 50"):
        sampler(leaves, PROMPTS, Sampling(1, temperature=1.0, top_k=51))
    assert sampler(leaves, [], Sampling(1)) == []


@pytest.mark.extended
@pytest.mark.gpu
def test_draws_follow_the_softmax(sampler: Sampler, leaves: Leaves, last_logits: Callable[..., np.ndarray]) -> None:
    temperature, rows = 2.0, 4000
    samples = sampler(leaves, [PROMPTS[0]] * rows, Sampling(1, temperature=temperature, seed=3))
    counted = np.bincount([answer[0] for answer in samples], minlength=50) / rows
    logits = last_logits(PROMPTS[0]).astype(np.float64) / temperature
    wanted = np.exp(logits - logits.max())
    wanted /= wanted.sum()
    # five standard deviations of a count
    np.testing.assert_array_less(np.abs(counted - wanted), 5 * np.sqrt(wanted * (1 - wanted) / rows) + 1e-3)
