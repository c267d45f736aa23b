"""Multi-head latent attention as numbers; no jax, and no family by name."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class LatentConfig:
    """The widths of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        q_lora_rank: width to which queries are compressed; None where they are not.
        kv_lora_rank: width to which keys and values are compressed together.
        qk_nope_head_dim: part of a head's query and key that is not rotated.
        qk_rope_head_dim: part that is; of the key it is one for all heads; even.
        v_head_dim: width of a head's value.
        rope_interleave: whether neighbours of the rotated part are turned against each other; else its halves are.
        norm_eps: added to the mean square in the norms of what is compressed; not that of the decoder's other norms.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    norm_eps: float = 1e-6

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(LatentConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, got {value}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} is odd; RoPE turns pairs")

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
