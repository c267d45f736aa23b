"""Configuration of grouped-query attention: its numbers are fields of the decoder's; no jax, and no family by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.tensors import TensorSource, biases, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig

_LINEARS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
}
_BIASED = {"none": 0, "qkv": 3, "all": 4}
_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


@attrs.frozen
class GQAConfig(MixerConfig):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) of the decoder's heads."""

    module: ClassVar[str] = "nnxdsl.models.attention.gqa:Attention"

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        own = {
            ours: theirs for ours, theirs in _LINEARS.items() if decoder.values == "projected" or "value" not in ours
        }
        biased = list(_LINEARS)[: _BIASED[decoder.attention_bias]]
        return {
            **linears(own),
            **biases({ours: theirs for ours, theirs in own.items() if ours in biased}),
            **({"attention.sinks": TensorSource(("self_attn.sinks",))} if decoder.sinks else {}),
            **(norms(_NORMS) if decoder.query_key_norm != "none" else {}),
        }
