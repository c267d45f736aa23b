"""Configs of feed-forwards, as checkpoints, plans and the decoder use them; no jax.

A feed-forward is two files: its config, a subclass of `FeedForwardConfig`, and its module, which follows
`models.feed_forward.FeedForward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import attrs

from nnxdsl.models.config.tensors import TensorSource, biases, linears

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


class FeedForwardConfig:
    """The config of a layer's feed-forward.

    Attributes:
        module: the `module:Class` of its nnx module.
        norms_input: whether it has norms of its own before it, so that its layer has none there.
    """

    module: ClassVar[str]
    norms_input: ClassVar[bool] = False

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub; their paths begin with `mlp.`."""
        raise NotImplementedError

    def divided(self, cut: Callable[[str, int], int]) -> Self:
        """The config of one device's share; `cut(logical axis, size)` is the length of the device's part."""
        return self

    def active_params(self, size: int, axes: Sequence[str | None]) -> int:
        """The number of weights that a token activates, of `size` weights of an array with these logical axes."""
        return size


@attrs.frozen
class MLPConfig(FeedForwardConfig):
    """The MLP, in most families a gated one: its width and activation are fields of the decoder's config."""

    module: ClassVar[str] = "nnxdsl.models.layers.mlp:MLP"

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        names = {
            f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down") if name != "gate" or decoder.mlp_gate
        }
        return linears(names) | (biases(names) if decoder.mlp_bias else {})
