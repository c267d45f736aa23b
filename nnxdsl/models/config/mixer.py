"""Configs of token mixers, as checkpoints, plans and the decoder use them; no jax.

A mixer is two files: its config, a subclass of `MixerConfig`, and its module, which follows `models.mixer.Mixer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from nnxdsl.models.config.tensors import TensorSource

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


class MixerConfig:
    """The config of a layer's token mixer.

    Attributes:
        module: the `module:Class` of its nnx module.
        is_attention: whether attention scores are computed.
    """

    module: ClassVar[str]
    is_attention: ClassVar[bool] = True

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        raise NotImplementedError

    def head_widths(self, decoder: DecoderConfig) -> tuple[int, int]:
        """Widths of a head's query and key, and of its value."""
        return decoder.head_dim, decoder.head_dim

    def divided(self, parts: int) -> Self:
        """The config of one device's heads, where `parts` devices share them."""
        return self
