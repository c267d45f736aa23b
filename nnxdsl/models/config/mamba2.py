"""Configuration of a Mamba-2 layer; no jax, and no family by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Self

import attrs

from nnxdsl.models.config.checks import require_above_zero
from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.tensors import TensorSource, biases, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


@attrs.frozen(kw_only=True)
class Mamba2Config(MixerConfig):
    """The heads of a Mamba-2 layer (Dao and Gu, arXiv:2405.21060), under transformers' names for Nemotron-H.

    Attributes:
        num_heads: heads, each with its own recurrent state; a multiple of `n_groups`.
        head_dim: width of one head's input and output.
        state_size: length of B and C, which write into a state and read it.
        n_groups: the heads of a group share B and C, and their outputs are normed together.
        conv_kernel: kernel size of the causal convolution over tokens.
        conv_bias: whether the convolution has a bias.
        proj_bias: whether the projections from and to the residual stream have a bias.
        time_step_limit: the least and the largest time step, after softplus; (0, infinity) for no limits.
    """

    module: ClassVar[str] = "nnxdsl.models.mamba2.layer:Mamba2"
    is_attention: ClassVar[bool] = False

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 1
    conv_kernel: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "mamba2.", "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")
        if self.num_heads % self.n_groups:
            raise ValueError(f"mamba2.num_heads={self.num_heads} is not a multiple of n_groups={self.n_groups}")
        least, largest = self.time_step_limit
        if not 0 <= least < largest:
            raise ValueError(f"mamba2.time_step_limit: expected 0 <= least < largest, got {self.time_step_limit}")

    @property
    def heads_per_group(self) -> int:
        """Heads that share B and C."""
        return self.num_heads // self.n_groups

    @property
    def inner_dim(self) -> int:
        """Width of the inputs, gates and outputs of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_widths(self) -> tuple[int, int, int]:
        """Channels of the convolution: inputs of all heads, then B of all groups, then C."""
        return self.inner_dim, self.n_groups * self.state_size, self.n_groups * self.state_size

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        arrays = {"attention.conv.weight": "conv1d.weight", "attention.a_log": "A_log"}
        arrays |= {"attention.dt_bias": "dt_bias", "attention.skip": "D"}
        arrays |= {"attention.conv.bias": "conv1d.bias"} if self.conv_bias else {}
        names = {"attention.inputs": "mixer.in_proj", "attention.output": "mixer.out_proj"}
        return {
            **linears(names),
            **(biases(names) if self.proj_bias else {}),
            **norms({"attention.norm": "mixer.norm"}),
            **{ours: TensorSource((f"mixer.{theirs}",)) for ours, theirs in arrays.items()},
        }

    def divided(self, parts: int) -> Self:
        """The config of one device's share of the groups; all of them where they cannot be divided."""
        if self.n_groups % parts:
            return self
        return attrs.evolve(self, n_groups=self.n_groups // parts, num_heads=self.num_heads // parts)
