"""Configuration of grouped-query attention: its numbers are the decoder's; no jax, and no family by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.models.config.mixer import HeadColumns, MixerConfig
from nnxdsl.models.config.tensors import TensorSource, biases, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.attention import Values
    from nnxdsl.models.config.decoder import DecoderConfig

_LINEARS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.output_gate": "self_attn.gate_proj",
}
_BIASED = {"none": 0, "qkv": 3, "all": 4}
_WITHOUT: dict[Values, tuple[str, ...]] = {
    "projected": (),
    "keys": ("attention.value",),
    "shared": ("attention.key", "attention.value", "attention.key_norm"),
}
_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


@attrs.frozen
class GQAConfig(MixerConfig):
    """Grouped-query attention (Ainslie et al., arXiv:2305.13245) of the decoder's heads."""

    module: ClassVar[str] = "nnxdsl.models.attention.gqa:Attention"

    def qk_columns(self, decoder: DecoderConfig) -> tuple[HeadColumns, ...]:
        """Queries and keys in equal parts; queries alone where several heads share a key.

        Kimi K2 (arXiv:2507.20534) leaves what heads share as it is, of which the shared rotary key of MLA is the case
        in that report: a shared key head is another.
        """
        width = decoder.head_dim
        is_shared = decoder.num_kv_heads < decoder.num_heads
        gate = ((width, 0.0),) if decoder.attention.output_gate == "query" else ()
        runs = ((width, 1.0 if is_shared else 0.5), *gate)
        query = HeadColumns("attention.query", runs)
        return (query,) if is_shared else (query, HeadColumns("attention.key", ((width, 0.5),)))

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer in a checkpoint of the Hub."""
        attention = decoder.attention
        missing = (*_WITHOUT[attention.values], *(() if attention.output_gate == "own" else ("attention.output_gate",)))
        projections = {ours: theirs for ours, theirs in _LINEARS.items() if ours not in missing}
        scales = {ours: theirs for ours, theirs in _NORMS.items() if ours not in missing}
        biased = list(_LINEARS)[: _BIASED[attention.bias]]
        return {
            **linears(projections),
            **biases({ours: theirs for ours, theirs in projections.items() if ours in biased}),
            **({"attention.sinks": TensorSource(("self_attn.sinks",))} if attention.sinks else {}),
            **(norms(scales) if attention.query_key_norm in ("head", "row") else {}),
        }
