"""Answers from a model: prefill once, then one token at a time through a KV cache, in one jitted loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.models.attention import Places, left_padded
from nnxdsl.models.config import DecoderConfig
from nnxdsl.models.decoder import Decoder, init_cache
from nnxdsl.models.tree import Template
from nnxdsl.program.step import Leaves

ROUND_TO = 16
"""Prompts are padded to a multiple of this, so that prompts of similar length share a compiled program."""


class Sampling(NamedTuple):
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Longest answer.
        temperature: 0 for the likeliest token, else logits are divided by it.
        seed: Of the draws; the same seed and prompts give the same answers.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Sampler:
    """Generates with one model; the compiled loop is kept from call to call.

    Args:
        template: The model.
        config: Its numbers.
        dtype: Of activations and cache.
        stop_ids: Tokens that end an answer.
    """

    def __init__(self, template: Template, config: DecoderConfig, dtype: Any, stop_ids: Collection[int]) -> None:
        self._config = config
        generate = partial(_generate, template, config, dtype, tuple(sorted(stop_ids)))
        self._generate = jax.jit(generate, static_argnames=("new_tokens", "greedy"))

    def __call__(self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continuations of token-id prompts, the stop token left out.

        Args:
            leaves: The model's arrays.
            prompts: Token ids, each at least one; prompts too long for the model keep their end.
            sampling: How tokens are chosen.

        Returns:
            New token ids for each prompt.
        """
        room = self._config.max_length - sampling.max_new_tokens
        kept = [list(prompt)[-room:] for prompt in prompts]
        length = min(room, -(-max(map(len, kept)) // ROUND_TO) * ROUND_TO)
        tokens = np.zeros((len(kept), length), np.int32)
        for row, prompt in enumerate(kept):
            tokens[row, length - len(prompt) :] = prompt
        lengths = np.array([len(prompt) for prompt in kept], np.int32)
        out, counts = self._generate(
            leaves,
            tokens,
            lengths,
            jax.random.key(sampling.seed),
            np.float32(sampling.temperature),
            new_tokens=sampling.max_new_tokens,
            greedy=sampling.temperature == 0.0,
        )
        return [row[:count].tolist() for row, count in zip(np.asarray(out), np.asarray(counts), strict=True)]


def _generate(
    template: Template,
    config: DecoderConfig,
    dtype: Any,
    stop_ids: tuple[int, ...],
    leaves: Leaves,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    new_tokens: int,
    greedy: bool,
) -> tuple[jax.Array, jax.Array]:
    model = template.merge(leaves)
    assert isinstance(model, Decoder)
    rows, prompt = tokens.shape
    stops = jnp.array(stop_ids, jnp.int32)

    def choose(hidden: jax.Array, key: jax.Array) -> jax.Array:
        logits = jnp.einsum("bd,vd->bv", hidden, model.head().astype(hidden.dtype), preferred_element_type=jnp.float32)
        if greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        count, cache, token, done, out, counts = carry
        out = out.at[:, count].set(token)
        done = done | jnp.isin(token, stops)
        counts = counts + (~done).astype(jnp.int32)
        position = (lengths + count)[:, None]  # [B, 1]
        places = Places(position, jnp.ones_like(position), jnp.zeros_like(position))
        hidden, cache = model(token[:, None], places, cache=cache, dtype=dtype)
        return count + 1, cache, choose(hidden[:, -1], jax.random.fold_in(key, count + 1)), done, out, counts

    def going(carry: tuple[Any, ...]) -> jax.Array:
        return (carry[0] < new_tokens) & ~jnp.all(carry[3])

    cache = init_cache(config, rows, prompt + new_tokens, dtype)
    hidden, cache = model(tokens, left_padded(lengths, prompt), cache=cache, dtype=dtype)
    first = choose(hidden[:, -1], jax.random.fold_in(key, 0))
    none = jnp.zeros(rows, jnp.int32)
    out = jnp.zeros((rows, new_tokens), jnp.int32)
    *_, out, counts = jax.lax.while_loop(
        going, step, (jnp.zeros((), jnp.int32), cache, first, jnp.zeros(rows, bool), out, none)
    )
    return out, counts
