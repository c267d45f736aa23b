"""A Hub `config.json` that is being read: typed fields, limits and all problems together; knows no family, no jax."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, period_of

# The numbers that every family has: the Hub's name and ours.
NUMBERS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp.dim",
    "num_hidden_layers": "layers.num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm.eps",
    "max_position_embeddings": "max_length",
}

# Fields without effect on the forward pass, in any family: how weights were stored and initialised, how text is
# generated, token ids (which are the tokenizer's), and what transformers writes about itself.
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
_QUANTIZATION = "quantization_config"
# The schemes of compressed-tensors whose weights are read, and orders of inputs that are not.
_INTEGERS = [{"type": "int", "num_bits": bits, "symmetric": True} for bits in (4, 8)]
_ORDERS = ("group", "dynamic")

# The largest numbers that are read, far beyond every published model: anything larger would take an hour, or the
# memory of the machine, before a missing tensor could be reported.
MOST: dict[str, int | float] = {
    "num_hidden_layers": 1024,
    "num_experts": 2**13,
    "num_local_experts": 2**13,
    "n_routed_experts": 2**13,
    "max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "sliding_window_pattern": 1024,
    "_sliding_window_pattern": 1024,
    "full_attention_interval": 1024,
    "first_k_dense_replace": 1024,
    "max_window_layers": 2**31 - 1,
    "rms_norm_eps": 1.0,
}
MOST_OTHERS = 2**24
MOST_EXPERTS = 2**17
"""Of all layers together."""

ConfigT = TypeVar("ConfigT")

KINDS: dict[str, LayerKind] = {"sliding_attention": "local", "full_attention": "global"}
LINEAR_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "global"}


class ConfigFile:
    """A parsed `config.json` that is being read; collects everything that is wrong with it.

    Args:
        title: the family's name in messages.
        fields: the parsed file.
        defaults: transformers' value of each number that a file may leave out; None where that depends on others, and
            then a file may have null too.
        fixed: fields that would change the mathematics, with the one value that is implemented.
        others: fields that are read elsewhere, or that have no effect in this family.
        spellings: names of this family for numbers of `NUMBERS`, by the names that most families use.

    Attributes:
        fields: the parsed file, with the names that most families use.
        numbers: the numbers, by the names of `defaults`.
        problems: what is wrong so far, each beginning with the name of a field.
    """

    def __init__(
        self,
        title: str,
        fields: Mapping[str, Any],
        defaults: Mapping[str, Any],
        fixed: Mapping[str, Any],
        others: Collection[str],
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        self._spellings = spellings or {}
        common = {theirs: usual for usual, theirs in self._spellings.items()}
        foreign = {name: value for name, value in fields.items() if name in self._spellings}
        common_fields = {common.get(name, name): value for name, value in fields.items() if name not in foreign}
        self.fields: Mapping[str, Any] = common_fields
        self.problems = [
            f"{name}={value!r}: this family has {self._spellings[name]}" for name, value in foreign.items()
        ]
        self.numbers = dict(defaults)
        self._title = title
        for name, value in self.fields.items():
            if name in defaults:
                self._read_number(name, value)
            elif name in fixed:
                if (value or None) != (fixed[name] or None):
                    self.problems.append(f"{name}: only {fixed[name]!r} is implemented, got {value!r}")
            elif name == _QUANTIZATION:
                if value and (message := _quantization_problem(value)):
                    self.problems.append(f"{name}: {message}")
            elif name not in _WITHOUT_EFFECT and name not in others and value not in (None, False, [], {}):
                # Something that is switched off cannot matter; anything else might.
                self.problems.append(f"{name}={value!r}: not understood, and it could change the mathematics")

    def _read_number(self, name: str, value: Any) -> None:
        if (value, self.numbers[name]) == (None, None):
            return  # it follows from others
        title, most = self._spellings.get(name, name), MOST.get(name, MOST_OTHERS)
        wanted, noun = (int | float, "a number") if name == "rms_norm_eps" else (int, "an integer")
        if isinstance(value, bool) or not isinstance(value, wanted) or value <= 0:
            self.problems.append(f"{title}: expected {noun} above 0, got {value!r}")
        elif value > most:
            self.problems.append(f"{title}: expected at most {most:,}, got {value!r}")
        else:
            self.numbers[name] = float(value) if name == "rms_norm_eps" else value

    def count(self, name: str, default: int, least: int = 0) -> int:
        """A whole number that is not in `defaults`, from `least` on."""
        value, most = self.fields.get(name, default), MOST.get(name, MOST_OTHERS)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.problems.append(f"{name}: expected an integer from {least} to {most:,}, got {value!r}")
            return default
        return value

    def number(self, name: str, default: float) -> float:
        """A number above 0 that is not in `defaults`."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.problems.append(f"{name}: expected a number above 0, got {value!r}")
            return default
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name}: expected true or false, got {value!r}")
            return default
        return value

    def soft_cap(self, name: str, default: float | None) -> float | None:
        """A bound of scores or logits; null for none."""
        value = self.fields.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            self.problems.append(f"{name}: expected a number above 0 or null, got {value!r}")
            return None
        return None if value is None else float(value)

    def window(self, default: int | None) -> int | None:
        """`sliding_window`; null where no layer has one."""
        value = self.fields.get("sliding_window", default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            self.problems.append(f"sliding_window: expected an integer above 0 or null, got {value!r}")
            return None
        if value is not None and value > MOST["sliding_window"]:
            self.problems.append(f"sliding_window: expected at most {MOST['sliding_window']:,}, got {value!r}")
            return None
        return value

    def pattern(self, default: Sequence[LayerKind], kinds: Mapping[str, LayerKind] = KINDS) -> tuple[LayerKind, ...]:
        """The period of the layers' kinds, from `layer_types`.

        Args:
            default: the period where the file has none.
            kinds: those that there may be, under the Hub's names.

        Returns:
            `default`, where it gives the layers of the file; else the shortest period that does.
        """
        layers, names = self.numbers["num_hidden_layers"], self.fields.get("layer_types")
        if names is None:
            return tuple(default)
        if not isinstance(names, Sequence) or len(names) != layers or any(one not in tuple(kinds) for one in names):
            *others, last = map(repr, kinds)
            self.problems.append(
                f"layer_types: expected {layers} layers of the kinds {', '.join(others)} and {last}, got {names!r}"
            )
            return tuple(default)
        pattern: list[LayerKind] = [kinds[name] for name in names]
        is_default = pattern == [default[layer % len(default)] for layer in range(layers)]
        return tuple(default) if is_default else period_of(pattern)

    def part(self, kind: Callable[..., ConfigT], **fields: Any) -> ConfigT | None:
        """A config inside the decoder's, such as its experts; None if there is a problem."""
        if self.problems:
            return None
        try:
            return kind(**fields)
        except ValueError as error:
            self.problems.append(str(error))
            return None

    def decoder(self, fields: Mapping[str, Any]) -> DecoderConfig:
        """The decoder, if nothing is wrong.

        Args:
            fields: of DecoderConfig, see `from_fields`.

        Raises:
            WeightsError: with all problems, or because the numbers do not fit each other.
        """
        if self.problems:
            raise WeightsError("\n  ".join([f"config.json is not a {self._title} that can be read:", *self.problems]))
        try:
            config = DecoderConfig.from_fields(fields)
            if config.moe is not None and config.layers.num_layers * config.moe.num_experts > MOST_EXPERTS:
                each = f"{config.layers.num_layers} layers of {config.moe.num_experts} experts"
                raise ValueError(f"{each} are more than {MOST_EXPERTS:,} experts in all")
            return config
        except ValueError as error:
            raise WeightsError(f"config.json is not a {self._title} that can be read: {error}") from None


def numbers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The numbers that every family has, under the Hub's names."""
    return {theirs: attrgetter(ours)(config) for theirs, ours in NUMBERS.items()}


def layer_types(config: DecoderConfig) -> list[str]:
    """The kind of every layer, under the Hub's names."""
    names = {ours: theirs for theirs, ours in (KINDS | LINEAR_KINDS).items()} | {"nope": "full_attention"}
    return [names[kind] for kind in config.layers.kinds]


def _quantization_problem(value: Any) -> str | None:
    """Why weights of this `quantization_config` cannot be read; None where they can."""
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    if method in ("mxfp4", "fp8"):
        return None
    if method != "compressed-tensors":
        read = "only quant_method 'mxfp4', 'fp8' and 'compressed-tensors' are read"
        return f"{read}, got {method or value!r}; convert the weights to bfloat16"
    problems = [f"{name}: expected none, got {value[name]!r}" for name in ("transform_config",) if value.get(name)]
    groups = value.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        group = group if isinstance(group, Mapping) else {}
        weights, form = group.get("weights") or {}, group.get("format") or value.get("format")
        kind = {field: weights.get(field) for field in ("type", "num_bits", "symmetric")}
        if (
            form not in ("pack-quantized", "int-quantized")
            or kind not in _INTEGERS
            or weights.get("actorder") in _ORDERS
        ):
            got = {"format": form, **kind, "actorder": weights.get("actorder")}
            problems.append(
                f"{name}: only symmetric integers of 4 or 8 bits, pack-quantized or int-quantized, got {got}"
            )
    return f"{'; '.join(problems)}; convert the weights to bfloat16" if problems else None
