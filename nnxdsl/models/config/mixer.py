"""Configs of token mixers, as checkpoints, plans and the decoder use them; no jax.

A mixer is two files: its config, a subclass of `MixerConfig`, and its module, which follows `models.mixer.Mixer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from nnxdsl.models.config.tensors import TensorSource

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


class HeadColumns(NamedTuple):
    """The columns of a linear layer that QK-clip scales; each head has as many, one head after another.

    Attributes:
        linear: the path of the linear layer in a block.
        runs: of the columns of a head in their order: how many, and the power of the head's gamma that they are
            multiplied by.
    """

    linear: str
    runs: tuple[tuple[int, float], ...]


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

    def qk_columns(self, decoder: DecoderConfig) -> tuple[HeadColumns, ...]:
        """What multiplies each query head's attention scores by a number of its own, and changes no other head's.

        Args:
            decoder: the config of the layers of one kind.

        Returns:
            The columns of queries and keys; none without attention scores.
        """
        return ()

    def divided(self, parts: int) -> Self:
        """The config of one device's heads, where `parts` devices share them."""
        return self
