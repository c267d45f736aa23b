"""A Gemma 3 of any small size, so that tests compile quickly."""

from __future__ import annotations

from pathlib import Path

import attrs

from nnxdsl import Model, Weights
from nnxdsl.formats import hf
from nnxdsl.models.config.attention import AttentionConfig
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.layer_pattern import LayerPattern, local_then_global
from nnxdsl.program import blueprint


@attrs.frozen(kw_only=True)
class Small(Model):
    """A small decoder: by default two periods of two layers.

    Attributes:
        vocab_size: Rows of the embedding.
        embed_dim: Width.
        mlp_dim: Width of the MLP.
        layers: How many.
        heads: Query heads; there are half as many key heads, at least one.
        head_dim: Width of a head.
        pattern: Layers of a period.
        window: Of local layers.
    """

    vocab_size: int = 48
    embed_dim: int = 16
    mlp_dim: int = 32
    layers: int = 4
    heads: int = 2
    head_dim: int = 8
    pattern: int = 2
    window: int = 5


@blueprint.architecture.register
def _small(model: Small) -> DecoderConfig:
    if isinstance(model.weights, Weights.HF) and Path(model.weights.path).is_dir():
        return hf.read_config(model.weights.path)
    return DecoderConfig(
        vocab_size=model.vocab_size,
        embed_dim=model.embed_dim,
        mlp=MLPConfig(dim=model.mlp_dim, activation="gelu_tanh"),
        layers=LayerPattern(num_layers=model.layers, pattern=local_then_global(model.pattern)),
        num_heads=model.heads,
        num_kv_heads=max(1, model.heads // 2),
        head_dim=model.head_dim,
        window=model.window,
        attention=AttentionConfig(query_scale=model.head_dim**-0.5, query_key_norm="head"),
        max_length=64,
    )


@attrs.frozen(kw_only=True)
class Long(Small):
    """A `Small` for rows of up to 512 tokens."""


@blueprint.architecture.register
def _(model: Long) -> DecoderConfig:
    return attrs.evolve(_small(model), max_length=512)
