"""Batched generation: prefill, then decoding one token at a time with a KV cache, in one jitted loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.generate.sampling import Sampling, draw, numbers_of, streams
from nnxdsl.models.attention.kv_cache import Cache, CacheUpdate, append, init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, is_stacked
from nnxdsl.program.forward import Leaves

ROUND_TO = 16
"""Prompts are padded to a multiple of this, so that prompts of similar length share a compiled program."""

# vmap axis of the models in a cache: after the axis of the scanned layers, so that the scan needs no transpose.
# Token positions are shared by all models.
_CACHE: Any = Cache(layers=1, suffix=0, positions=None, length=None, prefix=0)  # pyright: ignore[reportArgumentType]
_NEW: Any = CacheUpdate(layers=1, suffix=0, positions=None, prefix=0)  # pyright: ignore[reportArgumentType]


class Sampler:
    """Generates with models of one structure; the jitted loop is cached between calls.

    Args:
        template: The abstract model.
        config: Configuration of the decoder.
        dtype: Dtype of activations and KV cache.
        stop_ids: Token ids that end a completion.
        place: Shards arrays with a leading batch axis; by default jax places them.
        whole: Output sharding, replicated where several processes read the completions; None leaves it to jax.
    """

    def __init__(
        self,
        template: AbstractModel,
        config: DecoderConfig,
        dtype: Any,
        stop_ids: Collection[int],
        place: Callable[[Any], Any] = lambda rows: rows,
        whole: jax.sharding.Sharding | None = None,
    ) -> None:
        self._config, self._place = config, place
        self._loop = _Loop(template, config, dtype, tuple(sorted(stop_ids)))
        static = ("new_tokens", "is_greedy", "top_k")
        self._generate = jax.jit(self._loop.run, static_argnames=static, out_shardings=whole)

    def __call__(self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Generate completions, without their stop tokens.

        Args:
            leaves: The model's arrays.
            prompts: Token ids, at least one per prompt; prompts that are too long are truncated on the left.
            sampling: Sampling settings.

        Returns:
            New token ids for each prompt.

        Raises:
            ValueError: `max_new_tokens` leaves no position for a prompt, or `top_k` exceeds the vocabulary size.
        """
        (answers,) = self.together([leaves], prompts, sampling)
        return answers

    def drawn(
        self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling, length: int | None = None
    ) -> list[list[int]]:
        """Generate completions that include the stop token, where there is one.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            length: Minimum padded prompt length; a constant value avoids recompilation between calls.
        """
        out, counts = self._sample([leaves], prompts, sampling, length)
        return [row[: count + 1].tolist() for row, count in zip(out[0], counts[0], strict=True)]

    def together(
        self, models: Sequence[Leaves], prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[list[int]]]:
        """Generate from several models in one batch, with the same prompts and random keys.

        Arrays shared by all models are not batched: one matrix product covers the rows of all models, so a policy with
        adapters and its reference cost little more than one model. Arrays that differ are stacked, which copies them;
        use this for adapters rather than for full models.

        Args:
            models: Arrays of each model; an array is shared if it is the same object in all of them.
            prompts: See `__call__`.
            sampling: Sampling settings.

        Returns:
            New token ids for each model and prompt.

        Raises:
            ValueError: see `__call__`.
        """
        return [
            [row[:count].tolist() for row, count in zip(rows, ends, strict=True)]
            for rows, ends in zip(*self._sample(models, prompts, sampling), strict=True)
        ]

    def _sample(
        self,
        models: Sequence[Leaves],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        at_least: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """New tokens `[M, B, new]` of M models, and their number before the stop token `[M, B]`."""
        room = self._config.max_length - sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} must be less than max_length={self._config.max_length}"
            )
        if sampling.top_k is not None and sampling.top_k > self._config.vocab_size:
            raise ValueError(f"top_k={sampling.top_k} exceeds the vocabulary size {self._config.vocab_size}")
        if not prompts:
            return np.zeros((len(models), 0, 0), np.int32), np.zeros((len(models), 0), np.int32)
        truncated = [list(prompt)[-room:] for prompt in prompts]
        for prompt in truncated:
            if problem := self._config.generation_problem(len(prompt), sampling.max_new_tokens):
                raise ValueError(f"max_new_tokens: {problem}; lower it, or shorten or lengthen the prompt")
        length = min(room, -(-max(*map(len, truncated), at_least or 1) // ROUND_TO) * ROUND_TO)
        tokens = np.zeros((len(truncated), length), np.int32)
        for row, prompt in enumerate(truncated):
            tokens[row, length - len(prompt) :] = prompt
        first, *others = models
        shared = {path for path, leaf in first.items() if all(leaf is other[path] for other in others)}
        out, counts = self._generate(
            {path: leaf for path, leaf in first.items() if path in shared},
            [{path: leaf for path, leaf in model.items() if path not in shared} for model in models],
            *self._place((tokens, np.array([len(prompt) for prompt in truncated], np.int32), numbers_of(truncated))),
            np.asarray(jax.random.key_data(jax.random.key(sampling.seed))),  # a host array is not committed to a device
            np.float32(sampling.temperature),
            None if sampling.top_p is None else np.float32(sampling.top_p),
            new_tokens=sampling.max_new_tokens,
            is_greedy=sampling.temperature == 0.0,
            top_k=sampling.top_k,
        )
        return np.asarray(out), np.asarray(counts)


@attrs.frozen
class _Loop:
    """The jitted generation loop of one model structure; arrays are arguments."""

    template: AbstractModel
    config: DecoderConfig
    dtype: Any
    stop_ids: tuple[int, ...]

    def run(
        self,
        shared: Leaves,
        own: list[Leaves],
        tokens: jax.Array,
        lengths: jax.Array,
        numbers: jax.Array,
        key: jax.Array,
        temperature: jax.Array,
        top_p: jax.Array | None,
        *,
        new_tokens: int,
        is_greedy: bool,
        top_k: int | None,
    ) -> tuple[jax.Array, jax.Array]:
        """New tokens `[M, B, new_tokens]` of M models, and their number before the stop token `[M, B]`.

        Args:
            shared: Arrays shared by all models.
            own: Arrays of each model.
            tokens: Prompts `[B, P]`, padded on the left.
            lengths: Prompt lengths `[B]`.
            numbers: Per-row RNG stream numbers `[B, 2]`, from `numbers_of`.
            key: Key data of the base PRNG key.
            temperature: Scalar.
            top_p: Scalar or None.
            new_tokens: Maximum number of new tokens.
            is_greedy: Whether to take the argmax instead of sampling.
            top_k: See `Sampling`.
        """
        models, (rows, prompt) = len(own), tokens.shape
        axes = {path: int(is_stacked(path)) for path in own[0]}
        stacked = {path: jnp.stack([leaves[path] for leaves in own], axis) for path, axis in axes.items()}
        forward = partial(jax.vmap, partial(self._forward, shared), out_axes=(0, _NEW), axis_size=models)
        first, following = forward(in_axes=(axes, None, None, None)), forward(in_axes=(axes, 0, None, _CACHE))
        stops, keys = jnp.array(self.stop_ids, jnp.int32), streams(jax.random.wrap_key_data(key), numbers)

        def choose(logits: jax.Array, count: jax.Array) -> jax.Array:
            if is_greedy:
                return jnp.argmax(logits, axis=-1).astype(jnp.int32)
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, count)
            return jax.vmap(lambda logits: draw(now, logits, temperature, top_k, top_p))(logits)

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            count, cache, token, done, out, counts = carry
            position = (lengths + count - 1)[:, None]  # [B, 1]
            places = TokenPositions(position, jnp.ones_like(position), jnp.zeros_like(position))
            logits, new = following(stacked, token[:, :, None], places, cache)
            # Updated outside of vmap, which would copy the cache; here the update is in place.
            return count + 1, append(cache, new), *added(count, choose(logits, count), done, out, counts)

        def added(
            count: jax.Array, token: jax.Array, done: jax.Array, out: jax.Array, counts: jax.Array
        ) -> tuple[jax.Array, ...]:
            done = done | jnp.isin(token, stops)
            return token, done, out.at[:, :, count].set(token), counts + (~done).astype(jnp.int32)

        def is_unfinished(carry: tuple[Any, ...]) -> jax.Array:
            return (carry[0] < new_tokens) & ~jnp.all(carry[3])

        logits, new = first(stacked, tokens, positions_left_padded(lengths, prompt), None)
        cache = append(self._empty(models, rows, prompt + new_tokens - 1), new)
        none = jnp.zeros((models, rows), jnp.int32)
        zero, out = jnp.zeros((), jnp.int32), jnp.zeros((models, rows, new_tokens), jnp.int32)
        begun = added(zero, choose(logits, zero), none.astype(bool), out, none)
        *_, out, counts = jax.lax.while_loop(is_unfinished, step, (zero + 1, cache, *begun))
        return out, counts

    def _forward(
        self, shared: Leaves, own: Leaves, tokens: jax.Array, places: TokenPositions, cache: Cache | None
    ) -> tuple[jax.Array, CacheUpdate]:
        """Next-token logits `[B, V]` after tokens `[B, T]`, and their cache update."""
        model = self.template.merge({**shared, **own})
        assert isinstance(model, Decoder)
        method = AttentionMethod("chunked", sequence(tokens.shape[1])) if cache is None else AttentionMethod()
        hidden, new, *_ = model(tokens, places, cache=cache, return_kv=True, dtype=self.dtype, method=method)
        assert new is not None  # return_kv=True
        return model.logits(hidden[:, -1]), new

    def _empty(self, models: int, rows: int, length: int) -> Cache:
        """An empty KV cache for several models."""
        empty = init_cache(self.config, rows, length, self.dtype)
        return jax.vmap(lambda _: empty, out_axes=_CACHE)(jnp.zeros(models))
