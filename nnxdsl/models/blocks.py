"""One layer of a decoder, made of attention and a gated MLP as its config says; knows nothing of the other layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.activations import constrain
from nnxdsl.models.attention import Places, attend, mask
from nnxdsl.models.decoder_config import Activation, DecoderConfig
from nnxdsl.models.layers import Linear, RMSNorm, rope_tables, rotate

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class KV(NamedTuple):
    """Keys and values, after norm and rotation; any leading axes, then `[B, S, kv_heads, head_dim]`."""

    key: jax.Array
    value: jax.Array


class View(NamedTuple):
    """What layers of one kind, local or global, share in one call.

    Attributes:
        mask: `[B, T, S]` bool, True where a token sees another.
        rope: (sin, cos), each `[B, T, head_dim // 2]` float32.
    """

    mask: jax.Array
    rope: tuple[jax.Array, jax.Array]


class Context(NamedTuple):
    """What all layers of one call share.

    Attributes:
        local_view: of layers with a window; None if no layer is local.
        global_view: of layers that attend over everything; None if no layer is global.
        first_slot: the slot where this call's tokens begin in the cache; None without a cache.
    """

    local_view: View | None
    global_view: View | None
    first_slot: jax.Array | None


def context(config: DecoderConfig, queries: Places, keys: Places, index: jax.Array | None = None) -> Context:
    """Masks and rotary angles of one call, for tokens at `queries` `[B, T]` that look at `keys` `[B, S]`."""
    local_view = global_view = None
    if config.window_pattern > 1:
        rope = rope_tables(queries.position, config.head_dim, config.rope_base_local)
        local_view = View(mask(queries, keys, config.window), rope)
    if config.periods:
        scaling = config.rope_scale, config.rope_ramp
        rope = rope_tables(queries.position, config.head_dim, config.rope_base_global, *scaling)
        global_view = View(mask(queries, keys), rope)
    return Context(local_view, global_view, index)


def norm_of(config: DecoderConfig, features: int, axis: str, param_dtype: DTypeLike) -> RMSNorm:
    """A norm as `config` has them, over an axis of this length and logical name."""
    return RMSNorm(features, axis=axis, eps=config.norm_eps, kind=config.norm_scale, param_dtype=param_dtype)


class Attention(nnx.Module):
    """Grouped-query attention, in some families with normed queries and keys.

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
        self.query_norm = norm_of(config, head_dim, "head_dim", param_dtype) if config.query_key_norm else None
        self.key_norm = norm_of(config, head_dim, "head_dim", param_dtype) if config.query_key_norm else None

    def __call__(self, x: jax.Array, view: View, past: KV | None, index: jax.Array | None) -> tuple[jax.Array, KV]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values; `past` is a layer's cache, `[B, S, K, H]`."""
        split = (*x.shape[:2], -1, self.head_dim)
        query = constrain(self.query(x).reshape(split), "batch", "length", "activation_heads", None)  # [B, T, N, H]
        key = constrain(self.key(x).reshape(split), "batch", "length", "activation_kv_heads", None)  # [B, T, K, H]
        value = constrain(self.value(x).reshape(split), "batch", "length", "activation_kv_heads", None)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, view.rope), rotate(key, view.rope)
        new = KV(key, value)
        if past is not None:
            key, value = (write(slots, part, index, axis=1) for slots, part in zip(past, new, strict=True))
        mixed = attend(query, key.astype(x.dtype), value.astype(x.dtype), view.mask, self.query_scale)  # [B, T, N, H]
        return self.output(mixed.reshape(*x.shape[:2], -1)), new


class MLP(nnx.Module):
    """Gated MLP: down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202).

    Args:
        config: the decoder's numbers.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed, mlp = config.embed_dim, config.mlp_dim
        self.activation: Activation = config.activation
        self.gate = Linear(embed, mlp, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.up = Linear(embed, mlp, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.down = Linear(mlp, embed, axes=("mlp", "embed"), rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        hidden = _ACTIVATIONS[self.activation](self.gate(x)) * self.up(x)  # [B, T, F]
        return self.down(constrain(hidden, "batch", "length", "activation_mlp"))


class Block(nnx.Module):
    """One layer: attention and MLP, each with a norm before and maybe one after, added to the residual stream.

    Args:
        config: the decoder's numbers.
        is_global: attends over everything, not over the window.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, is_global: bool, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        def norm() -> RMSNorm:
            return norm_of(config, config.embed_dim, "norm", param_dtype)

        self.is_global = is_global
        self.pre_attention_norm = norm()
        self.attention = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_norm = norm() if config.norms == "sandwich" else None
        self.pre_mlp_norm = norm()
        self.mlp = MLP(config, rngs=rngs, param_dtype=param_dtype)
        self.post_mlp_norm = norm() if config.norms == "sandwich" else None

    def __call__(self, x: jax.Array, context: Context, past: KV | None) -> tuple[jax.Array, KV]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values; `past` is this layer's cache."""
        view = context.global_view if self.is_global else context.local_view
        assert view is not None  # `context` makes one for each kind of layer that there is
        mixed, new = self.attention(self.pre_attention_norm(x), view, past, context.first_slot)
        if self.post_attention_norm is not None:
            mixed = self.post_attention_norm(mixed)
        x = constrain(x + mixed, "batch", "length", "activation_embed")
        mixed = self.mlp(self.pre_mlp_norm(x))
        if self.post_mlp_norm is not None:
            mixed = self.post_mlp_norm(mixed)
        return constrain(x + mixed, "batch", "length", "activation_embed"), new


def write(slots: jax.Array, new: jax.Array, start: jax.Array | None, axis: int) -> jax.Array:
    """`slots` with `new` in it from slot `start` on, counted along `axis`."""
    assert start is not None  # a cache and its slot come together
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis)
