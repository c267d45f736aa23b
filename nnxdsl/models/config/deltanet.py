"""Configuration of a gated DeltaNet layer; no jax, and no family by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import attrs

from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.tensors import TensorSource, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig


Projections = Literal["joined", "separate", "single"]
_LINEARS: dict[Projections, dict[str, str]] = {
    "joined": {"attention.inputs": "linear_attn.in_proj_qkvz", "attention.rates": "linear_attn.in_proj_ba"},
    "separate": {
        "attention.inputs": "linear_attn.in_proj_qkv",
        "attention.output_gate": "linear_attn.in_proj_z",
        "attention.rate": "linear_attn.in_proj_b",
        "attention.decay": "linear_attn.in_proj_a",
    },
    "single": {
        "attention.query": "linear_attn.q_proj",
        "attention.key": "linear_attn.k_proj",
        "attention.value": "linear_attn.v_proj",
        "attention.output_gate": "linear_attn.g_proj",
        "attention.rate": "linear_attn.b_proj",
        "attention.decay": "linear_attn.a_proj",
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
            and decays have one each (Qwen3.5); "single": queries, keys and values have one each, too, and a
            convolution each (OLMo Hybrid).
        rate_scale: rates are multiplied by it; 2 gives the memory negative eigenvalues, too (arXiv:2411.12537).
        norm_eps: epsilon of the norm of each head; None for the decoder's.
    """

    module: ClassVar[str] = "nnxdsl.models.deltanet.layer:GatedDeltaNet"
    is_attention: ClassVar[bool] = False

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4
    projections: Projections = "joined"
    rate_scale: float = 1.0
    norm_eps: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.projections not in get_args(Projections):
            raise ValueError(f"projections: expected one of {get_args(Projections)}, got {self.projections!r}")
        for field in attrs.fields(GatedDeltaNetConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
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
        is_single = self.projections == "single"
        convolutions = {f"conv_{name}": f"{name[0]}_conv1d" for name in ("query", "key", "value")}
        convolutions = convolutions if is_single else {"conv": "conv1d"}
        return {
            **linears(_LINEARS[self.projections]),
            **{
                f"attention.{ours}.weight": TensorSource((f"linear_attn.{theirs}.weight",))
                for ours, theirs in convolutions.items()
            },
            "attention.decay_log": TensorSource(("linear_attn.A_log",)),
            "attention.decay_bias": TensorSource(("linear_attn.dt_bias",)),
            **norms({"attention.norm": "linear_attn.o_norm" if is_single else "linear_attn.norm"}),
            **linears({"attention.output": "linear_attn.o_proj" if is_single else "linear_attn.out_proj"}),
        }

    def divided(self, parts: int) -> Self:
        """The config of one device's share of the heads; all of them where they cannot be divided."""
        if self.key_heads % parts:
            return self
        return attrs.evolve(self, key_heads=self.key_heads // parts, value_heads=self.value_heads // parts)
