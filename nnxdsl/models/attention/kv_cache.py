"""The KV cache: keys and values of earlier tokens, and attention over them.

Global layers store every token. A local layer never attends beyond its window, so it has a ring buffer: token number n
of a row is in slot n % window, and replaces the one that has just left the window. Keys are stored after their
rotation, so the slots' positions alone determine the mask, in any order of the slots.

Keys and values may be stored in 8 bits, see `QuantizedHeads`. They are quantized when they are written, and each layer
reads its own as they are: it is scores and attention weights that are multiplied by the scales of their tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.models.attention.dot_product import MASK_VALUE, apply_sinks, apply_soft_cap
from nnxdsl.models.attention.positions import PrefixRows, TokenPositions
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.mixer import mixer_class

CacheT = TypeVar("CacheT")

ReturnKV = bool | KVCacheDtype
"""Whether a call returns its keys and values, or in which dtype other than its own."""


class QuantizedHeads(NamedTuple):
    """Keys or values in 8 bits, symmetric, with a scale for each token and head.

    Attributes:
        values: `[..., slots, head_dim]` int8, from -127 to 127.
        scale: `[..., slots, 1]` float32.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the keys or values."""
        return self.values.shape


Heads = jax.Array | QuantizedHeads


class KV(NamedTuple):
    """Keys and values, after norm and rotation; any leading axes, then `[B, kv_heads, slots, head_dim]`."""

    key: Heads
    value: Heads


class IndexedKV(NamedTuple):
    """Keys and values of latent attention with an indexer, and its keys `[..., B, 1, slots, head_dim]`."""

    key: Heads
    value: Heads
    index_key: jax.Array


def quantize_heads(heads: jax.Array) -> QuantizedHeads:
    """Keys or values `[..., slots, head_dim]` in 8 bits."""
    heads = heads.astype(jnp.float32)
    scale = jnp.max(jnp.abs(heads), axis=-1, keepdims=True) / 127
    return QuantizedHeads(jnp.round(heads / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), scale)


def to_cache_dtype(kv: CacheT, dtype: ReturnKV | None) -> CacheT:
    """A layer's keys and values as a cache of that dtype holds them; states of linear layers stay as they are.

    So do the keys of an indexer: rounding would select other tokens.
    """
    if dtype is None or isinstance(dtype, bool) or not isinstance(kv, KV | IndexedKV):
        return kv
    assert isinstance(kv.key, jax.Array)
    assert isinstance(kv.value, jax.Array)
    return kv._replace(key=quantize_heads(kv.key), value=quantize_heads(kv.value))


def empty_kv(config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> KV:
    """Keys and values of one layer without tokens."""
    shape = (batch, config.num_kv_heads, slots)
    return KV(*(jnp.zeros((*shape, width), dtype) for width in config.head_widths))


class PrefixedKV(NamedTuple):
    """Keys and values of each row's own tokens, and those `[U, K, P, H]` of the prefixes that rows share."""

    key: Heads
    value: Heads
    prefix: KV


class Prefixes(NamedTuple):
    """The beginnings of rows, stored once for all rows that begin alike.

    They fill the first P slots of a row but one: a row has the last token of its prompt, and all after it, for itself.

    Attributes:
        layers: of each layer with a cache `KV` `[U, kv_heads, P, head_dim]`; None where rows have all of their tokens.
        members: see `PrefixRows`.
    """

    layers: tuple[KV | None, ...]
    members: PrefixRows

    @property
    def size(self) -> int:
        """Slots of a row that a prefix fills, the padding before it included."""
        return self.members.is_token.shape[-1] - 1


class SharedKV(NamedTuple):
    """Keys and values of another layer, of the same kind, that a layer without its own attends to.

    Attributes:
        past: those in that layer's cache; None without a cache.
        new: those of this call's tokens, `[B, kv_heads, T, head_dim]`.
    """

    past: KV | PrefixedKV | None
    new: KV


class Cache(NamedTuple):
    """Caches of all layers; rows of fewer tokens than others begin with padding, or have a length of their own.

    Attributes:
        layers: of each layer with keys and values of its own, in their order: `KV` `[B, kv_heads, slots, head_dim]`,
            `IndexedKV`, or the state of a linear layer, of constant size; None of a layer without mixer.
        positions: of all tokens, `[B, length]`; unused slots are padding.
        length: int32, the number of tokens so far, padding included: a scalar, or `[B]` where rows differ.
        prefixes: the beginnings of rows, which the layers that share them do not store; None without any.
    """

    layers: tuple[Any, ...]
    positions: TokenPositions
    length: jax.Array
    prefixes: Prefixes | None = None

    def pasts(self) -> tuple[Any, ...]:
        """What each layer attends to: its cache, with the prefixes if it shares them."""
        if self.prefixes is None:
            return self.layers
        pairs = zip(self.layers, self.prefixes.layers, strict=True)
        return tuple(kv if prefix is None else PrefixedKV(kv.key, kv.value, prefix) for kv, prefix in pairs)


class CacheUpdate(NamedTuple):
    """The keys and values of one call's tokens, for `append`.

    Attributes:
        layers: as in the cache, with a slot for each token; local layers may have only the last.
        positions: of the tokens, `[B, T]`.
    """

    layers: tuple[Any, ...]
    positions: TokenPositions


def init_cache(
    config: DecoderConfig,
    batch: int,
    length: int,
    dtype: DTypeLike,
    spare: int = 0,
    prefixes: Prefixes | None = None,
    kv_cache_dtype: KVCacheDtype | None = None,
) -> Cache:
    """An empty cache.

    Args:
        config: the decoder's config.
        batch: rows.
        length: tokens of a row: the prompt with its padding, and the completion.
        dtype: the `dtype` of the calls.
        spare: most tokens that `rewind` will drop at one time.
        prefixes: the beginnings of rows; None without any.
        kv_cache_dtype: of keys and values; None for `dtype`, which states of linear layers have in any case.

    Returns:
        A cache of zeros; layers with a window have `min(window + spare, length)` slots, others `length`, less those of
        the prefixes.
    """

    def empty(kind: LayerKind, prefix: KV | None) -> Any:
        layer, room = config.layer(kind), length - (0 if prefix is None or prefixes is None else prefixes.size)
        # A dropped token has replaced one that had left the window before, so that none is missing then.
        slots = room if layer.window is None else min(layer.window + spare, length)
        return layer.mixer and _empty_layer(layer.mixer, config.of(kind), batch, slots, dtype, kv_cache_dtype)

    kinds = config.layers.kinds[: config.layers.own_layers]
    layers = tuple(map(empty, kinds, prefixes.layers if prefixes else (None,) * len(kinds)))
    return Cache(layers, _no_positions(batch, length), jnp.zeros((), jnp.int32), prefixes)


def empty_prefixes(
    config: DecoderConfig,
    prefixes: int,
    rows: int,
    batch: int,
    length: int,
    dtype: DTypeLike,
    kv_cache_dtype: KVCacheDtype | None = None,
) -> Prefixes | None:
    """Prefixes without tokens; None where no layer can share them: rings, states and selections are of all of a row.

    Args:
        config: the decoder's config.
        prefixes: their number.
        rows: most rows of a prefix.
        batch: rows of the cache.
        length: slots of a prefix.
        dtype: as of `init_cache`.
        kv_cache_dtype: as of `init_cache`.
    """
    kinds = config.layers.kinds[: config.layers.own_layers]
    layers = init_cache(config, prefixes, length, dtype, kv_cache_dtype=kv_cache_dtype).layers
    pairs = zip(kinds, layers, strict=True)

    def is_whole(kind: LayerKind, kv: Any) -> bool:
        return isinstance(kv, KV) and config.layer(kind).window is None and kind != "shared_index"

    shared = tuple(one if is_whole(kind, one) else None for kind, one in pairs)
    if not any(shared):
        return None
    number = jnp.zeros((prefixes, rows), jnp.int32)
    return Prefixes(shared, PrefixRows(number, jnp.zeros(batch, jnp.int32), jnp.zeros((prefixes, length), bool)))


def mtp_cache(
    config: DecoderConfig, batch: int, length: int, dtype: DTypeLike, kv_cache_dtype: KVCacheDtype | None = None
) -> Cache:
    """An empty cache of the multi-token-prediction (MTP) layer; arguments as of `init_cache`."""
    (kind,) = config.mtp_layer_kinds
    mixer = config.layer(kind).mixer
    assert mixer is not None  # a global layer has one
    layers = (_empty_layer(mixer, config.of(kind), batch, length, dtype, kv_cache_dtype),)
    return Cache(layers, _no_positions(batch, length), jnp.zeros((), jnp.int32))


def _empty_layer(
    mixer: MixerConfig,
    config: DecoderConfig,
    batch: int,
    slots: int,
    dtype: DTypeLike,
    kv_cache_dtype: KVCacheDtype | None,
) -> Any:
    empty = jax.eval_shape(
        lambda: to_cache_dtype(mixer_class(mixer).init_cache(config, batch, slots, dtype), kv_cache_dtype)
    )
    return jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), empty)


def _no_positions(batch: int, length: int) -> TokenPositions:
    return TokenPositions(*(jnp.zeros((batch, length), jnp.int32) for _ in range(3)))


def shared_past(config: DecoderConfig, cache: Cache) -> dict[LayerKind, KV | PrefixedKV]:
    """The caches that the layers of `kv_shared` read, by kind: those of the last layer of their kind before them."""
    pasts = zip(config.layers.kinds, cache.pasts(), strict=False)  # in their order: the last one of a kind stays
    return {kind: kv for kind, kv in pasts if kind in config.layers.kv_shared}


def ring_positions(cache: Cache, size: int) -> TokenPositions:
    """Positions of the tokens in the ring buffers of local layers `[B, size]`; padding in empty slots."""
    newest = cache.length - 1 if cache.length.ndim == 0 else cache.length[:, None] - 1
    # [ring] or [B, ring], negative where nothing was written
    number = newest - (newest - jnp.arange(size, dtype=jnp.int32)) % size
    index = jnp.maximum(number, 0)
    take = partial(jnp.take if index.ndim == 1 else jnp.take_along_axis, axis=1)
    ring = TokenPositions(*(take(part, index) for part in cache.positions))
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

    def put(before: int, old: jax.Array, new: jax.Array) -> jax.Array:
        start = end - before - new.shape[-2]
        return _write(old, new, start) if end.ndim == 0 else jax.vmap(_write)(old, new, start)

    def put_place(old: jax.Array, new: jax.Array) -> jax.Array:
        if end.ndim == 0:
            return jax.lax.dynamic_update_slice_in_dim(old, new, cache.length, axis=1)
        return jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))(old, new, cache.length, 0)

    def put_layer(old: Any, new: Any, prefix: KV | None) -> Any:
        if not isinstance(old, KV | IndexedKV):
            return new  # states are replaced as a whole
        return jax.tree.map(partial(put, 0 if prefix is None or prefixes is None else prefixes.size), old, new)

    prefixes = cache.prefixes
    layers = tuple(map(put_layer, cache.layers, new.layers, prefixes.layers if prefixes else (None,) * len(new.layers)))
    return Cache(layers, TokenPositions(*map(put_place, cache.positions, new.positions)), end, prefixes)


def newest(kv: CacheT, window: int | None) -> CacheT:
    """Keys and values of the tokens within a layer's window, if it has one."""
    return kv if window is None else jax.tree.map(lambda part: part[:, :, -window:], kv)


def rewind(cache: Cache, length: jax.Array) -> Cache:
    """Drops the last tokens of each row, so that `length` `[B]` are left; at most `spare` of them (see `init_cache`).

    Keys and values stay where they are until other tokens replace them. States of linear layers cannot drop tokens.
    """
    is_left = jnp.arange(cache.positions.positions.shape[1]) < length[:, None]  # [B, length]
    segments = jnp.where(is_left, cache.positions.segment_ids, 0)
    return cache._replace(length=length, positions=cache.positions._replace(segment_ids=segments))


def attention_with_cache(
    query: jax.Array,
    past: KV | IndexedKV | PrefixedKV,
    new_kv: KV,
    mask: jax.Array,
    scale: float,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    prefix: PrefixRows | None = None,
) -> jax.Array:
    """`dot_product_attention` to the tokens in a cache and to the call's own, without concatenating them.

    Queries of rows with the same prefix are multiplied with it together. Where the cache is quantized, the call's own
    keys and values are read quantized as well, so that a token attends alike whether others are in its call or before.

    Args:
        query: `[B, T, N, H]`.
        past: keys and values of the cache, `[B, K, S, H]`.
        new_kv: keys and values of the call's tokens, `[B, K, T, H]`.
        mask: `[B, T, S + T]` bool, True where the query attends to the key.
        scale: factor of the scores.
        soft_cap: bounds scores, see `apply_soft_cap`.
        sinks: `[N]`, see `apply_sinks`.
        prefix: the rows of the prefixes in `past`; None without any.

    Returns:
        `[B, T, N, V]`, V the width of a value, in the dtype of `query`; scores, softmax and sums are float32.
    """
    batch, length, heads, width = query.shape
    kv_heads, slots = past.key.shape[1:3]
    new_kv = to_cache_dtype(new_kv, "int8" if isinstance(past.key, QuantizedHeads) else None)
    rows = jnp.transpose(query.reshape(batch, length, kv_heads, -1, width), (0, 2, 3, 1, 4))  # [B, K, G, T, H]
    rows = rows.reshape(batch, kv_heads, -1, width)
    mask = jnp.tile(mask, (1, heads // kv_heads, 1))[:, None]  # [B, 1, G T, S + T]
    attended = _joined(
        _softmax_sums(rows, KV(past.key, past.value), mask[..., :slots], scale, soft_cap),
        _softmax_sums(rows, new_kv, mask[..., slots:], scale, soft_cap),
    )
    if isinstance(past, PrefixedKV):
        assert prefix is not None  # the view of a cache with prefixes has them
        count, places = prefix.rows.shape
        prefix_keys = jnp.moveaxis(rows[prefix.rows], 2, 1).reshape(count, kv_heads, -1, width)  # [U, K, rows of it, H]
        sums = _softmax_sums(prefix_keys, past.prefix, prefix.is_token[:, None, None], scale, soft_cap)
        attended = _joined(attended, jax.tree.map(lambda part: _rows_of(part, places)[prefix.place], sums))
    mixed = (attended.total / attended.weight).reshape(batch, kv_heads, -1, length, past.value.shape[-1])
    if sinks is not None:
        log_sum = attended.largest + jnp.log(attended.weight)
        mixed = apply_sinks(mixed, log_sum.reshape(mixed.shape[:-1]), sinks)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(batch, length, heads, -1).astype(query.dtype)


class _SoftmaxSums(NamedTuple):
    """Attention of queries to some of their keys, before the division by the sum of all weights; float32.

    Attributes:
        total: weighted sum of values `[..., M, V]`.
        weight: sum of the weights, `exp(score - largest)`, `[..., M, 1]`.
        largest: the largest score `[..., M, 1]`.
    """

    total: jax.Array
    weight: jax.Array
    largest: jax.Array


def _softmax_sums(rows: jax.Array, keys: KV, mask: jax.Array, scale: float, soft_cap: float | None) -> _SoftmaxSums:
    """Attention of queries `[B, K, M, H]` to keys under a mask that broadcasts to `[B, K, M, S]`."""
    scores = _scores(rows, keys.key) * scale
    if soft_cap is not None:
        scores = apply_soft_cap(scores, soft_cap)
    scores = jnp.where(mask, scores, MASK_VALUE)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    weight, value = jnp.sum(weights, axis=-1, keepdims=True), keys.value
    if isinstance(value, QuantizedHeads):
        weights, value = weights * jnp.swapaxes(value.scale, 2, 3), value.values.astype(rows.dtype)
    total = jnp.einsum("bkms,bksh->bkmh", weights.astype(rows.dtype), value, preferred_element_type=jnp.float32)
    return _SoftmaxSums(total, weight, largest)


def _joined(one: _SoftmaxSums, other: _SoftmaxSums) -> _SoftmaxSums:
    """Attention to the keys of both."""
    largest = jnp.maximum(one.largest, other.largest)
    shares = [jnp.exp(part.largest - largest) for part in (one, other)]
    total, weight = (shares[0] * mine + shares[1] * theirs for mine, theirs in zip(one[:2], other[:2], strict=True))
    return _SoftmaxSums(total, weight, largest)


def _rows_of(values: jax.Array, places: int) -> jax.Array:
    """Values `[U, K, places M, ...]` of prefixes as those of their rows, `[U places, K, M, ...]`."""
    split = values.reshape(*values.shape[:2], places, -1, *values.shape[3:])
    return jnp.moveaxis(split, 2, 1).reshape(-1, values.shape[1], *split.shape[3:])


def _scores(rows: jax.Array, key: Heads) -> jax.Array:
    """Products of queries `[B, K, M, H]` and keys `[B, K, S, H]`, `[B, K, M, S]` float32."""
    values = key.values.astype(rows.dtype) if isinstance(key, QuantizedHeads) else key
    products = jnp.einsum("bksh,bkmh->bksm", values, rows, preferred_element_type=jnp.float32)
    if isinstance(key, QuantizedHeads):
        products = products * key.scale
    # XLA:CPU takes three times as long for few queries times many keys; the barrier keeps it from turning this around.
    return jnp.swapaxes(jax.lax.optimization_barrier(products), 2, 3)


def _write(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """Writes `[..., T, H]` into `[..., slots, H]`, from token number `start` on."""
    size, length = old.shape[-2], new.shape[-2]
    new = new.astype(old.dtype)
    if length == 1:  # XLA does it in place where the old cache is not used again
        return jax.lax.dynamic_update_slice_in_dim(old, new, start % size, axis=old.ndim - 2)
    return old.at[..., (start + jnp.arange(length)) % size, :].set(new, unique_indices=True)
