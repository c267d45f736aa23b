"""The Gemma 3 decoder: blocks, the period that repeats, the scan over periods; knows no mesh, adapter or loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention import Places, attend, masks, right_padded
from nnxdsl.models.config import DecoderConfig
from nnxdsl.models.layers import Embedding, Linear, RMSNorm, rope_tables, rotate

Remat = Literal["none", "full"]


class KV(NamedTuple):
    """Keys and values, after norm and rotation; any leading axes, then `[B, S, kv_heads, head_dim]`."""

    key: jax.Array
    value: jax.Array


class Cache(NamedTuple):
    """What a decoder remembers of the tokens before, in `length` slots that are filled from the left.

    Attributes:
        layers: of the scanned layers, `[periods, window_pattern, B, length, kv_heads, head_dim]`; None without periods.
        tail: of the tail, `[tail_layers, B, length, kv_heads, head_dim]`; None without a tail.
        places: of the slots, `[B, length]`; a slot not written yet is padding.
        next_slot: int32 scalar, the slot that the next token goes to.
    """

    layers: KV | None
    tail: KV | None
    places: Places
    next_slot: jax.Array


class Context(NamedTuple):
    """What all layers of one call share.

    Attributes:
        local_mask: `[B, T, S]` bool.
        global_mask: `[B, T, S]` bool.
        local_rope: (sin, cos), each `[B, T, head_dim // 2]` float32.
        global_rope: the same for global layers.
        first_slot: the slot where this call's tokens begin in the cache; None without a cache.
    """

    local_mask: jax.Array
    global_mask: jax.Array
    local_rope: tuple[jax.Array, jax.Array]
    global_rope: tuple[jax.Array, jax.Array]
    first_slot: jax.Array | None


def context(config: DecoderConfig, queries: Places, keys: Places, index: jax.Array | None = None) -> Context:
    """Masks and rotary angles of one call, for tokens at `queries` `[B, T]` that look at `keys` `[B, S]`."""
    local_mask, global_mask = masks(queries, keys, config.window)
    return Context(
        local_mask,
        global_mask,
        rope_tables(queries.position, config.head_dim, config.rope_base_local, 1.0),
        rope_tables(queries.position, config.head_dim, config.rope_base_global, config.rope_scale),
        index,
    )


class Attention(nnx.Module):
    """Grouped-query attention with normed queries and keys.

    Args:
        config: the decoder's numbers.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed, head_dim = config.embed_dim, config.head_dim
        heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        self.query_scale = config.query_scale
        self.query = Linear(embed, heads, axes=("embed", "heads"), rngs=rngs, param_dtype=param_dtype)
        self.key = Linear(embed, kv_heads, axes=("embed", "kv_heads"), rngs=rngs, param_dtype=param_dtype)
        self.value = Linear(embed, kv_heads, axes=("embed", "kv_heads"), rngs=rngs, param_dtype=param_dtype)
        self.output = Linear(heads, embed, axes=("heads", "embed"), rngs=rngs, param_dtype=param_dtype)
        self.query_norm = RMSNorm(head_dim, axis="head_dim", eps=config.norm_eps, param_dtype=param_dtype)
        self.key_norm = RMSNorm(head_dim, axis="head_dim", eps=config.norm_eps, param_dtype=param_dtype)

    def __call__(
        self, x: jax.Array, mask: jax.Array, rope: tuple[jax.Array, jax.Array], past: KV | None, index: jax.Array | None
    ) -> tuple[jax.Array, KV]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values; `past` is a layer's cache, `[B, S, K, H]`."""
        split = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.query_norm(self.query(x).reshape(split)), rope)  # [B, T, N, H]
        key = rotate(self.key_norm(self.key(x).reshape(split)), rope)  # [B, T, K, H]
        value = self.value(x).reshape(split)
        new = KV(key, value)
        if past is not None:
            key, value = (_write(slots, part, index, axis=1) for slots, part in zip(past, new, strict=True))
        mixed = attend(query, key.astype(x.dtype), value.astype(x.dtype), mask, self.query_scale)  # [B, T, N, H]
        return self.output(mixed.reshape(*x.shape[:2], -1)), new


class MLP(nnx.Module):
    """Gated MLP: down(gelu(gate(x)) * up(x)), gelu in its tanh form (Shazeer, arXiv:2002.05202).

    Args:
        config: the decoder's numbers.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed, mlp = config.embed_dim, config.mlp_dim
        self.gate = Linear(embed, mlp, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.up = Linear(embed, mlp, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.down = Linear(mlp, embed, axes=("mlp", "embed"), rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


class Block(nnx.Module):
    """One layer: attention and MLP, each between a norm before and a norm after, added to the residual stream.

    Args:
        config: the decoder's numbers.
        is_global: attends over everything, not over the window.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, is_global: bool, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.embed_dim, axis="norm", eps=config.norm_eps, param_dtype=param_dtype)

        self.is_global = is_global
        self.pre_attention_norm = norm()
        self.attention = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_norm = norm()
        self.pre_mlp_norm = norm()
        self.mlp = MLP(config, rngs=rngs, param_dtype=param_dtype)
        self.post_mlp_norm = norm()

    def __call__(self, x: jax.Array, context: Context, past: KV | None) -> tuple[jax.Array, KV]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values; `past` is this layer's cache."""
        mask = context.global_mask if self.is_global else context.local_mask
        rope = context.global_rope if self.is_global else context.local_rope
        mixed, new = self.attention(self.pre_attention_norm(x), mask, rope, past, context.first_slot)
        x = x + self.post_attention_norm(mixed)
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x))), new


class Period(nnx.Module):
    """Layers that follow each other; the decoder repeats it, and adapters are put on it before it is repeated.

    Args:
        config: the decoder's numbers.
        layers: how many; the last of `config.window_pattern` is global.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, layers: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.blocks = nnx.List(
            [
                Block(config, is_global=config.is_global(layer), rngs=rngs, param_dtype=param_dtype)
                for layer in range(layers)
            ]
        )

    def __call__(self, x: jax.Array, context: Context, past: KV | None = None) -> tuple[jax.Array, KV | None]:
        """`[B, T, D]` to the same; with `past` (`[layers, B, S, K, H]`) also the new tokens' `[layers, B, T, K, H]`."""
        fresh = []
        for layer, block in enumerate(self.blocks):
            x, new = block(x, context, None if past is None else KV(past.key[layer], past.value[layer]))
            fresh.append(new)
        if past is None:
            return x, None
        return x, KV(jnp.stack([kv.key for kv in fresh]), jnp.stack([kv.value for kv in fresh]))


def example_inputs(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, Context]:
    """The smallest inputs that a Period of `config` runs on: what an `adapt` function gives to qwix."""
    places = right_padded(jnp.ones((1,), jnp.int32), 1)
    return jnp.zeros((1, 1, config.embed_dim), dtype), context(config, places, places)


class Decoder(nnx.Module):
    """A decoder of the Gemma 3 kind, from tokens to final hidden states.

    Layer i of the published numbering is `layers.blocks.{i % window_pattern}` at stack position `i // window_pattern`;
    the layers after the last whole period are `tail.blocks`.

    Args:
        config: the decoder's numbers.
        rngs: draws the weights from its `params` stream.
        param_dtype: dtype of all weights.
        adapt: applied to one Period before it is stacked, and to the tail; may return a Period of another class with
            more Variables (as qwix does). It is traced under `vmap`. What it draws from a seed of its own is the same
            for each period of the stack: draw such leaves anew where that matters.

    Attributes:
        embed: the tied embedding.
        layers: a Period whose Variables have a leading axis "layers" of `config.periods`; None without periods.
        tail: a Period of the remaining layers; None without any.
        norm: the final norm.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        adapt: Callable[[Period], Period] = lambda period: period,
    ) -> None:
        def period(layers: int, rngs: nnx.Rngs) -> Period:
            return adapt(Period(config, layers, rngs=rngs, param_dtype=param_dtype))

        self.config = config
        self.embed = Embedding(config.vocab_size, config.embed_dim, rngs=rngs, param_dtype=param_dtype)
        self.layers = (
            _stack(lambda key: period(config.window_pattern, nnx.Rngs(params=key)), rngs.params(), config.periods)
            if config.periods
            else None
        )
        self.tail = period(config.tail_layers, nnx.Rngs(params=rngs.params())) if config.tail_layers else None
        self.norm = RMSNorm(config.embed_dim, axis="norm", eps=config.norm_eps, param_dtype=param_dtype)

    def __call__(
        self,
        tokens: jax.Array,
        places: Places,
        *,
        cache: Cache | None = None,
        dtype: DTypeLike,
        remat: Remat = "none",
    ) -> tuple[jax.Array, Cache | None]:
        """Hidden states after the final norm.

        Args:
            tokens: `[B, T]` int32.
            places: of the tokens, each `[B, T]`.
            cache: if given, the tokens are written to it at its index and look at all its slots. There must be room
                for them: the index is traced and cannot be checked here.
            dtype: of the residual stream and the matrix products; norms, softmax and RoPE are float32.
            remat: "full" recomputes each period in the backward pass; "none" keeps what it needs.

        Returns:
            (hidden `[B, T, D]` in `dtype`, the cache with the tokens in it; None if none was given).

        Raises:
            ValueError: an unknown `remat`, or more tokens than the cache has slots.
        """
        if remat not in ("none", "full"):
            raise ValueError(f"remat: expected 'none' or 'full', got {remat!r}")
        length = tokens.shape[1]
        keys, index = places, None
        if cache is not None:
            index = cache.next_slot
            if length > cache.places.position.shape[1]:
                raise ValueError(f"{length} tokens do not fit a cache of {cache.places.position.shape[1]} slots")
            keys = Places(*(_write(old, new, index, axis=1) for old, new in zip(cache.places, places, strict=True)))
        shared = context(self.config, places, keys, index)
        x = self.embed(tokens, dtype)  # [B, T, D]
        layers, tail = (None, None) if cache is None else (cache.layers, cache.tail)
        if self.layers is not None:
            x, layers = _run_stack(self.layers, x, shared, layers, self.config.periods, remat)
        if self.tail is not None:
            x, tail = _run_tail(self.tail, x, shared, tail, remat)
        hidden = self.norm(x)
        return hidden, None if index is None else Cache(layers, tail, keys, index + length)

    def head(self) -> jax.Array:
        """The tied output head `[V, D]`, in its own dtype; logits are `hidden @ head.T`."""
        return self.embed.embedding[...]


def init_cache(config: DecoderConfig, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """An empty cache.

    Args:
        config: of the decoder that will fill it.
        batch: rows.
        length: slots of a row: prompt with its padding, and all tokens to come.
        dtype: of keys and values; the `dtype` of the calls.

    Returns:
        A cache of zeros.
    """

    def empty(*leading: int) -> KV | None:
        shape = (*leading, batch, length, config.num_kv_heads, config.head_dim)
        return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) if leading[0] else None

    slots = (jnp.zeros((batch, length), jnp.int32) for _ in range(3))
    return Cache(
        empty(config.periods, config.window_pattern),
        empty(config.tail_layers),
        Places(*slots),
        jnp.zeros((), jnp.int32),
    )


def _write(slots: jax.Array, new: jax.Array, start: jax.Array | None, axis: int) -> jax.Array:
    assert start is not None  # a cache and its slot come together
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis)


def _stack(build: Callable[[jax.Array], Period], key: jax.Array, periods: int) -> Period:
    """One Period whose Variables hold those of `periods` Periods, each built from a key of its own."""
    graphdefs = []

    def one(key: jax.Array) -> nnx.State:
        graphdef, state = nnx.split(build(key))
        graphdefs.append(graphdef)  # static, so it may leave the trace
        return state

    state = jax.vmap(one)(jax.random.split(key, periods))
    flat = nnx.to_flat_state(state)
    for _, variable in flat:
        axes = variable.get_metadata().get("axes") or (None,) * (variable.get_value().ndim - 1)
        variable.set_metadata(axes=("layers", *axes))
    return nnx.merge(graphdefs[-1], nnx.from_flat_state(flat))


def _run_stack(
    layers: Period, x: jax.Array, context: Context, past: KV | None, periods: int, remat: Remat
) -> tuple[jax.Array, KV | None]:
    """Runs the periods as a scan over their weights, so that compile time does not grow with depth."""
    graphdef, state = nnx.split(layers)
    run = _period_runner(graphdef, remat)

    def step(carry: tuple[jax.Array, KV | None], xs: tuple[jax.Array, nnx.State]) -> tuple[tuple, None]:
        x, past = carry
        number, state = xs
        if past is None:
            return (run(state, x, context, None)[0], None), None
        # The cache is carried, not scanned over: so XLA writes the new tokens in place.
        mine = jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, number, keepdims=False), past)
        x, new = run(state, x, context, mine)
        assert context.first_slot is not None  # a cache and its slot come together
        start = (number, 0, 0, context.first_slot, 0, 0)
        past = jax.tree.map(
            lambda part, new: jax.lax.dynamic_update_slice(part, new[None].astype(part.dtype), start), past, new
        )
        return (x, past), None

    (x, past), _ = jax.lax.scan(step, (x, past), (jnp.arange(periods, dtype=jnp.int32), state))
    return x, past


def _run_tail(
    tail: Period, x: jax.Array, context: Context, past: KV | None, remat: Remat
) -> tuple[jax.Array, KV | None]:
    graphdef, state = nnx.split(tail)
    x, new = _period_runner(graphdef, remat)(state, x, context, past)
    if past is None:
        return x, None
    return x, jax.tree.map(lambda part, new: _write(part, new, context.first_slot, axis=2), past, new)


def _period_runner(graphdef: nnx.GraphDef, remat: Remat) -> Callable[..., tuple[jax.Array, KV | None]]:
    def run(state: nnx.State, x: jax.Array, context: Context, past: KV | None) -> tuple[jax.Array, KV | None]:
        return nnx.merge(graphdef, state)(x, context, past)

    # A scan's body is not merged with its own recomputation, so the barrier against that is not needed; the tail is
    # outside the scan, and the barrier costs it nothing that matters.
    return jax.checkpoint(run) if remat == "full" else run
