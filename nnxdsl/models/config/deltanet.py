"""Configuration of a gated DeltaNet layer; no jax, and no family by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import attrs

from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.tensors import TensorSource, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


Projections = Literal["joined", "separate"]
_LINEARS: dict[Projections, dict[str, str]] = {
    "joined": {"attention.inputs": "linear_attn.in_proj_qkvz", "attention.rates": "linear_attn.in_proj_ba"},
    "separate": {
        "attention.inputs": "linear_attn.in_proj_qkv",
        "attention.output_gate": "linear_attn.in_proj_z",
        "attention.rate": "linear_attn.in_proj_b",
        "attention.decay": "linear_attn.in_proj_a",
    },
}


@attrs.frozen(kw_only=True)
class GatedDeltaNetConfig(MixerConfig):
    """The heads of a gated DeltaNet layer (Yang et al., arXiv:2412.06464), as Qwen3-Next has them.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with its own recurrent state; a multiple of `key_heads`.
        key_head_dim: width of one head's query and key.
        value_head_dim: width of one head's value.
        conv_kernel: kernel size of the causal convolution over tokens.
        projections: "joined": one matrix gives each key head's query, key, values and output gates, another its rates
            and decays (Qwen3-Next); "separate": one gives all queries, then keys, then values, and output gates, rates
            and decays have one each (Qwen3.5).
    """

    module: ClassVar[str] = "nnxdsl.models.deltanet.layer:GatedDeltaNet"
    is_attention: ClassVar[bool] = False

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4
    projections: Projections = "joined"

    def __attrs_post_init__(self) -> None:
        if self.projections not in get_args(Projections):
            raise ValueError(f"projections: expected one of {get_args(Projections)}, got {self.projections!r}")
        for field in attrs.fields(GatedDeltaNetConfig):
            if field.name != "projections" and not getattr(self, field.name) > 0:
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
            **linears(_LINEARS[self.projections]),
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
