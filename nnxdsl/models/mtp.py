"""The multi-token-prediction (MTP) layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.context import Context
from nnxdsl.models.block import Block, LayerStats
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.layers.linear import Linear
from nnxdsl.models.layers.norm import norm_of
from nnxdsl.models.logical_axes import constrain


class Predictor(nnx.Module):
    """Predicts the token after the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 23).

    `h'_i = block(W [norm(Emb(t_(i+1))) ; norm(h_i)])`, and `head(norm(h'_i))` predicts `t_(i+2)`. Two details that the
    paper leaves open or describes differently follow the code for the published weights (vLLM's deepseek_mtp.py,
    deepseek_v2.py and qwen3_next_mtp.py, Megatron-LM's multi_token_prediction.py): the token precedes the state in the
    input of W, and h_i is the state after the decoder's final norm.

    Args:
        config: the decoder's config.
        rngs: draws the weights.
        param_dtype: dtype of the weights.

    Attributes:
        token_norm: of the next token's vector (the Hub's `enorm`; Qwen3-Next's `pre_fc_norm_embedding`).
        state_norm: of the decoder's state (`hnorm`; `pre_fc_norm_hidden`).
        join: W, `[2 D, D]` (`eh_proj`; `fc`).
        block: a global layer of the decoder, with its feed-forward.
        norm: before the head (`shared_head.norm`; `norm`).
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed = config.embed_dim
        self.token_norm = norm_of(config, embed, "norm", param_dtype)
        self.state_norm = norm_of(config, embed, "norm", param_dtype)
        self.join = Linear(2 * embed, embed, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.block = Block(config, kind=config.mtp_layer_kinds[0], rngs=rngs, param_dtype=param_dtype)
        self.norm = norm_of(config, embed, "norm", param_dtype)

    def __call__(
        self, hidden: jax.Array, following: jax.Array, context: Context, past: Any = None
    ) -> tuple[jax.Array, LayerStats, Any]:
        """The hidden states for the token after the next one, the layer's statistics, and the update of its cache.

        Args:
            hidden: the decoder's states after its final norm, `[B, T, D]`.
            following: vectors of the next tokens, `[B, T, D]`.
            context: masks and positions of the decoder's call.
            past: the cache of this layer, or None.
        """
        both = jnp.concatenate([self.token_norm(following), self.state_norm(hidden)], axis=-1)  # [B, T, 2 D]
        x = constrain(self.join(both), "batch", "length", "activation_embed")
        x, new, stats = self.block(x, context, past)
        return constrain(self.norm(x), "batch", "length", "activation_embed"), stats, new
