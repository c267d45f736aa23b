"""Attention: the factor of scores, norms, biases, values and gate; no jax."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

from nnxdsl.models.config.checks import require_above_zero, require_choices

QueryKeyNorm = Literal["none", "head", "row", "unscaled", "rotated"]
OutputGate = Literal["none", "query", "own"]
AttentionBias = Literal["none", "qkv", "all"]
Values = Literal["projected", "keys", "shared"]

_CHOICES = {
    "query_key_norm": get_args(QueryKeyNorm),
    "output_gate": get_args(OutputGate),
    "bias": get_args(AttentionBias),
    "values": get_args(Values),
}


@attrs.frozen(kw_only=True)
class QueryTemperature:
    """A factor of queries that grows with position p: `1 + beta ln(1 + floor((p + offset) / length))` (Llama 4).

    Attributes:
        beta: how fast it grows.
        length: positions below it have the factor 1.
        offset: added to the position.
        layers: which have it: all, or those without rotary positions.
    """

    beta: float
    length: int
    offset: int = 0
    layers: Literal["all", "nope"] = "all"

    def __attrs_post_init__(self) -> None:
        if not (self.beta > 0 and self.length > 0):
            raise ValueError(f"query_temperature: expected numbers above 0, got {self.beta} and {self.length}")


@attrs.frozen(kw_only=True)
class AttentionConfig:
    """The factor of attention scores, and norms, biases, values and the gate of attention.

    Attributes:
        query_scale: factor of attention scores.
        query_temperature: a factor of queries by position; None for none.
        query_key_norm: an RMSNorm of queries and of keys before their rotation: "head": of each head; "row": of
            all heads of a token together; "unscaled": of each head, without scale (Muse Glimmer); "rotated": of each
            head after its rotation, without scale, and not in layers without rotary positions (Llama 4).
        soft_cap: attention scores `s` become `cap * tanh(s / cap)` before they are masked (Gemma 2,
            arXiv:2408.00118); None for no cap.
        sinks: each head's softmax has one more learned score, whose value is zero (GPT-OSS, arXiv:2508.10925).
        bias: which of the linear layers have a bias: none, query, key and value, or the output too; of latent
            attention "all" are those from and to the residual stream.
        values: "projected": values have a projection of their own; "keys": they are the projections of the keys, before
            norm and rotation (Gemma 4); "shared": keys and values are those of an earlier layer (see
            `LayerPattern.num_kv_shared_layers`).
        value_norm: each head's value goes through an RMSNorm without scale (Gemma 4).
        output_gate: the output is multiplied by the sigmoid of a gate: "query": the query's projection gives it beside
            the query of each head (Qwen3-Next); "own": it has a projection of its own (Muse Glimmer).
    """

    query_scale: float
    query_temperature: QueryTemperature | None = None
    query_key_norm: QueryKeyNorm = "none"
    soft_cap: float | None = None
    sinks: bool = False
    bias: AttentionBias = "none"
    values: Values = "projected"
    value_norm: bool = False
    output_gate: OutputGate = "none"

    def __attrs_post_init__(self) -> None:
        require_choices(self, "attention.", _CHOICES)
        require_above_zero(self, "attention.", "query_scale", "soft_cap")
