"""A family: its spec class, sizes, and how its `config.json` and tensor names differ from others; no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerPattern
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.config.tensors import MTPTensors, TensorSource
from nnxdsl.models.families.fields import Fields
from nnxdsl.models.families.hf_config import NUMBERS, ConfigFile, numbers_to_hf
from nnxdsl.models.families.layer_fields import LayerFields

Tensors = dict[str, TensorSource]
"""Sources of a layer's arrays, by path in the layer."""

OUTSIDE = {"embed.embedding": "embed_tokens.weight", "norm.scale": "norm.weight"}
"""Names of the tensors outside of the layers in most families, without prefix, by path."""

CHOICES: dict[str, Any] = {
    "norm.placement": "pre",
    "norm.linear_placement": None,
    "norm.scale": "plain",
    "norm.final_scale": None,
    "norm.post_eps": None,
    "attention.query_key_norm": "none",
    "attention.sinks": False,
    "attention.bias": "none",
    "attention.values": "projected",
    "attention.value_norm": False,
    "global_heads": None,
    "layers.num_kv_shared_layers": 0,
    "mlp.kv_shared_dim": None,
    "per_layer_embedding": None,
    "layer_scalar": False,
    "attention.output_gate": "none",
    "mlp.activation": "silu",
    "mlp.gate": True,
    "mlp.bias": False,
    "embedding.scaled": False,
    "embedding.multiplier": 1.0,
    "embedding.norm": False,
    "residual_multiplier": 1.0,
    "head.logits_scaling": 1.0,
    "attention.query_temperature": None,
    "window": None,
    "window_kind": "sliding",
    "layers.pattern": ("global",),
    "layers.lead_pattern": (),
    "layers.tail_pattern": (),
    "layers.sublayers": "both",
    "rope_local": None,
    "mla": None,
    "linear_attention": None,
    "feed_forward": None,
    "layers.dense_layers": 0,
    "layers.dense_pattern": (),
    "attention.soft_cap": None,
    "head.soft_cap": None,
    "mtp_layers": 0,
}
"""Fields of DecoderConfig that a family has by default; those of its parts by their path."""


def decoder(
    *,
    layers: int,
    embed: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    length: int,
    rope: Rope,
    scalar: int | None = None,
    query_scale: float | None = None,
    norm_eps: float = 1e-6,
    tied_head: bool = True,
    kv_shared_mlp: int | None = None,
    **fields: Any,
) -> DecoderConfig:
    """A row of a table of sizes.

    Args:
        layers: `layers.num_layers`.
        embed: `embed_dim`.
        mlp: `mlp.dim`.
        heads: `num_heads`.
        kv_heads: `num_kv_heads`.
        head_dim: `head_dim`.
        vocab: `vocab_size`.
        length: `max_length`.
        rope: `rope_global`.
        scalar: attention scores are divided by its square root; None for `head_dim`.
        query_scale: the factor of attention scores, in place of `scalar`.
        norm_eps: `norm.eps`.
        tied_head: `head.tied`.
        kv_shared_mlp: `mlp.kv_shared_dim`.
        **fields: other fields of DecoderConfig, in place of those of `CHOICES`, which has them by path; those of
            `layers` also by their name alone.
    """
    numbers: dict[str, Any] = {
        "layers.num_layers": layers,
        "embed_dim": embed,
        "mlp.dim": mlp,
        "mlp.kv_shared_dim": kv_shared_mlp,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_length": length,
        "rope_global": rope,
        "attention.query_scale": query_scale or (scalar or head_dim) ** -0.5,
        "norm.eps": norm_eps,
        "head.tied": tied_head,
    }
    of_layers = attrs.fields_dict(LayerPattern)
    others = {f"layers.{name}" if name in of_layers else name: value for name, value in fields.items()}
    return DecoderConfig.from_fields({**CHOICES, **numbers, **others})


def transformers_defaults(
    *,
    layers: int,
    embed: int,
    mlp: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    vocab: int,
    length: int,
    norm_eps: float = 1e-6,
    **others: int | None,
) -> dict[str, Any]:
    """Value in transformers of each number that a `config.json` may leave out, by the short names of `decoder`.

    Args:
        layers: `num_hidden_layers`.
        embed: `hidden_size`.
        mlp: `intermediate_size`.
        heads: `num_attention_heads`.
        kv_heads: `num_key_value_heads`; None where it follows from others, as for all these.
        head_dim: `head_dim`.
        vocab: `vocab_size`.
        length: `max_position_embeddings`.
        norm_eps: `rms_norm_eps`.
        **others: numbers of this family alone, by their names in `config.json`.
    """
    return {
        "num_hidden_layers": layers,
        "hidden_size": embed,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rms_norm_eps": norm_eps,
        **others,
    }


@attrs.frozen(kw_only=True)
class Family:
    """A family of models: a table of what it has in common with others, and of what differs.

    Attributes:
        title: its name in messages.
        spec: its spec class, which has a field `size`.
        sizes: the decoder of each size.
        architecture: the class of transformers, for `config.json`.
        classifier: its class with a head of labels (sequence classification); None where it has none.
        model_types: the values of `model_type` that are read; the first is written.
        choices: fields of DecoderConfig that all its members share, where they differ from `CHOICES`.
        defaults: transformers' value of each number that a `config.json` may leave out, see `transformers_defaults`.
        fixed: fields of `config.json` that would change the computation, with the only implemented value.
        ignored: fields of `config.json` that have no effect on the forward pass in this family.
        layers: which fields of any linear layer and activation transformers reads in this family.
        fields: readers and writers of the other fields, in their order.
        prepare: applied to the fields of a file first: second spellings.
        spellings: names of this family for numbers of `NUMBERS` in `config.json`, by the names that most families use.
        wrappers: the values of `model_type` of files with several modalities, whose `text_config` is of this family.
        written_in: the fields of a file of several modalities in whose `text_config` a decoder is written, where
            transformers has no class for the text decoder with its head; None where it has.
        layer_tensors: from the decoder and the sources of a layer's tensors under the names that most families use,
            those of this family.
        outside: names of the tensors outside of the layers, without prefix, by path.
        prefix: before the names of tensors in files.
        aliases: other names of modules in files, and those of `layer_tensors`.
        even_parts: tensors of a layer that transformers joins in memory, in their order, and for each another with as
            many rows: it writes them as equal parts, whatever their lengths.
        is_general: whether it is written only where no other family fits: its members can be those of others.
        mtp: names of the multi-token-prediction layer's tensors; None for a family without one.
    """

    title: str
    spec: type[Model]
    sizes: Mapping[str, DecoderConfig]
    architecture: str
    classifier: str | None = None
    model_types: tuple[str, ...]
    choices: Mapping[str, Any] = attrs.Factory(dict)
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = attrs.Factory(dict)
    ignored: tuple[str, ...] = ()
    layers: LayerFields = LayerFields()  # noqa: RUF009 - frozen
    fields: tuple[Fields, ...]
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: fields
    spellings: Mapping[str, str] = attrs.Factory(dict)
    wrappers: tuple[str, ...] = ()
    written_in: Mapping[str, Any] | None = None
    layer_tensors: Callable[[DecoderConfig, Tensors], Tensors] = lambda _, tensors: tensors
    outside: Mapping[str, str] = attrs.Factory(lambda: OUTSIDE)
    prefix: str = "model."
    aliases: Mapping[str, str] = attrs.Factory(dict)
    even_parts: Mapping[str, str] = attrs.Factory(dict)
    is_general: bool = False
    mtp: MTPTensors | None = None

    @property
    def _parts(self) -> tuple[Fields, ...]:
        """All readers and writers: those of layers first."""
        return (self.layers, *self.fields)

    def read(self, fields: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a parsed `config.json`.

        Raises:
            WeightsError: all fields that are wrong or not implemented.
        """
        names = {name for part in self._parts for name in part.reads()}
        others = names.union(self.ignored)
        file = ConfigFile(self.title, self.prepare(fields), self.defaults, self.fixed, others, self.spellings)
        decoder_fields: dict[str, Any] = {**CHOICES, **self.choices}
        for part in self._parts:
            decoder_fields |= part.read(file, decoder_fields)
        numbers = {ours: file.numbers[theirs] for theirs, ours in NUMBERS.items()}
        return file.decoder({**numbers, **decoder_fields})

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """The fields of `config.json` for a decoder without `differences`."""
        numbers = {self.spellings.get(name, name): value for name, value in numbers_to_hf(config).items()}
        written = {"model_type": self.model_types[0], **numbers}
        for part in self._parts:
            written |= part.write(config)
        written |= self.fixed
        return written if self.written_in is None else {**self.written_in, "text_config": written}

    def differences(self, config: DecoderConfig) -> list[str]:
        """Every field in which a decoder differs from those of this family, as "field=value here (not value there)"."""
        decided = {name for part in self._parts for name in part.decided()}
        if self.mtp is not None:
            decided.add("mtp_layers")
        expected = {name: value for name, value in {**CHOICES, **self.choices}.items() if name not in decided}
        for part in self._parts:
            expected |= part.expected(config)
        return [
            f"{name}={value!r} (not {attrgetter(name)(config)!r})"
            for name, value in expected.items()
            if attrgetter(name)(config) != value
        ]
