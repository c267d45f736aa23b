"""Fields of `config.json` that any family's layers may have: biases of linear layers, and the activation; no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from nnxdsl.models.config.attention import AttentionBias
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import Activation
from nnxdsl.models.families.fields import Fields
from nnxdsl.models.families.hf_config import ConfigFile

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Ours, by transformers' names; the first of several names is written."""


@attrs.frozen(kw_only=True)
class LayerFields(Fields):
    """The fields of layers that transformers reads in a family; `choices` of the family have their defaults.

    A field that transformers does not read there is not named, so that a file in which it is set is refused.

    Attributes:
        attention_bias: the linear layers to which the field `attention_bias` gives a bias; None in a family without
            that field.
        mlp_bias: whether there is a field `mlp_bias`.
        activation: the names of the activation: the first that a file has is read, and all are written; none in a
            family without that field.
    """

    attention_bias: AttentionBias | None = "all"
    mlp_bias: bool = False
    activation: tuple[str, ...] = ("hidden_act",)
    names: ClassVar[tuple[str, ...]] = ()

    def reads(self) -> tuple[str, ...]:
        flags = {"attention_bias": self.attention_bias is not None, "mlp_bias": self.mlp_bias}
        return (*(name for name, has in flags.items() if has), *self.activation)

    def decided(self) -> tuple[str, ...]:
        fields = {"attention.bias": self.attention_bias, "mlp.bias": self.mlp_bias, "mlp.activation": self.activation}
        return tuple(name for name, read in fields.items() if read)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        def flag(name: str, default: bool) -> bool:
            return default if file.fields.get(name) is None else file.flag(name, default)

        fields: dict[str, Any] = {}
        if self.attention_bias is not None:
            is_biased = flag("attention_bias", decoder["attention.bias"] != "none")
            fields["attention.bias"] = self.attention_bias if is_biased else "none"
        if self.mlp_bias:
            fields["mlp.bias"] = flag("mlp_bias", decoder["mlp.bias"])
        name = next((name for name in self.activation if file.fields.get(name) is not None), None)
        if name is not None:
            fields["mlp.activation"] = _activation(file, name, decoder["mlp.activation"])
        return fields

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
        bias = {} if self.attention_bias is None else {"attention_bias": config.attention.bias != "none"}
        mlp = {"mlp_bias": config.mlp.bias} if self.mlp_bias else {}
        return bias | mlp | dict.fromkeys(self.activation, names[config.mlp.activation])

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        if self.attention_bias is None:
            return {}
        return {"attention.bias": "none" if config.attention.bias == "none" else self.attention_bias}


def _activation(file: ConfigFile, name: str, default: Activation) -> Activation:
    value = file.fields[name]
    if isinstance(value, str) and value in ACTIVATIONS:
        return ACTIVATIONS[value]
    *others, last = map(repr, ACTIVATIONS)
    file.problems.append(f"{name}: expected one of {', '.join(others)} and {last}, got {value!r}")
    return default
