"""Parts of a decoder: embeddings, the output head, and what few families have; no jax."""

from __future__ import annotations

import attrs

from nnxdsl.models.config.attention import Values
from nnxdsl.models.config.checks import require_above_zero


@attrs.frozen(kw_only=True)
class EmbeddingConfig:
    """What is done to the vectors of the embedding.

    Attributes:
        scaled: they are multiplied by the square root of `embed_dim` (Gemma).
        multiplier: they are multiplied by it (Granite).
        norm: they go through an RMSNorm without scale (Muse Glimmer).
    """

    scaled: bool = False
    multiplier: float = 1.0
    norm: bool = False

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "embedding.", "multiplier")

    def factor(self, embed_dim: int) -> float:
        """The factor of the vectors."""
        return self.multiplier * (embed_dim**0.5 if self.scaled else 1.0)


@attrs.frozen(kw_only=True)
class HeadConfig:
    """The output head.

    Attributes:
        tied: the embedding is the output head; else the head has its own weights.
        num_labels: outputs of a linear layer `score` in place of the output head, as of transformers' sequence
            classification; None for the output head.
        soft_cap: logits `z` become `cap * tanh(z / cap)` (Gemma 2, arXiv:2408.00118); None for no cap.
        logits_scaling: logits are divided by it (Granite).
    """

    tied: bool = True
    num_labels: int | None = None
    soft_cap: float | None = None
    logits_scaling: float = 1.0

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "head.", "num_labels", "soft_cap", "logits_scaling")


@attrs.frozen(kw_only=True)
class GlobalHeads:
    """Heads of the global layers, where they differ from those of the others (Gemma 4).

    Attributes:
        head_dim: see `DecoderConfig`.
        num_kv_heads: divides `num_heads`.
        values: see `AttentionConfig`.
    """

    head_dim: int
    num_kv_heads: int
    values: Values = "projected"


@attrs.frozen(kw_only=True)
class PerLayerEmbedding:
    """A second embedding of each token, with a vector of its own for each layer (Gemma 3n and Gemma 4 E2B).

    Attributes:
        vocab_size: rows of its table.
        dim: width of a layer's vector; the table has `num_layers * dim` columns.
    """

    vocab_size: int
    dim: int

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "per_layer_embedding.", "vocab_size", "dim")
