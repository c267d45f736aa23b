"""One layer of a decoder, made of attention and a gated MLP as its config says; knows nothing of the other layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.blockwise import attend_in_blocks
from nnxdsl.models.attention.dot_product import Places, attend, mask
from nnxdsl.models.attention.fused import attend_cudnn, attend_splash
from nnxdsl.models.attention.kv_cache import KV, Cache, attend_past, joined, ring_places
from nnxdsl.models.attention.mla import LatentAttention
from nnxdsl.models.attention.row_layout import Method
from nnxdsl.models.config.decoder import Activation, AttentionBias, DecoderConfig, LayerKind
from nnxdsl.models.deltanet.layer import DeltaNet, DeltaState
from nnxdsl.models.layers.linear import Linear, RMSNorm, rope_tables, rotate, rows_of
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.moe.layer import ExpertMLP
from nnxdsl.models.moe.router import RouterStats
from nnxdsl.models.remat import from_inputs, named

_ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class View(NamedTuple):
    """What layers of one kind, local or global, share in one call.

    Attributes:
        method: how attention is computed.
        places: of this call's tokens, `[B, T]`.
        mask: `[B, T, S]` bool, True where a token sees another, those of the cache first; None where the method needs
            no mask of all slots.
        rope: (sin, cos), each `[B, T, turned // 2]` float32; empty where nothing turns.
    """

    method: Method
    places: Places
    mask: jax.Array | None
    rope: tuple[jax.Array, jax.Array]


class Context(NamedTuple):
    """What all layers of one call share.

    Attributes:
        local_view: of layers with a window; None if no layer is local.
        global_view: of layers that attend over everything; None if no layer is global.
        linear_view: of layers without attention; None if no layer is linear.
    """

    local_view: View | None
    global_view: View | None
    linear_view: View | None

    def view(self, kind: LayerKind) -> View:
        """That of a kind of layer that there is."""
        found = {"local": self.local_view, "global": self.global_view, "linear": self.linear_view}[kind]
        assert found is not None  # `context` makes one for each kind
        return found


def context(
    config: DecoderConfig,
    places: Places,
    cache: Cache | None = None,
    method: Method = Method(),  # noqa: B008 - frozen
) -> Context:
    """Masks and rotary angles of one call, for tokens at `places` `[B, T]` that look at a cache and at each other."""

    def view(window: int | None, rope: tuple[jax.Array, jax.Array]) -> View:
        keys = places
        if cache is not None:
            keys = joined(cache.places if window is None else ring_places(cache, window), places)
        own = attrs.evolve(method, window=window)
        return View(own, places, mask(places, keys, window) if own.kernel == "dense" else None, rope)

    local_view = global_view = linear_view = None
    if "local" in config.layers:
        rope = config.rope_local or config.rope_global
        local_view = view(config.window, rope_tables(places.position, config.head_dim, rope))
    if "global" in config.layers + config.further:
        global_view = view(None, rope_tables(places.position, config.head_dim, config.rope_global))
    if "linear" in config.layers:
        nothing = jnp.zeros((*places.position.shape, 0), jnp.float32)
        linear_view = View(attrs.evolve(method, window=None), places, None, (nothing, nothing))
    return Context(local_view, global_view, linear_view)


def norm_of(config: DecoderConfig, features: int, axis: str, param_dtype: DTypeLike) -> RMSNorm:
    """A norm as `config` has them, over an axis of this length and logical name."""
    return RMSNorm(features, axis=axis, eps=config.norm_eps, kind=config.norm_scale, param_dtype=param_dtype)


class Attention(nnx.Module):
    """Grouped-query attention, in some families with normed queries and keys, or with biases.

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
        self.soft_cap = config.attention_soft_cap

        def linear(in_features: int, out_features: int, axes: tuple[str, str], *biased: AttentionBias) -> Linear:
            bias = config.attention_bias in biased
            return Linear(in_features, out_features, axes=axes, rngs=rngs, param_dtype=param_dtype, bias=bias)

        self.gated = config.output_gate
        self.query = linear(embed, heads * (2 if self.gated else 1), ("embed", "heads"), "qkv", "all")
        self.key = linear(embed, kv_heads, ("embed", "kv_heads"), "qkv", "all")
        self.value = linear(embed, kv_heads, ("embed", "kv_heads"), "qkv", "all")
        self.output = linear(heads, embed, ("heads", "embed"), "all")
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), param_dtype), axes=("heads",)) if config.sinks else None
        self.normed = config.query_key_norm
        features = {"none": None, "head": (head_dim, head_dim), "row": (heads, kv_heads)}[self.normed]
        axes = ("head_dim", "head_dim") if self.normed == "head" else ("heads", "kv_heads")
        self.query_norm = norm_of(config, features[0], axes[0], param_dtype) if features else None
        self.key_norm = norm_of(config, features[1], axes[1], param_dtype) if features else None

    def __call__(self, x: jax.Array, view: View, past: KV | None) -> tuple[jax.Array, KV]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values; `past` is what the layer's cache holds."""
        before, split = x.shape[:2], (*x.shape[:2], -1, self.head_dim)
        x = rows_of(x)
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.normed == "row" and self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        gate = None
        if self.gated:  # each head's query, then its gate
            query, gate = jnp.split(query.reshape(*before, -1, 2 * self.head_dim), 2, axis=-1)
        query = constrain(query.reshape(split), "batch", "length", "activation_heads", None)  # [B, T, N, H]
        key = constrain(key.reshape(split), "batch", "length", "activation_kv_heads", None)  # [B, T, K, H]
        value = constrain(value.reshape(split), "batch", "length", "activation_kv_heads", None)
        if self.normed == "head" and self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, view.rope), rotate(key, view.rope)
        new = KV(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))
        if past is None:
            mixed = self._mix(query, key, value, view)  # [B, T, N, H]
        else:
            assert view.mask is not None  # the decoder refuses other kernels with a cache
            mixed = attend_past(query, past, new, view.mask, self.query_scale, self.soft_cap, self._sinks)
        if gate is not None:
            mixed = from_inputs(lambda mixed, gate: mixed * jax.nn.sigmoid(gate))(mixed, gate)
        return self.output(named(mixed.reshape(*before, -1), "attention_output")), new

    @property
    def _sinks(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]

    def _mix(self, query: jax.Array, key: jax.Array, value: jax.Array, view: View) -> jax.Array:
        kernel, row, window = view.method.kernel, view.method.row, view.method.window
        if view.mask is not None:
            return attend(query, key, value, view.mask, self.query_scale, self.soft_cap, self._sinks)
        assert row is not None  # the decoder refuses other kernels where nothing is known of the row
        given = {"window": window, "scale": self.query_scale}
        if kernel == "chunked":
            blocks = {"soft_cap": self.soft_cap, "sinks": self._sinks, "queries": view.method.queries}
            return attend_in_blocks(query, key, value, view.places, row, **given, **blocks)
        if self.sinks is not None:
            raise ValueError(f"{kernel} attention has no sinks")
        if kernel == "splash":
            return attend_splash(query, key, value, view.places, row, **given, soft_cap=self.soft_cap)
        if self.soft_cap is not None:
            raise ValueError("cuDNN's attention has no soft cap")
        return attend_cudnn(query, key, value, view.places, row, **given)


def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return _ACTIVATIONS[activation](gate) * up


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
        rows = rows_of(x)
        hidden = from_inputs(partial(_gated, self.activation))(self.gate(rows), self.up(rows))
        hidden = constrain(hidden.reshape(*x.shape[:-1], -1), "batch", "length", "activation_mlp")  # [B, T, F]
        return self.down(hidden)


class Block(nnx.Module):
    """One layer: attention and MLP, each with a norm before it or after it or both, added to the residual stream.

    Args:
        config: the decoder's numbers.
        kind: what its attention looks at.
        dense: it has one MLP, even where the config has experts.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kind: LayerKind,
        dense: bool = False,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        def norm(where: str) -> RMSNorm | None:
            return (
                norm_of(config, config.embed_dim, "norm", param_dtype) if config.norms in (where, "sandwich") else None
            )

        self.kind: LayerKind = kind
        self.pre_attention_norm = norm("pre")
        self.attention = _mixer(config, kind, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_norm = norm("post")
        self.pre_mlp_norm = norm("pre")
        self.mlp = (
            MLP(config, rngs=rngs, param_dtype=param_dtype)
            if dense or config.experts is None
            else ExpertMLP(config.embed_dim, config.experts, rngs=rngs, param_dtype=param_dtype)
        )
        self.post_mlp_norm = norm("post")

    def __call__(
        self, x: jax.Array, context: Context, past: KV | DeltaState | None
    ) -> tuple[jax.Array, Any, RouterStats | None]:
        """`[B, T, D]` to the same, what a cache takes of it, and what the router says if the layer has one.

        Args:
            x: the residual stream.
            context: of this call.
            past: this layer's cache.
        """
        view = context.view(self.kind)
        x = named(x, "layer_input")
        mixer: Any = self.attention
        mixed, new = mixer(_normed(self.pre_attention_norm, x), view, past)
        x = constrain(x + _normed(self.post_attention_norm, mixed), "batch", "length", "activation_embed")
        stats, mixed = None, _normed(self.pre_mlp_norm, x)
        if isinstance(self.mlp, ExpertMLP):
            mixed, stats = self.mlp(mixed, view.places.segment > 0)
        else:
            mixed = self.mlp(mixed)
        return constrain(x + _normed(self.post_mlp_norm, mixed), "batch", "length", "activation_embed"), new, stats


def _mixer(
    config: DecoderConfig, kind: LayerKind, *, rngs: nnx.Rngs, param_dtype: DTypeLike
) -> Attention | LatentAttention | DeltaNet:
    """What mixes the tokens of a layer of this kind."""
    given: dict[str, Any] = {"rngs": rngs, "param_dtype": param_dtype}
    if kind == "linear":
        assert config.delta is not None  # a config with such layers has it
        return DeltaNet(config.embed_dim, config.delta, norm_eps=config.norm_eps, **given)
    if config.latent is not None:
        heads, scale = config.num_heads, config.query_scale
        return LatentAttention(config.embed_dim, heads, config.latent, query_scale=scale, **given)
    return Attention(config, **given)


def _normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
