"""Configuration of a gated DeltaNet layer; no jax, and no family by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import attrs

from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.tensors import TensorSource, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


@attrs.frozen(kw_only=True)
class GatedDeltaNetConfig(MixerConfig):
    """The heads of a gated DeltaNet layer (Yang et al., arXiv:2412.06464), as Qwen3-Next has them.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with its own recurrent state; a multiple of `key_heads`.
        key_head_dim: width of one head's query and key.
        value_head_dim: width of one head's value.
        conv_kernel: kernel size of the causal convolution over tokens.
    """

    module: ClassVar[str] = "nnxdsl.models.deltanet.layer:GatedDeltaNet"
    is_attention: ClassVar[bool] = False

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(GatedDeltaNetConfig):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be above 0, got {getattr(self, field.name)}")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}")

    @property
    def values_per_key(self) -> int:
        """Value heads that share one key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        return {
            **linears({"attention.inputs": "linear_attn.in_proj_qkvz", "attention.rates": "linear_attn.in_proj_ba"}),
            "attention.conv.weight": TensorSource(("linear_attn.conv1d.weight",)),
            "attention.decay_log": TensorSource(("linear_attn.A_log",)),
            "attention.decay_bias": TensorSource(("linear_attn.dt_bias",)),
            **norms({"attention.norm": "linear_attn.norm"}),
            **linears({"attention.output": "linear_attn.out_proj"}),
        }

    def divided(self, parts: int) -> Self:
        """The config of one device's share of the heads; all of them where they cannot be divided."""
        if self.key_heads % parts:
            return self
        return attrs.evolve(self, key_heads=self.key_heads // parts, value_heads=self.value_heads // parts)
