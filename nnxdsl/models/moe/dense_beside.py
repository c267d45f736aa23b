"""The gated MLP beside a mixture of experts, each between norms of its own."""

from __future__ import annotations

from typing import Self

import jax
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.layers.mlp import MLP
from nnxdsl.models.layers.norm import norm_of
from nnxdsl.models.moe.layer import ExpertMLP
from nnxdsl.models.moe.router import RouterStats


class DenseBesideExpertMLP(nnx.Module):
    """`norm(MLP(norm(x))) + norm(experts(norm(x)))`, where the router reads x itself (Gemma 4 26B-A4B).

    Args:
        config: the decoder's config.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        embed = config.embed_dim
        self.dense_norm = norm_of(config, embed, "norm", param_dtype)
        self.dense = MLP.build(config, rngs=rngs, param_dtype=param_dtype)
        self.dense_after = norm_of(config, embed, "norm", param_dtype)
        self.expert_norm = norm_of(config, embed, "norm", param_dtype)
        self.experts = ExpertMLP.build(config, rngs=rngs, param_dtype=param_dtype)
        self.expert_after = norm_of(config, embed, "norm", param_dtype)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """The MLP and the experts of this decoder."""
        return cls(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, RouterStats]:
        """`[B, T, D]`, the residual stream, to `[B, T, D]`, and the router's statistics of `real` tokens."""
        dense = self.dense_after(self.dense.project(self.dense_norm(x)))
        routed, stats = self.experts(self.expert_norm(x), real, x)
        return dense + self.expert_after(routed), stats
