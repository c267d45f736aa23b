"""The KV cache: keys and values of earlier tokens, and attention over them.

Global layers store every token. A local layer never attends beyond its window, so it has a ring buffer: token number n
of a row is in slot n % window, and replaces the one that has just left the window. Keys are stored after their
rotation, so the slots' positions alone determine the mask, in any order of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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


class IndexedKV(NamedTuple):
    """Keys and values of latent attention with an indexer, and its keys `[..., B, 1, slots, head_dim]`."""

    key: jax.Array
    value: jax.Array
    index_key: jax.Array


def empty_kv(config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> KV:
    """Keys and values of one layer without tokens."""
    shape = (batch, config.num_kv_heads, slots)
    return KV(*(jnp.zeros((*shape, width), dtype) for width in config.head_widths))


class SharedKV(NamedTuple):
    """Keys and values of another layer, of the same kind, that a layer without its own attends to.

    Attributes:
        past: those in that layer's cache; None without a cache.
        new: those of this call's tokens, `[B, kv_heads, T, head_dim]`.
    """

    past: KV | None
    new: KV


class LayerCaches(NamedTuple):
    """Keys and values of the layers of one period; any leading axes, then those below.

    Attributes:
        local_layers: `[layers, B, kv_heads, ring, head_dim]`; None without local layers.
        global_layers: `[layers, B, kv_heads, length, head_dim]`; None without global ones. With an indexer its keys as
            well.
        states: of linear layers, with a leading axis of layers, of constant size; None without linear layers.
        nope_layers: as `global_layers`, of layers without rotary positions.
    """

    local_layers: KV | None
    global_layers: KV | IndexedKV | None
    states: Any = None
    nope_layers: KV | None = None

    def layer(self, kind: LayerKind, layer: int) -> Any:
        """The cache of one layer, counted from 0 among those of its kind; None of a layer without mixer."""
        caches = {"local": self.local_layers, "global": self.global_layers, "linear": self.states}
        caches |= {"nope": self.nope_layers, "none": None}
        return jax.tree.map(lambda part: part[layer], caches[kind])


class Cache(NamedTuple):
    """Caches of all layers; rows of fewer tokens than others begin with padding, or have a length of their own.

    Attributes:
        layers: of the scanned layers, with a leading axis of `periods`; None without periods.
        suffix: of the layers after them; None without any.
        positions: of all tokens, `[B, length]`; unused slots are padding.
        length: int32, the number of tokens so far, padding included: a scalar, or `[B]` where rows differ.
        prefix: of the layers before the scanned ones; None without any.
    """

    layers: LayerCaches | None
    suffix: LayerCaches | None
    positions: TokenPositions
    length: jax.Array
    prefix: LayerCaches | None = None


class CacheUpdate(NamedTuple):
    """The keys and values of one call's tokens, for `append`.

    Attributes:
        layers: of the scanned layers as in the cache, with a slot for each token; local layers may have only the last.
        suffix: of the layers after them.
        positions: of the tokens, `[B, T]`.
        prefix: of the layers before them.
    """

    layers: LayerCaches | None
    suffix: LayerCaches | None
    positions: TokenPositions
    prefix: LayerCaches | None = None


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: DTypeLike, spare: int = 0) -> Cache:
    """An empty cache.

    Args:
        config: the decoder's config.
        batch: rows.
        length: tokens of a row: the prompt with its padding, and the completion.
        dtype: of keys and values; the `dtype` of the calls.
        spare: most tokens that `rewind` will drop at one time.

    Returns:
        A cache of zeros; local layers have `min(window + spare, length)` slots, global ones `length`.
    """
    # A dropped token has replaced one that had left the window before, so that none is missing then.
    ring = min(config.window + spare, length) if config.window else length

    def slots(kinds: Sequence[LayerKind], *leading: int) -> LayerCaches:
        def stacked(kind: LayerKind) -> Any:
            mixer = mixer_class(config, kind) if kind in kinds else None
            if mixer is None:
                return None
            one = mixer.init_cache(config.of(kind), batch, ring if kind == "local" else length, dtype)
            axes = (*leading, kinds.count(kind))
            return jax.tree.map(lambda part: jnp.zeros((*axes, *part.shape), part.dtype), one)

        return LayerCaches(stacked("local"), stacked("global"), stacked("linear"), stacked("nope"))

    layers = slots(config.pattern, config.periods) if config.periods else None
    tail = slots(config.suffix_layers) if config.suffix_layers else None
    positions = TokenPositions(*(jnp.zeros((batch, length), jnp.int32) for _ in range(3)))
    return Cache(
        layers, tail, positions, jnp.zeros((), jnp.int32), slots(config.prefix_layers) if config.prefix_layers else None
    )


def mtp_cache(config: DecoderConfig, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """An empty cache of the multi-token-prediction (MTP) layer; arguments as of `init_cache`."""
    mixer = mixer_class(config, "global")
    assert mixer is not None  # a global layer has one
    one = mixer.init_cache(config.of("global"), batch, length, dtype)
    layers = LayerCaches(None, jax.tree.map(lambda part: part[None], one))
    positions = TokenPositions(*(jnp.zeros((batch, length), jnp.int32) for _ in range(3)))
    return Cache(None, layers, positions, jnp.zeros((), jnp.int32))


def shared_past(config: DecoderConfig, cache: Cache) -> dict[LayerKind, KV]:
    """The caches that the layers of `kv_sharing` read, by kind: those of the last layer of their kind before them."""
    found: dict[LayerKind, KV] = {}
    for kind in dict.fromkeys(config.sharing_layers):
        if kind in config.suffix_layers:
            assert cache.suffix is not None  # there are such layers
            found[kind] = cache.suffix.layer(kind, config.suffix_layers.count(kind) - 1)
        else:
            last: LayerCaches = jax.tree.map(lambda part: part[-1], cache.layers)
            found[kind] = last.layer(kind, config.pattern.count(kind) - 1)
    return found


def ring_positions(cache: Cache, window: int) -> TokenPositions:
    """Positions of the tokens in the ring buffer of local layers `[B, ring]`; padding in empty slots."""
    groups = (group for group in (cache.layers, cache.suffix, cache.prefix) if group is not None)
    rings = [group.local_layers.key.shape[-2] for group in groups if group.local_layers is not None]
    size = rings[0] if rings else min(window, cache.positions.positions.shape[1])
    newest = cache.length - 1 if cache.length.ndim == 0 else cache.length[:, None] - 1
    # [ring] or [B, ring], negative where nothing was written
    number = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size
    at = jnp.maximum(number, 0)
    take = partial(jnp.take if at.ndim == 1 else jnp.take_along_axis, axis=1)
    ring = TokenPositions(*(take(part, at) for part in cache.positions))
    return ring._replace(segment_ids=jnp.where(number >= 0, ring.segment_ids, 0))


def concat_positions(*parts: TokenPositions) -> TokenPositions:
    """Concatenates positions `[B, S]`, `[B, T]`, ... to `[B, S + T + ...]`."""
    return TokenPositions(*(jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True)))


def append(cache: Cache, new: CacheUpdate) -> Cache:
    """Appends tokens to a cache. The caller checks that they fit, since the number of stored tokens is traced.

    Raises:
        ValueError: more tokens than the cache has slots.
    """
    length, room = new.positions.positions.shape[1], cache.positions.positions.shape[1]
    if length > room:
        raise ValueError(f"{length} tokens do not fit a cache of {room} slots")
    end = cache.length + length

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        start, rows = end - new.shape[-2], old.ndim - 4
        return _write(old, new, start) if end.ndim == 0 else jax.vmap(_write, (rows, rows, 0), rows)(old, new, start)

    def put_place(old: jax.Array, new: jax.Array) -> jax.Array:
        if end.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)
        return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(old, new, cache.length, 0)

    def put_layers(old: LayerCaches | None, new: LayerCaches | None) -> LayerCaches | None:
        if old is None or new is None:
            return None
        appended = jax.tree.map(put, old._replace(states=None), new._replace(states=None))
        return appended._replace(states=new.states)  # states are replaced as a whole

    layers, tail, lead = map(
        put_layers, (cache.layers, cache.suffix, cache.prefix), (new.layers, new.suffix, new.prefix)
    )
    return Cache(layers, tail, TokenPositions(*map(put_place, cache.positions, new.positions)), end, lead)


def rewind(cache: Cache, length: jax.Array) -> Cache:
    """Drops the last tokens of each row, so that `length` `[B]` are left; at most `spare` of them (see `init_cache`).

    Keys and values stay where they are until other tokens replace them. States of linear layers cannot drop tokens.
    """
    is_left = jnp.arange(cache.positions.positions.shape[1]) < length[:, None]  # [B, length]
    segments = jnp.where(is_left, cache.positions.segment_ids, 0)
    return cache._replace(length=length, positions=cache.positions._replace(segment_ids=segments))


def attention_with_cache(
    query: jax.Array,
    past: KV | IndexedKV,
    own: KV,
    mask: jax.Array,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """`dot_product_attention` to the tokens in a cache and to the call's own, without concatenating them.

    Args:
        query: `[B, T, N, H]`.
        past: keys and values of the cache, `[B, K, S, H]`.
        own: keys and values of the call's tokens, `[B, K, T, H]`.
        mask: `[B, T, S + T]` bool, True where the query attends to the key.
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`.
        sinks: `[N]`, see `apply_sinks`.

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
    """Writes `[..., T, H]` into `[..., slots, H]`, from token number `start` on."""
    size, length = old.shape[-2], new.shape[-2]
    new = new.astype(old.dtype)
    if length == 1:  # XLA does it in place where the old cache is not used again
        return jax.lax.dynamic_update_slice_in_dim(old, new, start % size, axis=old.ndim - 2)
    return old.at[..., (start + jnp.arange(length)) % size, :].set(new, unique_indices=True)
