"""The KV cache: keys and values of earlier tokens, and attention over them.

Global layers store every token. A local layer never attends beyond its window, so it has a ring buffer: token number n
of a row is in slot n % window, and replaces the one that has just left the window. Keys are stored after their
rotation, so the slots' positions alone determine the mask, in any order of the slots.
"""

from __future__ import annotations

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


class Cache(NamedTuple):
    """Caches of all layers; rows of fewer tokens than others begin with padding, or have a length of their own.

    Attributes:
        layers: of each layer with keys and values of its own, in their order: `KV` `[B, kv_heads, slots, head_dim]`,
            `IndexedKV`, or the state of a linear layer, of constant size; None of a layer without mixer.
        positions: of all tokens, `[B, length]`; unused slots are padding.
        length: int32, the number of tokens so far, padding included: a scalar, or `[B]` where rows differ.
    """

    layers: tuple[Any, ...]
    positions: TokenPositions
    length: jax.Array


class CacheUpdate(NamedTuple):
    """The keys and values of one call's tokens, for `append`.

    Attributes:
        layers: as in the cache, with a slot for each token; local layers may have only the last.
        positions: of the tokens, `[B, T]`.
    """

    layers: tuple[Any, ...]
    positions: TokenPositions


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: DTypeLike, spare: int = 0) -> Cache:
    """An empty cache.

    Args:
        config: the decoder's config.
        batch: rows.
        length: tokens of a row: the prompt with its padding, and the completion.
        dtype: of keys and values; the `dtype` of the calls.
        spare: most tokens that `rewind` will drop at one time.

    Returns:
        A cache of zeros; layers with a window have `min(window + spare, length)` slots, others `length`.
    """

    def empty(kind: LayerKind) -> Any:
        layer = config.layer(kind)
        # A dropped token has replaced one that had left the window before, so that none is missing then.
        slots = length if layer.window is None else min(layer.window + spare, length)
        return layer.mixer and mixer_class(layer.mixer).init_cache(config.of(kind), batch, slots, dtype)

    layers = tuple(map(empty, config.layers[: config.own_layers]))
    return Cache(layers, _no_positions(batch, length), jnp.zeros((), jnp.int32))


def mtp_cache(config: DecoderConfig, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """An empty cache of the multi-token-prediction (MTP) layer; arguments as of `init_cache`."""
    (kind,) = config.mtp_layer_kinds
    mixer = config.layer(kind).mixer
    assert mixer is not None  # a global layer has one
    layers = (mixer_class(mixer).init_cache(config.of(kind), batch, length, dtype),)
    return Cache(layers, _no_positions(batch, length), jnp.zeros((), jnp.int32))


def _no_positions(batch: int, length: int) -> TokenPositions:
    return TokenPositions(*(jnp.zeros((batch, length), jnp.int32) for _ in range(3)))


def shared_past(config: DecoderConfig, cache: Cache) -> dict[LayerKind, KV]:
    """The caches that the layers of `kv_sharing` read, by kind: those of the last layer of their kind before them."""
    own = zip(config.layers, cache.layers, strict=False)  # in their order: the last one of a kind stays
    return {kind: kv for kind, kv in own if kind in config.sharing_layers}


def ring_positions(cache: Cache, size: int) -> TokenPositions:
    """Positions of the tokens in the ring buffers of local layers `[B, size]`; padding in empty slots."""
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
        start = end - new.shape[-2]
        return _write(old, new, start) if end.ndim == 0 else jax.vmap(_write)(old, new, start)

    def put_place(old: jax.Array, new: jax.Array) -> jax.Array:
        if end.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)
        return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(old, new, cache.length, 0)

    def put_layer(old: Any, new: Any) -> Any:
        return jax.tree.map(put, old, new) if isinstance(old, KV | IndexedKV) else new  # states are replaced as a whole

    layers = tuple(map(put_layer, cache.layers, new.layers))
    return Cache(layers, TokenPositions(*map(put_place, cache.positions, new.positions)), end)


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
    scores = [_scores(rows, part.key) * scale for part in (past, own)]
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


def _scores(rows: jax.Array, key: jax.Array) -> jax.Array:
    """Products of queries `[B, K, M, H]` and keys `[B, K, S, H]`, `[B, K, M, S]` float32."""
    products = jnp.einsum("bksh,bkmh->bksm", key, rows, preferred_element_type=jnp.float32)
    # XLA:CPU takes three times as long for few queries times many keys; the barrier keeps it from turning this around.
    return jnp.swapaxes(jax.lax.optimization_barrier(products), 2, 3)


def _write(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `[..., T, H]` into `[..., slots, H]`, from token number `start` on."""
    size, length = old.shape[-2], new.shape[-2]
    new = new.astype(old.dtype)
    if length == 1:  # XLA does it in place where the old cache is not used again
        return jax.lax.dynamic_update_slice_in_dim(old, new, start % size, axis=old.ndim - 2)
    return old.at[..., (start + jnp.arange(length)) % size, :].set(new, unique_indices=True)
