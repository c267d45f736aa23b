"""Multi-head latent attention: keys and values from a low-rank projection of each token."""

from __future__ import annotations

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.indexer import SELECTIONS, Indexer, record_indexer_loss, select_tokens
from nnxdsl.models.attention.kv_cache import KV, IndexedKV, empty_kv
from nnxdsl.models.attention.self_attention import self_attention
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.attention import QueryTemperature
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.layers.norm import RMSNorm
from nnxdsl.models.layers.rope import apply_rotary, query_factor
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.remat import named


class LatentAttention(nnx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434; as in DeepSeek-V3, arXiv:2412.19437).

    Keys and values are decompressed, in training and in the cache: no weight is absorbed into another, so that adapters
    and quantization apply to every product.

    Args:
        embed_dim: width of the residual stream.
        num_heads: heads of queries, and of keys and values.
        config: the widths.
        query_scale: factor of the scores, which includes YaRN's `mscale`.
        query_temperature: a factor of queries by position; None for none.
        bias: whether the linear layers from and to the residual stream have a bias.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        config: MLAConfig,
        *,
        query_scale: float,
        query_temperature: QueryTemperature | None = None,
        bias: bool = False,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        def linear(width: int, out: int, *axes: str, bias: bool = False) -> Linear:
            return Linear(width, out, axes=(axes[0], axes[1]), rngs=rngs, param_dtype=param_dtype, bias=bias)

        def norm(features: int) -> RMSNorm:
            return RMSNorm(features, axis="norm", eps=config.norm_eps, kind="plain", param_dtype=param_dtype)

        self.config = config
        self.query_scale = query_scale
        self.temperature = query_temperature
        rank, shared = config.q_lora_rank, config.kv_lora_rank
        queries, values = num_heads * config.qk_head_dim, num_heads * config.v_head_dim
        self.query = linear(embed_dim, queries, "embed", "heads") if rank is None else None
        self.query_down = None if rank is None else linear(embed_dim, rank, "embed", "latent", bias=bias)
        self.query_norm = None if rank is None else norm(rank)
        self.query_up = None if rank is None else linear(rank, queries, "latent", "heads")
        self.key_value_down = linear(embed_dim, shared + config.qk_rope_head_dim, "embed", "latent", bias=bias)
        self.key_value_norm = norm(shared)
        self.key_value_up = linear(shared, num_heads * config.qk_nope_head_dim + values, "latent", "heads")
        self.output = linear(values, embed_dim, "heads", "embed", bias=bias)
        self.indexer = config.indexer and Indexer(embed_dim, config, rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """Latent attention of this decoder."""
        assert config.mla is not None  # its config names this class
        return cls(
            config.embed_dim,
            config.num_heads,
            config.mla,
            query_scale=config.attention.query_scale,
            query_temperature=config.attention.query_temperature,
            bias=config.attention.bias != "none",
            rngs=rngs,
            param_dtype=param_dtype,
        )

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> KV | IndexedKV:
        """The cache of one layer without tokens, with `slots` slots."""
        kv = empty_kv(config, batch, slots, dtype)
        if config.mla is None or config.mla.indexer is None:
            return kv
        return IndexedKV(*kv, jnp.zeros((batch, 1, slots, config.mla.indexer.head_dim), dtype))

    def __call__(self, x: jax.Array, view: View, past: Any) -> tuple[jax.Array, KV | IndexedKV]:
        """`[B, T, D]` to `[B, T, D]` and this call's keys and values.

        Args:
            x: the normed residual stream.
            view: of this call; its `rope` has `qk_rope_head_dim // 2` columns.
            past: keys `[B, N, S, qk_head_dim]` and values `[B, N, S, v_head_dim]`, and those of an indexer if there is
                one; None without a cache.

        Returns:
            (the output, keys and values as in `past` with T slots).
        """
        config, split = self.config, (*x.shape[:2], -1)
        x = rows_of(x)
        compressed = self._compressed(x)
        query = self._query(x, compressed).reshape(*split, config.qk_head_dim)
        query = constrain(query, "batch", "length", "activation_heads", None)  # [B, T, N, H]
        still, turned = jnp.split(query, [config.qk_nope_head_dim], axis=-1)
        query = jnp.concatenate([still, self._rotate(turned, view)], axis=-1)
        if self.temperature is not None:
            query = query * query_factor(view.positions.positions, self.temperature).astype(query.dtype)
        shared, turned = jnp.split(self.key_value_down(x).reshape(split), [config.kv_lora_rank], axis=-1)
        both = self.key_value_up(self.key_value_norm(shared))
        both = both.reshape(*split, config.qk_nope_head_dim + config.v_head_dim)
        both = constrain(both, "batch", "length", "activation_heads", None)
        still, value = jnp.split(both, [config.qk_nope_head_dim], axis=-1)
        turned = self._rotate(turned[:, :, None], view)  # [B, T, 1, R], the same for all heads
        turned = jnp.broadcast_to(turned, (*still.shape[:3], turned.shape[-1]))
        key = jnp.concatenate([still, turned], axis=-1)
        index_key = None
        if self.indexer is not None and config.indexer is not None and compressed is not None:
            index, cached = self.indexer(x, compressed, view), None if past is None else past.index_key
            choice = {"topk": config.indexer.topk, "selects": config.indexer.selects, "cached": cached}
            view, scores = select_tokens(index, view, **choice)
            SELECTIONS.record(lambda: view)
            record_indexer_loss(query, key, view, scores, self.query_scale)
            index_key = index.key
        mixed, new = self_attention(query, key, value, view, past, scale=self.query_scale)  # [B, T, N, V]
        if index_key is not None:
            new = IndexedKV(*new, index_key)
        return self.output(named(mixed.reshape(split), "attention_output")), new

    def _compressed(self, x: jax.Array) -> jax.Array | None:
        if self.query_down is None or self.query_norm is None:
            return None
        return self.query_norm(self.query_down(x))

    def _query(self, x: jax.Array, compressed: jax.Array | None) -> jax.Array:
        if compressed is None or self.query_up is None:
            assert self.query is not None  # queries are either compressed or not
            return self.query(x)
        return self.query_up(compressed)

    def _rotate(self, x: jax.Array, view: View) -> jax.Array:
        if self.config.rope_interleave:  # the same permutation of queries and keys leaves their products unchanged
            x = jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2), -1, -2).reshape(x.shape)
        return apply_rotary(x, view.rope)
