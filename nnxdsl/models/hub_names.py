"""Which tensors of a Hub checkpoint make each leaf of our decoder; knows names and shapes, no files."""

from __future__ import annotations

import attrs

from nnxdsl.models.decoder_config import DecoderConfig, Norms

HEAD = "lm_head.weight"
"""Stands beside what the text model's tensors have before their names, not behind it."""

_TOP = {"embed.embedding": "embed_tokens.weight", "norm.scale": "norm.weight"}
_PROJECTIONS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_BIASED = {
    "none": (),
    "qkv": ("attention.query", "attention.key", "attention.value"),
    "all": ("attention.query", "attention.key", "attention.value", "attention.output"),
}
_QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
# What the Hub calls the norm before the MLP where it is the only one after attention, and where it is not.
_NORMS: dict[Norms, dict[str, str]] = {
    "pre": {"pre_attention_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
    "sandwich": {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    "post": {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
}


@attrs.frozen
class Source:
    """The tensors, without prefix, that make one leaf.

    Attributes:
        names: one for each period, or the only one.
        stacked: whether the leaf has an axis of periods.
        transposed: whether the tensor is our leaf turned over: torch keeps linear layers' weights as [out, in].
    """

    names: tuple[str, ...]
    stacked: bool
    transposed: bool

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, for the leaf's shape."""
        part = shape[1:] if self.stacked else shape
        return part[::-1] if self.transposed else part


def sources(config: DecoderConfig) -> dict[str, Source]:
    """For each leaf of a plain decoder of `config`: the tensors that it is made of."""
    found = {path: Source((name,), False, False) for path, name in _TOP.items()}
    if not config.tied_head:
        found["lm_head.kernel"] = Source((HEAD,), False, False)
    pattern, periods = config.period, config.periods
    for ours, (theirs, transposed) in _layer(config).items():
        for block in range(pattern if periods else 0):
            names = tuple(f"layers.{period * pattern + block}.{theirs}" for period in range(periods))
            found[f"layers.blocks.{block}.{ours}"] = Source(names, True, transposed)
        for block in range(len(config.tail)):
            names = (f"layers.{periods * pattern + block}.{theirs}",)
            found[f"tail.blocks.{block}.{ours}"] = Source(names, False, transposed)
    return found


def _layer(config: DecoderConfig) -> dict[str, tuple[str, bool]]:
    """Within a layer: ours, theirs, and whether theirs is turned over."""
    found = {f"{ours}.kernel": (f"{theirs}.weight", True) for ours, theirs in _PROJECTIONS.items()}
    found |= {f"{ours}.bias": (f"{_PROJECTIONS[ours]}.bias", False) for ours in _BIASED[config.attention_bias]}
    norms = dict(_NORMS[config.norms]) | (_QUERY_KEY_NORMS if config.query_key_norm != "none" else {})
    return found | {f"{ours}.scale": (f"{theirs}.weight", False) for ours, theirs in norms.items()}
