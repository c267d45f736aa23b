"""Configuration of multi-head latent attention (MLA); no jax, and no family by name."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class MLAConfig:
    """The widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        q_lora_rank: rank of the low-rank projection of queries; None for a full one.
        kv_lora_rank: rank of the joint low-rank projection of keys and values.
        qk_nope_head_dim: width of the part of a query and key without rotary embedding.
        qk_rope_head_dim: width of the rotary part, which all heads of the key share; even.
        v_head_dim: width of a head's value.
        rope_interleave: whether RoPE rotates pairs of neighbours; else the two halves.
        norm_eps: epsilon of the norms of the low-rank projections; the decoder's other norms have their own.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    norm_eps: float = 1e-6

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(MLAConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, got {value}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; RoPE rotates pairs")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
