"""Speculative decoding: the multi-token-prediction (MTP) layer drafts tokens, and one pass of the model checks them.

Each token is chosen from the model's own logits with the key of its place in the completion, as without drafts, and a
draft is accepted if it is that token (drafter-invariant speculative decoding: Daliri et al. 2024, arXiv:2408.07978).
So a draft decides only how many tokens a pass yields, never which. Drafts are chosen with the same keys, for then a
draft distribution close to the model's most often gives the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.generate.decode_loop import Inputs
from nnxdsl.generate.sampling import draw, streams
from nnxdsl.models.attention.kv_cache import Cache, append, init_cache, mtp_cache, rewind
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel

Chooser = Callable[[jax.Array, jax.Array], jax.Array]
"""From logits `[B, T, V]` and the places of tokens in their completions `[B, T]` to tokens `[B, T]`."""


class SpeculativeCarry(NamedTuple):
    """The state of the loop between two passes of the model; rows have lengths of their own.

    Attributes:
        cache: KV cache of the model, without the last token of each row.
        ahead: KV cache of the MTP layer, of the same tokens, each with the one that follows it.
        token: The last token `[B]`.
        drafts: Drafts of the tokens after it `[B, k]`.
        length: Tokens decoded so far `[B]`.
        done: Whether a stop token was decoded `[1, B]`.
        out: New tokens `[1, B, new_tokens]`.
        counts: Their number before the stop token `[1, B]`.
        passes: Passes of the model after the prompt that each row took part in `[B]`.
    """

    cache: Cache
    ahead: Cache
    token: jax.Array
    drafts: jax.Array
    length: jax.Array
    done: jax.Array
    out: jax.Array
    counts: jax.Array
    passes: jax.Array


@attrs.frozen
class SpeculativeLoop:
    """The jitted loop of one model with an MTP layer; arrays are arguments."""

    template: AbstractModel
    config: DecoderConfig
    dtype: Any
    stop_ids: tuple[int, ...]

    def run(
        self, inputs: Inputs, *, new_tokens: int, drafts: int, is_greedy: bool, top_k: int | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """New tokens `[1, B, new_tokens]`, their number before the stop token `[1, B]`, and the passes `[B]`.

        Args:
            inputs: Arrays of one model and the prompts.
            new_tokens: Maximum number of new tokens.
            drafts: Number of drafts that a pass checks, at least 1.
            is_greedy: Whether to take the argmax instead of sampling.
            top_k: See `Sampling`.
        """
        given = {"drafts": drafts, "is_greedy": is_greedy, "top_k": top_k}
        carry = self.begin(inputs, new_tokens=new_tokens, **given)
        carry = self.advance(inputs, carry, jnp.array(new_tokens, jnp.int32), **given)
        return carry.out, carry.counts, carry.passes

    def begin(
        self, inputs: Inputs, *, new_tokens: int, drafts: int, is_greedy: bool, top_k: int | None
    ) -> SpeculativeCarry:
        """The state after prefill, the first new token and its drafts; for the arguments see `run`."""
        model, choose = self._model(inputs), _chooser(inputs, is_greedy, top_k)
        rows, prompt = inputs.tokens.shape
        # A pass writes the last token and its drafts behind all that a completion can have.
        slots = prompt + new_tokens + drafts
        places, method = positions_left_padded(inputs.lengths, prompt), AttentionMethod("chunked", sequence(prompt))
        read = {"return_kv": True, "dtype": self.dtype, "method": method}
        out = model(inputs.tokens, places, **read)
        zeros = jnp.zeros(rows, jnp.int32)
        token = choose(model.logits(out.hidden[:, -1:]), zeros[:, None])  # [B, 1]
        states, _, update = model.mtp_states(
            out.hidden, jnp.concatenate([inputs.tokens[:, 1:], token], axis=1), places, **read
        )
        assert out.cache_update is not None
        assert update is not None
        cache = append(init_cache(self.config, rows, slots, self.dtype, spare=drafts), out.cache_update)
        ahead = append(mtp_cache(self.config, rows, slots, self.dtype), update)
        length = jnp.full(rows, prompt, jnp.int32)
        cache, ahead = cache._replace(length=length), ahead._replace(length=length)
        done = jnp.isin(token.T, jnp.array(self.stop_ids, jnp.int32))  # [1, B]
        first = jnp.zeros((1, rows, new_tokens), jnp.int32).at[0, :, 0].set(token[:, 0])
        drafted, ahead = self._drafts(model, choose, inputs, states[:, -1:], ahead, zeros + 1, drafts)
        counts = (~done).astype(jnp.int32)
        return SpeculativeCarry(cache, ahead, token[:, 0], drafted, zeros + 1, done, first, counts, zeros)

    def advance(
        self,
        inputs: Inputs,
        carry: SpeculativeCarry,
        until: jax.Array,
        *,
        drafts: int,
        is_greedy: bool,
        top_k: int | None,
    ) -> SpeculativeCarry:
        """The state once every row has at least `until` new tokens or is done; for the other arguments see `run`."""
        model, choose = self._model(inputs), _chooser(inputs, is_greedy, top_k)
        rows, new_tokens = carry.out.shape[1:]
        stops, steps = jnp.array(self.stop_ids, jnp.int32), jnp.arange(drafts + 1)

        def unfinished(carry: SpeculativeCarry) -> jax.Array:
            return ~carry.done[0] & (carry.length < new_tokens)

        def step(carry: SpeculativeCarry) -> SpeculativeCarry:
            is_active = unfinished(carry)
            at = carry.length[:, None] + steps  # [B, k + 1] the places of the tokens that are chosen
            tokens = jnp.concatenate([carry.token[:, None], carry.drafts], axis=1)  # [B, k + 1]
            places = self._places(inputs, carry.cache.length[:, None] + steps)
            read = {"return_kv": True, "dtype": self.dtype}
            out = model(tokens, places, cache=carry.cache, **read)
            chosen = choose(model.logits(out.hidden), at)  # [B, k + 1]
            # A token counts if all drafts before it were chosen, none of them ends the row, and there is room.
            is_right = jnp.concatenate([is_active[:, None], carry.drafts == chosen[:, :-1]], axis=1)
            is_stop = jnp.isin(chosen, stops)
            is_right = is_right.at[:, 1:].set(is_right[:, 1:] & ~is_stop[:, :-1]) & (at < new_tokens)
            counts = jnp.cumprod(is_right.astype(jnp.int32), axis=1)
            added = jnp.sum(counts, axis=1)  # [B], 0 for a row that has ended
            written = jnp.where(counts > 0, at, new_tokens)  # out of bounds: dropped
            result = carry.out.at[0, jnp.arange(rows)[:, None], written].set(chosen, mode="drop")
            last = jnp.maximum(added - 1, 0)[:, None]
            token = jnp.where(is_active, jnp.take_along_axis(chosen, last, axis=1)[:, 0], carry.token)
            length = carry.cache.length + added
            assert out.cache_update is not None
            cache = rewind(append(carry.cache, out.cache_update), length)
            # The layer reads each token's state with the token that was chosen after it.
            states, _, update = model.mtp_states(out.hidden, chosen, places, cache=carry.ahead, **read)
            assert update is not None
            ahead = rewind(append(carry.ahead, update), length)
            states = jnp.take_along_axis(states, last[:, :, None], axis=1)
            drafted, ahead = self._drafts(model, choose, inputs, states, ahead, carry.length + added, drafts)
            ended = jnp.any((counts > 0) & is_stop, axis=1)
            return SpeculativeCarry(
                cache,
                ahead,
                token,
                drafted,
                carry.length + added,
                carry.done | ended,
                result,
                carry.counts + added - ended,
                carry.passes + is_active,
            )

        return jax.lax.while_loop(lambda carry: jnp.any(unfinished(carry) & (carry.length < until)), step, carry)

    def _drafts(
        self,
        model: Decoder,
        choose: Chooser,
        inputs: Inputs,
        states: jax.Array,
        ahead: Cache,
        at: jax.Array,
        drafts: int,
    ) -> tuple[jax.Array, Cache]:
        """Drafts of the tokens from place `at` `[B]` of a completion on, `[B, k]`, and the cache without them.

        Args:
            model: The model.
            choose: Chooses tokens.
            inputs: Arrays of the call.
            states: The layer's states of the last token but one, `[B, 1, D]`.
            ahead: The layer's cache with that token.
            at: Place of the first draft.
            drafts: Their number k. After the first, each is predicted from the layer's own state of the one before.
        """
        found, length = [choose(model.logits(states), at[:, None])], ahead.length
        for number in range(1, drafts):
            places = self._places(inputs, ahead.length[:, None])
            states, _, update = model.mtp_states(
                states, found[-1], places, cache=ahead, return_kv=True, dtype=self.dtype
            )
            assert update is not None
            ahead = append(ahead, update)
            found.append(choose(model.logits(states), at[:, None] + number))
        return jnp.concatenate(found, axis=1), rewind(ahead, length)

    def _places(self, inputs: Inputs, slots: jax.Array) -> TokenPositions:
        """Positions of tokens in the slots `[B, T]` of the cache."""
        padding = inputs.tokens.shape[1] - inputs.lengths
        return TokenPositions(slots - padding[:, None], jnp.ones_like(slots), jnp.zeros_like(slots))

    def _model(self, inputs: Inputs) -> Decoder:
        """The model of the arrays, which are those of one model."""
        (own,) = inputs.own
        model = self.template.merge({**inputs.shared, **own})
        assert isinstance(model, Decoder)
        return model


def _chooser(inputs: Inputs, is_greedy: bool, top_k: int | None) -> Chooser:
    keys = streams(jax.random.wrap_key_data(jnp.asarray(inputs.key)), inputs.numbers)
    temperature, top_p = jnp.asarray(inputs.temperature), None if inputs.top_p is None else jnp.asarray(inputs.top_p)

    def choose(logits: jax.Array, at: jax.Array) -> jax.Array:
        if is_greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        now = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, at)  # [B, T]
        return jax.vmap(lambda keys, logits: draw(keys, logits, temperature, top_k, top_p))(now, logits)

    return choose
