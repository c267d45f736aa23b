"""The decoding loop: prefill, then one token at a time with a KV cache, as a whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from nnxdsl.generate.sampling import draw, streams
from nnxdsl.models.attention.kv_cache import Cache, CacheUpdate, append, init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, is_stacked
from nnxdsl.program.forward import Leaves

# vmap axis of the models in a cache: after the axis of the scanned layers, so that the scan needs no transpose.
# Token positions are shared by all models.
_CACHE: Any = Cache(layers=1, suffix=0, positions=None, length=None, prefix=0)  # pyright: ignore[reportArgumentType]
_NEW: Any = CacheUpdate(layers=1, suffix=0, positions=None, prefix=0)  # pyright: ignore[reportArgumentType]


class Inputs(NamedTuple):
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


class Carry(NamedTuple):
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
class DecodeLoop:
    """The jitted generation loop of one model structure; arrays are arguments."""

    template: AbstractModel
    config: DecoderConfig
    dtype: Any
    stop_ids: tuple[int, ...]

    def run(
        self, inputs: Inputs, *, new_tokens: int, is_greedy: bool, top_k: int | None
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

    def begin(self, inputs: Inputs, *, new_tokens: int, is_greedy: bool, top_k: int | None) -> Carry:
        """The state after prefill and the first new token; for the arguments see `run`."""
        models, (rows, prompt) = len(inputs.own), inputs.tokens.shape
        stacked, forward = self._models(inputs)
        places = positions_left_padded(inputs.lengths, prompt)
        logits, new = forward(None, None)(stacked, inputs.tokens, places, None)
        cache = append(self._empty(models, rows, prompt + new_tokens - 1), new)
        none = jnp.zeros((models, rows), jnp.int32)
        zero, out = jnp.zeros((), jnp.int32), jnp.zeros((models, rows, new_tokens), jnp.int32)
        empty = Carry(zero, cache, none, none.astype(bool), out, none)
        return self._added(empty, cache, chooser(inputs, is_greedy, top_k)(logits, zero))

    def advance(self, inputs: Inputs, carry: Carry, until: jax.Array, *, is_greedy: bool, top_k: int | None) -> Carry:
        """The state after `until` new tokens, or once all rows are done; for the other arguments see `run`."""
        stacked, forward = self._models(inputs)
        following, choose = forward(0, _CACHE), chooser(inputs, is_greedy, top_k)

        def step(carry: Carry) -> Carry:
            position = (inputs.lengths + carry.length - 1)[:, None]  # [B, 1]
            places = TokenPositions(position, jnp.ones_like(position), jnp.zeros_like(position))
            logits, new = following(stacked, carry.token[:, :, None], places, carry.cache)
            # Updated outside of vmap, which would copy the cache; here the update is in place.
            return self._added(carry, append(carry.cache, new), choose(logits, carry.length))

        def is_unfinished(carry: Carry) -> jax.Array:
            return (carry.length < until) & ~jnp.all(carry.done)

        return jax.lax.while_loop(is_unfinished, step, carry)

    def _models(self, inputs: Inputs) -> tuple[Leaves, Callable[..., Any]]:
        """Stacked arrays of the models, and a function from the batch axes of tokens and cache to their forward."""
        own = inputs.own
        axes = {path: int(is_stacked(path)) for path in own[0]}
        stacked = {path: jnp.stack([leaves[path] for leaves in own], axis) for path, axis in axes.items()}
        forward = partial(jax.vmap, partial(self._forward, inputs.shared), out_axes=(0, _NEW), axis_size=len(own))
        return stacked, lambda tokens, cache: forward(in_axes=(axes, tokens, None, cache))

    def _added(self, carry: Carry, cache: Cache, token: jax.Array) -> Carry:
        """The state with one more token of each row, `[M, B]`."""
        done = carry.done | jnp.isin(token, jnp.array(self.stop_ids, jnp.int32))
        out, counts = carry.out.at[:, :, carry.length].set(token), carry.counts + (~done).astype(jnp.int32)
        return Carry(carry.length + 1, cache, token, done, out, counts)

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


def chooser(inputs: Inputs, is_greedy: bool, top_k: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function from logits `[M, B, V]` and the number of tokens so far to the next token of each row `[M, B]`."""
    keys = streams(jax.random.wrap_key_data(jnp.asarray(inputs.key)), inputs.numbers)
    temperature, top_p = jnp.asarray(inputs.temperature), None if inputs.top_p is None else jnp.asarray(inputs.top_p)

    def choose(logits: jax.Array, count: jax.Array) -> jax.Array:
        if is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, count)
        return jax.vmap(lambda logits: draw(now, logits, temperature, top_k, top_p))(logits)

    return choose
