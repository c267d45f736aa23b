"""Configuration of multi-head latent attention (MLA); no jax, and no family by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.models.config.indexer import IndexerConfig
from nnxdsl.models.config.mixer import HeadColumns, MixerConfig
from nnxdsl.models.config.tensors import TensorSource, biases, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


_BIASED = ("attention.query_down", "attention.key_value_down", "attention.output")


@attrs.frozen(kw_only=True)
class MLAConfig(MixerConfig):
    """The widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        q_lora_rank: rank of the low-rank projection of queries; None for a full one.
        kv_lora_rank: rank of the joint low-rank projection of keys and values.
        qk_nope_head_dim: width of the part of a query and key without rotary embedding.
        qk_rope_head_dim: width of the rotary part, which all heads of the key share; even.
        v_head_dim: width of a head's value.
        rope_interleave: whether RoPE rotates pairs of neighbours; else the two halves.
        norm_eps: epsilon of the norms of the low-rank projections; the decoder's other norms have their own.
        indexer: selects the tokens that are attended to (DeepSeek-V3.2), from the compressed queries; None for
            attention to all.
    """

    module: ClassVar[str] = "nnxdsl.models.attention.mla:LatentAttention"

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    norm_eps: float = 1e-6
    indexer: IndexerConfig | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(MLAConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, got {value}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; RoPE rotates pairs")
        if self.indexer is not None:
            if self.q_lora_rank is None:
                raise ValueError("indexer: reads compressed queries, which need a q_lora_rank")
            if self.indexer.head_dim < self.qk_rope_head_dim:
                raise ValueError(
                    f"indexer.head_dim={self.indexer.head_dim} is below qk_rope_head_dim={self.qk_rope_head_dim}"
                )

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def head_widths(self, decoder: DecoderConfig) -> tuple[int, int]:
        """Widths of a head's query and key, and of its value."""
        return self.qk_head_dim, self.v_head_dim

    def qk_columns(self, decoder: DecoderConfig) -> tuple[HeadColumns, ...]:
        """Queries, and the part of the keys without rotary embedding; all heads share the rotary part of the key.

        As in Kimi K2 (arXiv:2507.20534, algorithm 1).
        """
        queries = "attention.query" if self.q_lora_rank is None else "attention.query_up"
        return (
            HeadColumns(queries, ((self.qk_nope_head_dim, 0.5), (self.qk_rope_head_dim, 1.0))),
            HeadColumns("attention.key_value_up", ((self.qk_nope_head_dim, 0.5), (self.v_head_dim, 0.0))),
        )

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        queries, query_norm = {"attention.query": "self_attn.q_proj"}, {}
        if self.q_lora_rank is not None:
            queries = {"attention.query_down": "self_attn.q_a_proj", "attention.query_up": "self_attn.q_b_proj"}
            query_norm = {"attention.query_norm": "self_attn.q_a_layernorm"}
        names = {
            **queries,
            "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
            "attention.key_value_up": "self_attn.kv_b_proj",
            "attention.output": "self_attn.o_proj",
        }
        scales = norms({**query_norm, "attention.key_value_norm": "self_attn.kv_a_layernorm"})
        biased = {
            ours: theirs for ours, theirs in names.items() if ours in _BIASED and decoder.attention.bias != "none"
        }
        return linears(names) | biases(biased) | scales | ({} if self.indexer is None else self.indexer.tensors())
