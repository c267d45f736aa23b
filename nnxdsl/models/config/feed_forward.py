"""Configs of feed-forwards, as checkpoints, plans and the decoder use them; no jax.

A feed-forward is two files: its config, a subclass of `FeedForwardConfig`, and its module, which follows
`models.feed_forward.FeedForward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import attrs

from nnxdsl.models.config.checks import require_above_zero, require_choices
from nnxdsl.models.config.tensors import TensorSource, biases, linears

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]


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


@attrs.frozen(kw_only=True)
class MLPConfig(FeedForwardConfig):
    """The MLP, in most families a gated one; activation, gate and biases are also those of experts.

    Attributes:
        dim: its width.
        kv_shared_dim: its width in the layers that share keys and values (Gemma 4 E2B); None for `dim`.
        activation: of MLPs and experts, and of DeltaNet's convolutions; "relu2": `relu(x)^2` (arXiv:2109.08668).
        gate: MLPs and experts have a gate, and are `down(activation(gate(x)) * up(x))`; else `down(activation(up(x)))`
            (Nemotron-H).
        bias: the linear layers of MLPs and shared experts have a bias, and those around experts with a `latent_dim`.
    """

    module: ClassVar[str] = "nnxdsl.models.layers.mlp:MLP"

    dim: int
    kv_shared_dim: int | None = None
    activation: Activation = "silu"
    gate: bool = True
    bias: bool = False

    def __attrs_post_init__(self) -> None:
        require_choices(self, "mlp.", {"activation": get_args(Activation)})
        require_above_zero(self, "mlp.", "dim", "kv_shared_dim")

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        names = {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down") if name != "gate" or self.gate}
        return linears(names) | (biases(names) if self.bias else {})

    def divided(self, cut: Callable[[str, int], int]) -> Self:
        """The config of one device's share of the width."""
        shared = self.kv_shared_dim and cut("activation_mlp", self.kv_shared_dim)
        return attrs.evolve(self, dim=cut("activation_mlp", self.dim), kv_shared_dim=shared)
