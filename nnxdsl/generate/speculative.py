"""Speculative decoding: the multi-token-prediction (MTP) layer drafts tokens, and one pass of the model checks them.

Each token is chosen from the model's own logits with the key of its place in the completion, as without drafts, and a
draft is accepted if it is that token (drafter-invariant speculative decoding: Daliri et al. 2024, arXiv:2408.07978).
So a draft decides only how many tokens a pass yields, never which. Drafts are chosen with the same keys, for then a
draft distribution close to the model's most often gives the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxdsl.generate.sampling import Draws
from nnxdsl.models.attention.kv_cache import Cache, ReturnKV, append, rewind
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.decoder import Decoder


class Accepted(NamedTuple):
    """The tokens that a pass adds to its rows.

    Attributes:
        is_in: Whether each chosen token is added `[B, 1 + k]`.
        added: Their number `[B]`; 0 for a row that has ended.
        last: The last of them `[B]`.
        has_stopped: Whether it is a stop token `[B]`.
    """

    is_in: jax.Array
    added: jax.Array
    last: jax.Array
    has_stopped: jax.Array


def accept(
    chosen: jax.Array, drafts: jax.Array, is_active: jax.Array, has_room: jax.Array, stop_ids: tuple[int, ...]
) -> Accepted:
    """Which chosen tokens count: those of which all drafts before were chosen and none of these ends the row.

    Args:
        chosen: Tokens chosen from the model's logits `[B, 1 + k]`.
        drafts: Drafts, the inputs that the choices after the first were made after `[B, k]`.
        is_active: Rows that have not ended `[B]`.
        has_room: Whether a completion can have another token `[B, 1 + k]`.
        stop_ids: Tokens that end a row.
    """
    is_stop = jnp.isin(chosen, jnp.array(stop_ids, jnp.int32))
    is_right = jnp.concatenate([is_active[:, None], (drafts == chosen[:, :-1]) & ~is_stop[:, :-1]], axis=1)
    is_in = jnp.cumprod((is_right & has_room).astype(jnp.int32), axis=1) > 0
    count = jnp.sum(is_in, axis=1)
    last = jnp.take_along_axis(chosen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return Accepted(is_in, count, last, jnp.any(is_in & is_stop, axis=1))


def draft(
    model: Decoder,
    choose: Callable[[jax.Array, jax.Array], Draws],
    places: Callable[[jax.Array], TokenPositions],
    hidden: jax.Array,
    chosen: jax.Array,
    accepted: Accepted,
    cache: Cache,
    length: jax.Array,
    dtype: DTypeLike,
    return_kv: ReturnKV = True,
) -> tuple[jax.Array, Cache]:
    """Drafts `[B, k]` of the tokens after those accepted, and the cache of the MTP layer with the accepted ones.

    Args:
        model: The model.
        choose: From logits `[B, T, V]` and the positions of tokens in their completions `[B, T]`.
        places: Positions of tokens in the slots `[B, T]` of a cache.
        hidden: The model's states that the tokens were chosen from `[B, 1 + k, D]`.
        chosen: The tokens `[B, 1 + k]`.
        accepted: Which of them count.
        cache: That of the MTP layer, whose length is the number of tokens before those of `hidden`.
        length: Tokens of each completion, the accepted ones included `[B]`.
        dtype: Of activations.
        return_kv: As the cache holds keys and values.
    """
    count, settings = chosen.shape[1] - 1, {"return_kv": return_kv, "dtype": dtype}
    end = cache.length + accepted.added
    # The layer reads each token's state with the token that was chosen after it.
    inputs = places(cache.length[:, None] + jnp.arange(count + 1))
    states, _, update = model.mtp_states(hidden, chosen, inputs, cache=cache, **settings)
    assert update is not None  # return_kv=True
    cache = rewind(append(cache, update), end)
    last = jnp.maximum(accepted.added - 1, 0)[:, None, None]
    states, ahead, tokens = jnp.take_along_axis(states, last, axis=1), cache, list[jax.Array]()
    for number in range(count):
        if number:  # after the first, each is predicted from the layer's own state of the one before
            inputs = places(ahead.length[:, None])
            states, _, update = model.mtp_states(states, tokens[-1], inputs, cache=ahead, **settings)
            assert update is not None  # return_kv=True
            ahead = append(ahead, update)
        tokens.append(choose(model.logits(states), length[:, None] + number).ids)
    return jnp.concatenate(tokens, axis=1), rewind(ahead, end)
