"""Batched generation: prefill, then decoding one token at a time with a KV cache, in one jitted loop or its pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

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

STREAM_EVERY = 8
"""Tokens of a row between two pieces of a stream."""

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
        self._begin = jax.jit(self._loop.begin, static_argnames=static)
        # The carry has the cache, which each piece of the loop updates in place.
        self._advance = jax.jit(self._loop.advance, static_argnames=static[1:], donate_argnames="carry")

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

    def stream(
        self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling, every: int = STREAM_EVERY
    ) -> Iterator[list[list[int]]]:
        """Generate completions as `drawn` does, and yield their tokens as they are decoded, in one process.

        The same loop runs in pieces with the same random keys: what is yielded for a row, joined, is its completion in
        `drawn`, token for token.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            every: Tokens of each row between two yields; at least 1.

        Yields:
            The tokens that each prompt's completion got since the last time, the stop token included; an empty list for
            one that has ended.

        Raises:
            ValueError: see `__call__`; `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        if not prompts:
            return
        inputs, static = self._inputs([leaves], prompts, sampling, None)
        carry = self._begin(inputs, **static)
        del static["new_tokens"]
        seen = np.zeros(len(prompts), np.int64)
        until = 0
        while until < sampling.max_new_tokens:
            until = min(until + every, sampling.max_new_tokens)
            carry = self._advance(inputs, carry, np.int32(until), **static)
            out, counts, done = (np.asarray(part)[0] for part in (carry.out, carry.counts, carry.done))
            ends = counts + done  # with the stop token
            yield [row[begin:end].tolist() for row, begin, end in zip(out, seen, ends, strict=True)]
            seen = ends
            if done.all():
                return

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
        if not prompts:
            return np.zeros((len(models), 0, 0), np.int32), np.zeros((len(models), 0), np.int32)
        inputs, static = self._inputs(models, prompts, sampling, at_least)
        out, counts = self._generate(inputs, **static)
        return np.asarray(out), np.asarray(counts)

    def _inputs(
        self, models: Sequence[Leaves], prompts: Sequence[Sequence[int]], sampling: Sampling, at_least: int | None
    ) -> tuple[_Inputs, dict[str, Any]]:
        """Arrays and static arguments of the loop.

        Raises:
            ValueError: see `__call__`.
        """
        room = self._config.max_length - sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} must be less than max_length={self._config.max_length}"
            )
        if sampling.top_k is not None and sampling.top_k > self._config.vocab_size:
            raise ValueError(f"top_k={sampling.top_k} exceeds the vocabulary size {self._config.vocab_size}")
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
        rows = tokens, np.array([len(prompt) for prompt in truncated], np.int32), numbers_of(truncated)
        tokens, lengths, numbers = self._place(rows)
        inputs = _Inputs(
            {path: leaf for path, leaf in first.items() if path in shared},
            [{path: leaf for path, leaf in model.items() if path not in shared} for model in models],
            tokens,
            lengths,
            numbers,
            # Host arrays are not committed to a device.
            np.asarray(jax.random.key_data(jax.random.key(sampling.seed))),
            np.float32(sampling.temperature),
            None if sampling.top_p is None else np.float32(sampling.top_p),
        )
        return inputs, {
            "new_tokens": sampling.max_new_tokens,
            "is_greedy": sampling.temperature == 0.0,
            "top_k": sampling.top_k,
        }


class _Inputs(NamedTuple):
    """Arrays of a call.

    Attributes:
        shared: Arrays shared by all models.
        own: Arrays of each model.
        tokens: Prompts `[B, P]`, padded on the left.
        lengths: Prompt lengths `[B]`.
        numbers: Per-row RNG stream numbers `[B, 2]`, from `numbers_of`.
        key: Key data of the base PRNG key.
        temperature: Scalar.
        top_p: Scalar or None.
    """

    shared: Leaves
    own: list[Leaves]
    tokens: jax.Array
    lengths: jax.Array
    numbers: jax.Array
    key: ArrayLike
    temperature: ArrayLike
    top_p: ArrayLike | None


class _Carry(NamedTuple):
    """The state of the loop between two tokens.

    Attributes:
        length: Scalar, tokens decoded so far.
        cache: KV cache of prompts and new tokens, without the last one.
        token: The last token `[M, B]`.
        done: Whether a stop token was decoded `[M, B]`.
        out: New tokens `[M, B, new_tokens]`.
        counts: Their number before the stop token `[M, B]`.
    """

    length: jax.Array
    cache: Cache
    token: jax.Array
    done: jax.Array
    out: jax.Array
    counts: jax.Array


@attrs.frozen
class _Loop:
    """The jitted generation loop of one model structure; arrays are arguments."""

    template: AbstractModel
    config: DecoderConfig
    dtype: Any
    stop_ids: tuple[int, ...]

    def run(
        self, inputs: _Inputs, *, new_tokens: int, is_greedy: bool, top_k: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """New tokens `[M, B, new_tokens]` of M models, and their number before the stop token `[M, B]`.

        Args:
            inputs: Arrays of models and prompts.
            new_tokens: Maximum number of new tokens.
            is_greedy: Whether to take the argmax instead of sampling.
            top_k: See `Sampling`.
        """
        carry = self.begin(inputs, new_tokens=new_tokens, is_greedy=is_greedy, top_k=top_k)
        until = jnp.array(new_tokens, jnp.int32)
        carry = self.advance(inputs, carry, until, is_greedy=is_greedy, top_k=top_k)
        return carry.out, carry.counts

    def begin(self, inputs: _Inputs, *, new_tokens: int, is_greedy: bool, top_k: int | None) -> _Carry:
        """The state after prefill and the first new token; for the arguments see `run`."""
        models, (rows, prompt) = len(inputs.own), inputs.tokens.shape
        stacked, forward = self._models(inputs)
        places = positions_left_padded(inputs.lengths, prompt)
        logits, new = forward(None, None)(stacked, inputs.tokens, places, None)
        cache = append(self._empty(models, rows, prompt + new_tokens - 1), new)
        none = jnp.zeros((models, rows), jnp.int32)
        zero, out = jnp.zeros((), jnp.int32), jnp.zeros((models, rows, new_tokens), jnp.int32)
        empty = _Carry(zero, cache, none, none.astype(bool), out, none)
        return self._added(empty, cache, _chooser(inputs, is_greedy, top_k)(logits, zero))

    def advance(
        self, inputs: _Inputs, carry: _Carry, until: jax.Array, *, is_greedy: bool, top_k: int | None
    ) -> _Carry:
        """The state after `until` new tokens, or once all rows are done; for the other arguments see `run`."""
        stacked, forward = self._models(inputs)
        following, choose = forward(0, _CACHE), _chooser(inputs, is_greedy, top_k)

        def step(carry: _Carry) -> _Carry:
            position = (inputs.lengths + carry.length - 1)[:, None]  # [B, 1]
            places = TokenPositions(position, jnp.ones_like(position), jnp.zeros_like(position))
            logits, new = following(stacked, carry.token[:, :, None], places, carry.cache)
            # Updated outside of vmap, which would copy the cache; here the update is in place.
            return self._added(carry, append(carry.cache, new), choose(logits, carry.length))

        def is_unfinished(carry: _Carry) -> jax.Array:
            return (carry.length < until) & ~jnp.all(carry.done)

        return jax.lax.while_loop(is_unfinished, step, carry)

    def _models(self, inputs: _Inputs) -> tuple[Leaves, Callable[..., Any]]:
        """Stacked arrays of the models, and a function from the batch axes of tokens and cache to their forward."""
        own = inputs.own
        axes = {path: int(is_stacked(path)) for path in own[0]}
        stacked = {path: jnp.stack([leaves[path] for leaves in own], axis) for path, axis in axes.items()}
        forward = partial(jax.vmap, partial(self._forward, inputs.shared), out_axes=(0, _NEW), axis_size=len(own))
        return stacked, lambda tokens, cache: forward(in_axes=(axes, tokens, None, cache))

    def _added(self, carry: _Carry, cache: Cache, token: jax.Array) -> _Carry:
        """The state with one more token of each row, `[M, B]`."""
        done = carry.done | jnp.isin(token, jnp.array(self.stop_ids, jnp.int32))
        out, counts = carry.out.at[:, :, carry.length].set(token), carry.counts + (~done).astype(jnp.int32)
        return _Carry(carry.length + 1, cache, token, done, out, counts)

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


def _chooser(inputs: _Inputs, is_greedy: bool, top_k: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function from logits `[M, B, V]` and the number of tokens so far to the next token of each row `[M, B]`."""
    keys = streams(jax.random.wrap_key_data(jnp.asarray(inputs.key)), inputs.numbers)
    temperature, top_p = jnp.asarray(inputs.temperature), None if inputs.top_p is None else jnp.asarray(inputs.top_p)

    def choose(logits: jax.Array, count: jax.Array) -> jax.Array:
        if is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, count)
        return jax.vmap(lambda logits: draw(now, logits, temperature, top_k, top_p))(logits)

    return choose
