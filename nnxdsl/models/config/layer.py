"""What a layer of a decoder is; no jax."""

from __future__ import annotations

import attrs

from nnxdsl.models.config.feed_forward import FeedForwardConfig
from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.norm import NormPlacement
from nnxdsl.models.config.rope import Rope


@attrs.frozen(kw_only=True)
class LayerSpec:
    """A token mixer and a feed-forward with their norms, or one of the two.

    Attributes:
        mixer: its token mixer; None where it has none.
        feed_forward: its feed-forward; None where it has none.
        norms: see `NormConfig.placement`.
        window: attention is to a token itself and `window - 1` tokens before, or within chunks of `window` tokens; None
            for all tokens before.
        rope: rotary positions of queries and keys; None for none.
    """

    mixer: MixerConfig | None
    feed_forward: FeedForwardConfig | None
    norms: NormPlacement
    window: int | None = None
    rope: Rope | None = None

    @property
    def is_attention(self) -> bool:
        """Whether attention scores are computed."""
        return self.mixer is not None and self.mixer.is_attention

    @property
    def is_recurrent(self) -> bool:
        """Whether its mixer has a state that follows the order of tokens."""
        return self.mixer is not None and not self.mixer.is_attention
