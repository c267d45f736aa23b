"""The KV cache: keys and values of earlier tokens, and attention over them.

Global layers keep every token. A local layer never looks further back than its window, so it keeps a ring: token number
n of a row stands in slot n % window, over the one that has just left the window. Keys are stored after their rotation,
so who sees whom is told by the slots' places alone, in whatever order they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxdsl.models.attention.dot_product import MASK_VALUE, apply_sinks, apply_soft_cap
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind
from nnxdsl.models.mixer import mixer_class


class KV(NamedTuple):
    """Keys and values, after norm and rotation; any leading axes, then `[B, kv_heads, slots, head_dim]`."""

    key: jax.Array
    value: jax.Array


def empty_kv(config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> KV:
    """Keys and values of one layer without tokens."""
    shape = (batch, config.num_kv_heads, slots)
    return KV(*(jnp.zeros((*shape, width), dtype) for width in config.head_widths))


class LayerCaches(NamedTuple):
    """Keys and values of the layers of one period; any leading axes, then those below.

    Attributes:
        local_layers: `[layers, B, kv_heads, ring, head_dim]`; None without local layers.
        global_layers: `[layers, B, kv_heads, length, head_dim]`; None without global ones.
        states: of linear layers, with a leading axis of layers; None without any. They grow with no token.
    """

    local_layers: KV | None
    global_layers: KV | None
    states: Any = None

    def layer(self, kind: LayerKind, layer: int) -> Any:
        """What one layer remembers, counted from 0 among those of its kind."""
        caches = {"local": self.local_layers, "global": self.global_layers, "linear": self.states}[kind]
        return jax.tree.map(lambda part: part[layer], caches)


class Cache(NamedTuple):
    """The tokens before, as many for each row; rows of fewer tokens begin with padding.

    Attributes:
        layers: of the scanned layers, with a leading axis of `periods`; None without periods.
        suffix: of the layers after them; None without any.
        positions: of all tokens, `[B, length]`; those to come are padding.
        length: int32 scalar, the number of the next token.
        prefix: of the layers before the scanned ones; None without any.
    """

    layers: LayerCaches | None
    suffix: LayerCaches | None
    positions: TokenPositions
    length: jax.Array
    prefix: LayerCaches | None = None


class CacheUpdate(NamedTuple):
    """The tokens of one call, as a cache takes them.

    Attributes:
        layers: of the scanned layers as in the cache, with a slot for each token; local layers may have the last alone.
        suffix: of the layers after them.
        positions: of the tokens, `[B, T]`.
        prefix: of the layers before them.
    """

    layers: LayerCaches | None
    suffix: LayerCaches | None
    positions: TokenPositions
    prefix: LayerCaches | None = None


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """An empty cache.

    Args:
        config: of the decoder that will fill it.
        batch: rows.
        length: tokens of a row: prompt with its padding, and all to come.
        dtype: of keys and values; the `dtype` of the calls.

    Returns:
        A cache of zeros; local layers have `min(window, length)` slots, global ones `length`.
    """
    ring = min(config.window or length, length)

    def slots(kinds: Sequence[LayerKind], *leading: int) -> LayerCaches:
        def stacked(kind: LayerKind) -> Any:
            if kind not in kinds:
                return None
            one = mixer_class(config, kind).init_cache(config, batch, ring if kind == "local" else length, dtype)
            axes = (*leading, kinds.count(kind))
            return jax.tree.map(lambda part: jnp.zeros((*axes, *part.shape), part.dtype), one)

        return LayerCaches(stacked("local"), stacked("global"), stacked("linear"))

    layers = slots(config.pattern, config.periods) if config.periods else None
    tail = slots(config.suffix_layers) if config.suffix_layers else None
    places = TokenPositions(*(jnp.zeros((batch, length), jnp.int32) for _ in range(3)))
    return Cache(
        layers, tail, places, jnp.zeros((), jnp.int32), slots(config.prefix_layers) if config.prefix_layers else None
    )


def ring_positions(cache: Cache, window: int) -> TokenPositions:
    """Where the tokens in the ring of local layers stand, `[B, min(window, length)]`; an empty slot is padding."""
    size = min(window, cache.positions.positions.shape[1])
    newest = cache.length - 1
    number = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size  # [ring], negative where nothing was written
    ring = TokenPositions(*(jnp.take(part, jnp.maximum(number, 0), axis=1) for part in cache.positions))
    return ring._replace(segment_ids=jnp.where(number >= 0, ring.segment_ids, 0))


def concat_positions(*parts: TokenPositions) -> TokenPositions:
    """Places side by side, `[B, S + T + ...]` of `[B, S]`, `[B, T]`, ..."""
    return TokenPositions(*(jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True)))


def append(cache: Cache, new: CacheUpdate) -> Cache:
    """The cache with more tokens in it. There must be room: how many it holds is traced and cannot be checked here.

    Raises:
        ValueError: more tokens than the cache could ever hold.
    """
    length, room = new.positions.positions.shape[1], cache.positions.positions.shape[1]
    if length > room:
        raise ValueError(f"{length} tokens do not fit a cache of {room} slots")
    end = cache.length + length

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return _write(old, new, end - new.shape[-2])

    def put_place(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)

    def put_layers(old: LayerCaches | None, new: LayerCaches | None) -> LayerCaches | None:
        if old is None or new is None:
            return None
        appended = jax.tree.map(put, old._replace(states=None), new._replace(states=None))
        return appended._replace(states=new.states)  # these are not written to, but replaced

    layers, tail, lead = map(
        put_layers, (cache.layers, cache.suffix, cache.prefix), (new.layers, new.suffix, new.prefix)
    )
    return Cache(layers, tail, TokenPositions(*map(put_place, cache.positions, new.positions)), end, lead)


def attention_with_cache(
    query: jax.Array,
    past: KV,
    own: KV,
    mask: jax.Array,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """As `attention.attend`, to what a cache holds and to the call's own tokens, without writing them side by side.

    Args:
        query: `[B, T, N, H]`.
        past: of the cache, `[B, K, S, H]`.
        own: of the call's tokens, `[B, K, T, H]`.
        mask: `[B, T, S + T]` bool, True where seen.
        scale: what scores are multiplied by.
        soft_cap: bounds scores, see `attention.capped`.
        sinks: `[N]`, see `attention.sunk`.

    Returns:
        `[B, T, N, V]`, V the width of a value, in the dtype of `query`; scores, softmax and sums are float32.
    """
    batch, length, heads, width = query.shape
    kv_heads, slots = past.key.shape[1:3]
    rows = jnp.transpose(query.reshape(batch, length, kv_heads, -1, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    rows = rows.reshape(batch, kv_heads, -1, width)
    scores = [
        jnp.einsum("bkmh,bksh->bkms", rows, part.key, preferred_element_type=jnp.float32) * scale
        for part in (past, own)
    ]
    joint = jnp.concatenate(scores, axis=-1)
    if soft_cap is not None:
        joint = apply_soft_cap(joint, soft_cap)
    joint = joint.reshape(batch, kv_heads, -1, length, slots + length)  # [B, K, G, T, S + T]
    joint = jnp.where(mask[:, None, None], joint, MASK_VALUE)
    weights = jax.nn.softmax(joint, axis=-1).astype(query.dtype)
    weights = weights.reshape(batch, kv_heads, -1, slots + length)
    before, among = (
        jnp.einsum("bkms,bksh->bkmh", part, values, preferred_element_type=jnp.float32)
        for part, values in ((weights[..., :slots], past.value), (weights[..., slots:], own.value))
    )
    mixed = (before + among).reshape(batch, kv_heads, -1, length, past.value.shape[-1])
    if sinks is not None:
        mixed = apply_sinks(mixed, jax.nn.logsumexp(joint, axis=-1), sinks)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1).astype(query.dtype)


def _write(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """`[..., slots, H]` with `[..., T, H]` in it, the first of which is token number `start` of all."""
    size, length = old.shape[-2], new.shape[-2]
    new = new.astype(old.dtype)
    if length == 1:  # in place, where the cache is not needed any more as it was
        return jax.lax.dynamic_update_slice_in_dim(old, new, start % size, axis=old.ndim - 2)
    return old.at[..., (start + jnp.arange(length)) % size, :].set(new, unique_indices=True)
