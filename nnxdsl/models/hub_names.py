"""Which tensors of a Hub checkpoint make each leaf of our decoder; knows names and shapes, no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from nnxdsl.models.decoder_config import DecoderConfig, Norms

HEAD = "lm_head.weight"
"""Stands beside what the text model's tensors have before their names, not behind it."""

_TOP = {"embed.embedding": "embed_tokens.weight", "norm.scale": "norm.weight"}
_ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
}
_MLP = {
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


# Experts' tensors: of the layer, then of one expert.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
}
_OTHER_EXPERTS = ("mlp.gate", "mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


@attrs.frozen
class Source:
    """The tensors, without prefix, that make one leaf.

    Attributes:
        names: in the order of the leaf's leading axes, the last of which changes fastest.
        leading: lengths of the leaf's axes that the tensors do not have: periods, experts.
        transposed: whether the tensor is our matrix turned over: torch keeps linear layers' weights as [out, in].
    """

    names: tuple[str, ...]
    leading: tuple[int, ...]
    transposed: bool

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, for the leaf's shape."""
        part = shape[len(self.leading) :]
        return part[::-1] if self.transposed else part

    def part(self, leaf: Any, number: int) -> np.ndarray:
        """One tensor of a leaf."""
        array = np.asarray(leaf[np.unravel_index(number, self.leading)] if self.leading else leaf)
        return array.T if self.transposed else array

    def leaf(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The leaf of all its tensors; of one alone a view."""
        turned = [part.T if self.transposed else part for part in parts]
        return np.stack(turned).reshape(*self.leading, *turned[0].shape) if self.leading else turned[0]


def sources(config: DecoderConfig, model_type: str | None = None) -> dict[str, Source]:
    """For each leaf of a plain decoder of `config`: the tensors that it is made of.

    Args:
        config: the decoder's numbers.
        model_type: the Hub's name of the family, for what is called differently from family to family.
    """
    found = {path: Source((name,), (), False) for path, name in _TOP.items()}
    if not config.tied_head:
        found["lm_head.kernel"] = Source((HEAD,), (), False)
    pattern, periods = config.period, config.periods
    for ours, own in _layer(config, model_type).items():
        for block in range(pattern if periods else 0):
            names = (f"layers.{period * pattern + block}.{name}" for period in range(periods) for name in own.names)
            found[f"layers.blocks.{block}.{ours}"] = attrs.evolve(
                own, names=tuple(names), leading=(periods, *own.leading)
            )
        for block in range(len(config.tail)):
            names = (f"layers.{periods * pattern + block}.{name}" for name in own.names)
            found[f"tail.blocks.{block}.{ours}"] = attrs.evolve(own, names=tuple(names))
    return found


def _layer(config: DecoderConfig, model_type: str | None) -> dict[str, Source]:
    """Within a layer."""
    found = {f"{ours}.kernel": Source((f"{theirs}.weight",), (), True) for ours, theirs in _ATTENTION.items()}
    found |= {
        f"{ours}.bias": Source((f"{_ATTENTION[ours]}.bias",), (), False) for ours in _BIASED[config.attention_bias]
    }
    norms = dict(_NORMS[config.norms]) | (_QUERY_KEY_NORMS if config.query_key_norm != "none" else {})
    found |= {f"{ours}.scale": Source((f"{theirs}.weight",), (), False) for ours, theirs in norms.items()}
    if config.experts is None:
        return found | {f"{ours}.kernel": Source((f"{theirs}.weight",), (), True) for ours, theirs in _MLP.items()}
    router, experts, matrices = _EXPERTS.get(model_type or "", _OTHER_EXPERTS)
    found["mlp.router.weight"] = Source((f"{router}.weight",), (), False)
    count = config.experts.count
    for ours, theirs in matrices.items():
        names = tuple(f"{experts}.{expert}.{theirs}.weight" for expert in range(count))
        found[f"mlp.{ours}.kernel"] = Source(names, (count,), True)
    return found
