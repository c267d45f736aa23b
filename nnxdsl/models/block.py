"""One layer of a decoder, made of attention and a gated MLP as its config says; knows nothing of the other layers."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.view import Context
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind
from nnxdsl.models.layers.mlp import MLP
from nnxdsl.models.layers.norm import RMSNorm, norm_of
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.mixer import mixer_class
from nnxdsl.models.moe.layer import ExpertMLP
from nnxdsl.models.moe.router import RouterStats
from nnxdsl.models.remat import named


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
        self.attention = mixer_class(config, kind).build(config, rngs=rngs, param_dtype=param_dtype)
        self.post_attention_norm = norm("post")
        self.pre_mlp_norm = norm("pre")
        self.mlp = (
            MLP(config, rngs=rngs, param_dtype=param_dtype)
            if dense or config.moe is None
            else ExpertMLP(config.embed_dim, config.moe, rngs=rngs, param_dtype=param_dtype)
        )
        self.post_mlp_norm = norm("post")

    def __call__(self, x: jax.Array, context: Context, past: Any) -> tuple[jax.Array, Any, RouterStats | None]:
        """`[B, T, D]` to the same, what a cache takes of it, and what the router says if the layer has one.

        Args:
            x: the residual stream.
            context: of this call.
            past: this layer's cache.
        """
        view = context.view(self.kind)
        x = named(x, "layer_input")
        mixed, new = self.attention(_normed(self.pre_attention_norm, x), view, past)
        x = constrain(x + _normed(self.post_attention_norm, mixed), "batch", "length", "activation_embed")
        stats, mixed = None, _normed(self.pre_mlp_norm, x)
        if isinstance(self.mlp, ExpertMLP):
            mixed, stats = self.mlp(mixed, view.positions.segment_ids > 0)
        else:
            mixed = self.mlp(mixed)
        return constrain(x + _normed(self.post_mlp_norm, mixed), "batch", "length", "activation_embed"), new, stats


def _normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
