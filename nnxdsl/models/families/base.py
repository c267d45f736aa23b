"""What the families' `config.json` files have in common, read and written; knows no family by name, and no jax."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import attrs

from nnxdsl.models.decoder_config import DecoderConfig, RopeRamp
from nnxdsl.spec.errors import WeightsError

# The numbers that every family has: the Hub's name and ours.
NUMBERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_length",
}

# Fields that say nothing of the forward pass, in any family: how weights were stored and initialised, how text is
# generated, token ids (the tokenizer's business), and what transformers writes about itself.
_WITHOUT_EFFECT = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
# What rope_type "llama3" has beside its factor: the Hub's name and ours.
_RAMP = {"low_freq_factor": "slow", "high_freq_factor": "fast", "original_max_position_embeddings": "length"}
_ROPE_KINDS = {"default": (), "linear": ("factor",), "llama3": ("factor", *_RAMP)}


@attrs.frozen(kw_only=True)
class Family:
    """One family of the Hub, and how it says a DecoderConfig.

    Attributes:
        title: its name for people.
        architecture: the class of transformers that is written to `config.json`.
        model_types: the values of `model_type` that are read.
        choices: fields of DecoderConfig that all its members share, with their values.
        read: a parsed `config.json` to the decoder's numbers; raises WeightsError.
        write: the fields of `config.json` for a decoder that has the `choices`.
        query_scale: what attention scores are multiplied by in a decoder of these numbers, where `config.json` has no
            field for it; None where it has one.
    """

    title: str
    architecture: str
    model_types: tuple[str, ...]
    choices: Mapping[str, object]
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    query_scale: Callable[[DecoderConfig], float] | None = None

    def refusals(self, config: DecoderConfig) -> list[str]:
        """Everything in which a decoder differs from those of this family, as "field=what it is here"."""
        wanted = dict(self.choices)
        if self.query_scale is not None:
            wanted["query_scale"] = self.query_scale(config)
        return [
            f"{name}={value!r} (not {getattr(config, name)!r})"
            for name, value in wanted.items()
            if getattr(config, name) != value
        ]


class Rope(NamedTuple):
    """The rotary positions of one kind of layers, as DecoderConfig has them."""

    base: float = 1.0
    scale: float = 1.0
    ramp: RopeRamp | None = None


class ConfigFile:
    """A parsed `config.json` that is being read: gathers everything that is wrong with it.

    Args:
        title: the family's name for people.
        fields: the parsed file.

    Attributes:
        fields: the parsed file.
        problems: what is wrong so far, each beginning with the name of a field.
    """

    def __init__(self, title: str, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.problems: list[str] = []
        self._title = title

    def numbers(self, defaults: Mapping[str, Any], fixed: Mapping[str, Any], others: Collection[str]) -> dict[str, Any]:
        """Takes the numbers, and looks at each field whether it could change the mathematics unseen.

        Args:
            defaults: transformers' value of each number that a file may leave out; None where that depends on others,
                and then a file may say null too.
            fixed: fields that would change the mathematics, with the one value that is implemented.
            others: fields that are read elsewhere, or that have no effect in this family.

        Returns:
            The numbers, by the names of `defaults`.
        """
        found = dict(defaults)
        for name, value in self.fields.items():
            if name in defaults:
                if (value, defaults[name]) == (None, None):
                    continue  # left to be worked out
                wanted, what = (int | float, "a number") if name == "rms_norm_eps" else (int, "an integer")
                if isinstance(value, bool) or not isinstance(value, wanted) or value <= 0:
                    self.problems.append(f"{name}: expected {what} above 0, got {value!r}")
                else:
                    found[name] = float(value) if name == "rms_norm_eps" else value
            elif name in fixed:
                if (value or None) != (fixed[name] or None):
                    self.problems.append(f"{name}: only {fixed[name]!r} is implemented, got {value!r}")
            elif name not in _WITHOUT_EFFECT and name not in others and value not in (None, False, [], {}):
                # Something that is switched off cannot matter; anything else might.
                self.problems.append(f"{name}={value!r}: not understood, and it could change the mathematics")
        return found

    def rope(self, entry: Any, base: Any, where: str) -> Rope:
        """Reads one entry of RoPE in either spelling.

        Args:
            entry: such as `{"rope_type": "linear", "factor": 8.0}`, in transformers 5 with its `rope_theta`; or None.
            base: the `rope_theta` if the entry has none.
            where: the field that the entry comes from, for messages.

        Returns:
            The positions; of any kind if there is a problem.
        """
        if not isinstance(entry, Mapping | None):
            self.problems.append(f"{where}: expected an object, got {entry!r}")
            return Rope()
        given: dict[str, Any] = {name: value for name, value in (entry or {}).items() if value is not None}
        kind = given.pop("rope_type", None) or given.get("type") or "default"
        given.pop("type", None)  # older files carry both names
        if kind not in _ROPE_KINDS:
            *names, last = map(repr, _ROPE_KINDS)
            known = f"{', '.join(names)} and {last}"
            self.problems.append(f"{where}: only rope_type {known} are implemented, got {kind!r}")
            return Rope()
        numbers: dict[str, Any] = {"rope_theta": given.pop("rope_theta", base)}
        numbers |= {name: given.pop(name, None) for name in _ROPE_KINDS[kind]}
        given.pop("factor", None)  # with rope_type "default" transformers reads none, so neither does this
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                self.problems.append(f"{where}: {name}: expected a number above 0, got {value!r}")
                return Rope()
        if given:
            self.problems.append(f"{where}: not understood: {given!r}")
        base, scale = float(numbers["rope_theta"]), float(numbers.get("factor", 1.0))
        if kind != "llama3":
            return Rope(base, scale)
        try:
            return Rope(base, scale, RopeRamp(**{ours: numbers[theirs] for theirs, ours in _RAMP.items()}))
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            return Rope()

    def decoder(self, **fields: Any) -> DecoderConfig:
        """The decoder, if nothing is wrong.

        Args:
            **fields: of DecoderConfig.

        Raises:
            WeightsError: with all problems, or because the numbers do not fit each other.
        """
        if self.problems:
            raise WeightsError("\n  ".join([f"config.json is not a {self._title} that can be read:", *self.problems]))
        try:
            return DecoderConfig(**fields)
        except ValueError as error:
            raise WeightsError(f"config.json is not a {self._title} that can be read: {error}") from None


def numbers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The numbers that every family has, under the Hub's names."""
    return {theirs: getattr(config, ours) for theirs, ours in NUMBERS.items()}


def rope_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """RoPE of the global layers in the spelling that transformers 4 and 5 read."""
    scaling: dict[str, Any] | None = None
    if config.rope_ramp is not None:
        ramp = {theirs: getattr(config.rope_ramp, ours) for theirs, ours in _RAMP.items()}
        scaling = {"rope_type": "llama3", "factor": config.rope_scale, **ramp}
    elif config.rope_scale != 1.0:
        scaling = {"rope_type": "linear", "factor": config.rope_scale}
    return {"rope_theta": config.rope_base_global, "rope_scaling": scaling}
