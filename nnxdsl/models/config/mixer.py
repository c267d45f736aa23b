"""What a token mixer is without jax: the facts that checkpoints, plans and the decoder need of it.

A mixer is two files: its config, a subclass of `MixerConfig`, and its module, which follows `models.mixer.Mixer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from nnxdsl.models.config.tensors import TensorSource

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


class MixerConfig:
    """The config of what mixes the tokens of a layer.

    Attributes:
        module: the `module:Class` of its nnx module.
        is_attention: whether each token attends to the tokens before it, so that scores are computed.
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
        """The config of one device's share of the heads, where that many devices share them."""
        return self
