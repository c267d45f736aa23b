"""The decoder: a period of layers that repeats, the scan over periods, the cache; knows no mesh, adapter or loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.activations import arrive, constrain
from nnxdsl.models.attention import Places, right_padded
from nnxdsl.models.blocks import KV, Block, Context, context, norm_of, write
from nnxdsl.models.decoder_config import DecoderConfig
from nnxdsl.models.layers import Embedding, Head
from nnxdsl.models.pipeline import Stages, run_stages

Remat = Literal["none", "full"]


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
    """A decoder, from tokens to final hidden states.

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
        embed: the embedding.
        layers: a Period whose Variables have a leading axis "layers" of `config.periods`; None without periods.
        tail: a Period of the remaining layers; None without any.
        norm: the final norm.
        lm_head: the output head; None where it is tied to the embedding.
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
        vocab, embed = config.vocab_size, config.embed_dim
        self.embed = Embedding(vocab, embed, scaled=config.scale_embedding, rngs=rngs, param_dtype=param_dtype)
        self.layers = (
            _stack(lambda key: period(config.window_pattern, nnx.Rngs(params=key)), rngs.params(), config.periods)
            if config.periods
            else None
        )
        self.tail = period(config.tail_layers, nnx.Rngs(params=rngs.params())) if config.tail_layers else None
        self.norm = norm_of(config, embed, "norm", param_dtype)
        self.lm_head = None if config.tied_head else Head(vocab, embed, rngs=rngs, param_dtype=param_dtype)

    def __call__(
        self,
        tokens: jax.Array,
        places: Places,
        *,
        cache: Cache | None = None,
        dtype: DTypeLike,
        remat: Remat = "none",
        stages: Stages | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Hidden states after the final norm.

        Args:
            tokens: `[B, T]` int32.
            places: of the tokens, each `[B, T]`.
            cache: if given, the tokens are written to it at its index and look at all its slots. There must be room
                for them: the index is traced and cannot be checked here.
            dtype: of the residual stream and the matrix products; norms, softmax and RoPE are float32.
            remat: "full" recomputes each period in the backward pass; "none" keeps what it needs.
            stages: cuts the stack of periods into stages that work at the same time; not with a cache.

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
            keys = Places(*(write(old, new, index, axis=1) for old, new in zip(cache.places, places, strict=True)))
        shared = context(self.config, places, keys, index)
        x = constrain(self.embed(tokens, dtype), "batch", "length", "activation_embed")  # [B, T, D]
        layers, tail = (None, None) if cache is None else (cache.layers, cache.tail)
        if self.layers is not None and stages is not None and cache is None:
            x = _run_in_stages(self.layers, x, shared, stages, remat)
        elif self.layers is not None:
            x, layers = _run_stack(self.layers, x, shared, layers, self.config.periods, remat)
        if self.tail is not None:
            x, tail = _run_tail(self.tail, x, shared, tail, remat)
        hidden = constrain(self.norm(x), "batch", "length", "activation_embed")
        return hidden, None if index is None else Cache(layers, tail, keys, index + length)

    def head(self) -> jax.Array:
        """The output head `[V, D]`, the embedding's table if tied, in its own dtype; logits are `hidden @ head.T`."""
        return self.embed.embedding[...] if self.lm_head is None else self.lm_head.kernel[...]


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
        state = arrive(state, "layers")
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


def _run_in_stages(layers: Period, x: jax.Array, context: Context, stages: Stages, remat: Remat) -> jax.Array:
    graphdef, state = nnx.split(layers)
    run = _period_runner(graphdef, remat)

    def stack(state: nnx.State, x: jax.Array, context: Context) -> jax.Array:
        def step(x: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
            return run(arrive(state, "layers"), x, context, None)[0], None

        return jax.lax.scan(step, x, state)[0]

    return run_stages(stack, state, x, context, stages)


def _run_tail(
    tail: Period, x: jax.Array, context: Context, past: KV | None, remat: Remat
) -> tuple[jax.Array, KV | None]:
    graphdef, state = nnx.split(tail)
    x, new = _period_runner(graphdef, remat)(state, x, context, past)
    if past is None:
        return x, None
    return x, jax.tree.map(lambda part, new: write(part, new, context.first_slot, axis=2), past, new)


def _period_runner(graphdef: nnx.GraphDef, remat: Remat) -> Callable[..., tuple[jax.Array, KV | None]]:
    def run(state: nnx.State, x: jax.Array, context: Context, past: KV | None) -> tuple[jax.Array, KV | None]:
        return nnx.merge(graphdef, state)(x, context, past)

    # A scan's body is not merged with its own recomputation, so the barrier against that is not needed; the tail is
    # outside the scan, and the barrier costs it nothing that matters.
    return jax.checkpoint(run) if remat == "full" else run
