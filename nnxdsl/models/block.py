"""One layer of a decoder: a token mixer and a feed-forward, or one of them, both chosen by the config."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.context import Context
from nnxdsl.models.attention.indexer import INDEXER_STATS, SELECTIONS, IndexerStats
from nnxdsl.models.attention.max_logits import layer_max_logits
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.feed_forward import feed_forward_class
from nnxdsl.models.layers.norm import RMSNorm, norm_of
from nnxdsl.models.layers.per_layer import LayerEmbeddingGate
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.mixer import mixer_class
from nnxdsl.models.moe.router import ROUTED_EXPERTS, RouterStats, replaying
from nnxdsl.models.remat import named


class LayerStats(NamedTuple):
    """Statistics of a layer's tokens, and the tokens that it has selected.

    Attributes:
        router: of its router; None without experts.
        max_logits: the largest attention score of each query head, `[N]` float32; None where these are not recorded
            (see `recording_max_logits`) or there are none.
        indexer: of its indexer; None without one, and where these are not recorded (see `INDEXER_STATS`).
        selection: the view that it attends in; None without an indexer, and where no layer shares it (`SELECTIONS`).
        routed_experts: of its tokens, `[B, T, k]`; None without experts, and where they are not recorded.
    """

    router: RouterStats | None
    max_logits: jax.Array | None
    indexer: IndexerStats | None = None
    selection: View | None = None
    routed_experts: jax.Array | None = None


class Block(nnx.Module):
    """One layer: mixer and feed-forward, each with a norm before it or after it or both, added to the residual stream.

    In some families a layer has only one of them (`LayerPattern.sublayers`).

    Args:
        config: the decoder's numbers.
        kind: selects the mixer.
        dense: whether its feed-forward is the gated MLP, whatever `config.feed_forward` is.
        shares_kv: whether it attends to the keys and values of another layer, see `config.layers.kv_shared`.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kind: LayerKind,
        dense: bool = False,
        shares_kv: bool = False,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        layer, config = config.layer(kind, dense=dense), config.of(kind, shares_kv=shares_kv)

        def norm(where: str, *, exists: bool = True) -> RMSNorm | None:
            if not exists or layer.norms not in (where, "sandwich"):
                return None
            eps = config.norm.post_eps if where == "post" else None
            return norm_of(config, config.embed_dim, "norm", param_dtype, eps=eps)

        self.kind: LayerKind = kind
        mixer, feed_forward = layer.mixer, layer.feed_forward
        self.pre_attention_norm = norm("pre", exists=mixer is not None)
        self.attention = mixer and mixer_class(mixer).build(config, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_norm = norm("post", exists=mixer is not None)
        self.pre_mlp_norm = norm("pre", exists=feed_forward is not None and not feed_forward.norms_input)
        self.mlp = (
            None
            if feed_forward is None
            else feed_forward_class(feed_forward).build(config, rngs=rngs, param_dtype=param_dtype)
        )
        self.post_mlp_norm = norm("post", exists=feed_forward is not None)
        self.per_layer = (
            LayerEmbeddingGate(config, rngs=rngs, param_dtype=param_dtype) if config.per_layer_embedding else None
        )
        self.residual_multiplier = config.residual_multiplier
        self.scalar = nnx.Param(jnp.ones((1,), param_dtype), axes=(None,)) if config.layer_scalar else None

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        past: Any,
        layer_embedding: jax.Array | None = None,
        experts: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, LayerStats]:
        """The layer's output, the update of its cache, and its statistics.

        Args:
            x: the residual stream, `[B, T, D]`.
            context: the positions and masks of this call.
            past: this layer's cache, or None; the keys and values of another layer where it shares those.
            layer_embedding: this layer's vectors of the tokens, `[B, T, P]`; None without `per_layer_embedding`.
            experts: what its router replays, see `replaying`.
        """
        view, new, stats, routed = context.views[self.kind], None, None, None
        x = named(x, "layer_input")
        with (
            layer_max_logits() as max_logits,
            INDEXER_STATS.layer() as indexer_stats,
            SELECTIONS.layer() as selections,
        ):
            if self.attention is not None:
                mixed, new = self.attention(_normed(self.pre_attention_norm, x), view, past)
                x = constrain(x + self._added(self.post_attention_norm, mixed), "batch", "length", "activation_embed")
        if self.mlp is not None:
            with replaying(experts), ROUTED_EXPERTS.layer() as routed:
                mixed, stats = self.mlp(_normed(self.pre_mlp_norm, x), view.positions.segment_ids > 0)
            x = x + self._added(self.post_mlp_norm, mixed)
        if self.per_layer is not None and layer_embedding is not None:
            x = x + self.per_layer(x, layer_embedding)
        if self.scalar is not None:
            x = x * jax.lax.stop_gradient(self.scalar[...]).astype(x.dtype)
        x = constrain(x, "batch", "length", "activation_embed")
        indexing = indexer_stats[0] if indexer_stats else None
        selection = selections[0] if selections else None
        routed = routed[0] if routed else None
        return x, new, LayerStats(stats, max_logits[0] if max_logits else None, indexing, selection, routed)

    def _added(self, norm: RMSNorm | None, x: jax.Array) -> jax.Array:
        x = _normed(norm, x)
        return x if self.residual_multiplier == 1.0 else x * self.residual_multiplier


def _normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
