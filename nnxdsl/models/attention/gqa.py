"""Grouped-query attention, with optional query/key norms, biases, sinks and an output gate."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.kv_cache import KV, PrefixedKV, SharedKV, empty_kv
from nnxdsl.models.attention.self_attention import self_attention
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.attention import AttentionBias
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.layers.norm import RMSNorm, norm_of, unscaled_norm
from nnxdsl.models.layers.rope import apply_rotary, halves_of_pairs, query_factor
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.remat import from_inputs, named


class Attention(nnx.Module):
    """Grouped-query attention, in some families with query and key norms, biases, sinks or an output gate.

    With `values="shared"` it has neither keys nor values, and attends to those of another layer.

    Args:
        config: the decoder's config.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed, head_dim = config.embed_dim, config.head_dim
        heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        self.query_scale = config.attention.query_scale
        self.soft_cap = config.attention.soft_cap
        self.temperature = config.attention.query_temperature

        def linear(in_features: int, out_features: int, axes: tuple[str, str], *biased: AttentionBias) -> Linear:
            bias = config.attention.bias in biased
            return Linear(in_features, out_features, axes=axes, rngs=rngs, param_dtype=param_dtype, bias=bias)

        self.gated = config.attention.output_gate == "query"
        self.query = linear(embed, heads * (2 if self.gated else 1), ("embed", "heads"), "qkv", "all")
        self.output_gate = linear(embed, heads, ("embed", "heads")) if config.attention.output_gate == "own" else None
        shared = config.attention.values == "shared"
        self.key = None if shared else linear(embed, kv_heads, ("embed", "kv_heads"), "qkv", "all")
        own_values = config.attention.values == "projected"
        self.value = linear(embed, kv_heads, ("embed", "kv_heads"), "qkv", "all") if own_values else None
        self.value_eps = config.norm.eps if config.attention.value_norm else None
        self.output = linear(heads, embed, ("heads", "embed"), "all")
        sinks = jnp.zeros((config.num_heads,), param_dtype) if config.attention.sinks else None
        self.sinks = None if sinks is None else nnx.Param(sinks, axes=("heads",))
        self.normed = config.attention.query_key_norm
        features = {"head": (head_dim, head_dim), "row": (heads, kv_heads)}.get(self.normed)
        self.eps = config.norm.eps
        self.interleaved = config.rope_global.interleaved
        axes = ("head_dim", "head_dim") if self.normed == "head" else ("heads", "kv_heads")
        self.query_norm = norm_of(config, features[0], axes[0], param_dtype) if features else None
        self.key_norm = norm_of(config, features[1], axes[1], param_dtype) if features and not shared else None

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """Attention of this decoder."""
        return cls(config, rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> KV:
        """The cache of one layer without tokens, with `slots` slots."""
        return empty_kv(config, batch, slots, dtype)

    def __call__(
        self, x: jax.Array, view: View, past: KV | PrefixedKV | SharedKV | None
    ) -> tuple[jax.Array, KV | None]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values.

        Args:
            x: the tokens, `[B, T, D]`.
            view: see `View`.
            past: the layer's cache, or the keys and values of the layer that it shares them with.
        """
        before, split = x.shape[:2], (*x.shape[:2], -1, self.head_dim)
        x = rows_of(x)
        query, gate = self.query(x), None if self.output_gate is None else self.output_gate(x).reshape(split)
        if self.normed == "row" and self.query_norm is not None:
            query = self.query_norm(query)
        if self.gated:  # each head's query, then its gate
            query, gate = jnp.split(query.reshape(*before, -1, 2 * self.head_dim), 2, axis=-1)
        query = constrain(query.reshape(split), "batch", "length", "activation_heads", None)  # [B, T, N, H]
        query = self._rotated(self._normed(query, self.query_norm), view)
        if self.temperature is not None:
            query = query * query_factor(view.positions.positions, self.temperature).astype(query.dtype)
        if isinstance(past, SharedKV):
            key, value = jax.tree.map(lambda part: jnp.swapaxes(part, 1, 2), past.new)
        else:
            key, value = self._key_value(x, split, view)
        mixed, new = self_attention(
            query,
            key,
            value,
            view,
            past.past if isinstance(past, SharedKV) else past,
            scale=self.query_scale,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
        )  # [B, T, N, H]
        if gate is not None:
            mixed = from_inputs(lambda mixed, gate: mixed * jax.nn.sigmoid(gate))(mixed, gate)
        out = self.output(named(mixed.reshape(*before, -1), "attention_output"))
        return out, None if isinstance(past, SharedKV) else new

    def _key_value(self, x: jax.Array, split: tuple[int, ...], view: View) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the tokens `x`, `[B, T, K, H]`, after norm and rotation."""
        assert self.key is not None  # or they are given
        key = self.key(x)
        value = key if self.value is None else self.value(x)
        if self.normed == "row" and self.key_norm is not None:
            key = self.key_norm(key)
        key = constrain(key.reshape(split), "batch", "length", "activation_kv_heads", None)  # [B, T, K, H]
        value = constrain(value.reshape(split), "batch", "length", "activation_kv_heads", None)
        if self.value_eps is not None:
            value = unscaled_norm(value, self.value_eps)
        return self._rotated(self._normed(key, self.key_norm), view), value

    def _normed(self, heads: jax.Array, norm: RMSNorm | None) -> jax.Array:
        """Heads `[B, T, heads, H]` after the norm of each before its rotation, if there is one."""
        if self.normed == "unscaled":
            return unscaled_norm(heads, self.eps)
        return norm(heads) if self.normed == "head" and norm is not None else heads

    def _rotated(self, heads: jax.Array, view: View) -> jax.Array:
        """Heads `[B, T, heads, H]` after their rotation, in halves, and the norm after it if there is one."""
        if self.interleaved and view.rope[0].shape[-1]:
            heads = halves_of_pairs(heads)
        heads = apply_rotary(heads, view.rope)
        return unscaled_norm(heads, self.eps) if self.normed == "rotated" else heads
