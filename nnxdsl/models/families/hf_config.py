"""What the families' `config.json` files have in common, read and written; knows no family by name, and no jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import (
    DecoderConfig,
    LayerKind,
    Llama3RopeScaling,
    MoEConfig,
    Rope,
    Yarn,
    dense_fields,
    period_of,
)

# What most families have of the choices that all of them make; each says what it has otherwise.
USUAL: dict[str, Any] = {
    "norms": "pre",
    "norm_scale": "plain",
    "query_key_norm": "none",
    "sinks": False,
    "attention_bias": "none",
    "output_gate": False,
    "activation": "silu",
    "scale_embedding": False,
}

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
# What rope_type "llama3" and "yarn" have beside the factor: the Hub's name and ours.
_QUANTIZATION = "quantization_config"
"""Of `config.json`: how weights are stored."""

_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("beta_slow", "beta_fast", "original_max_position_embeddings")
# What an entry of RoPE must have, and may have with which value where it has none.
_ROPE_KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "llama3": (("factor", *_LLAMA3), {}),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": None, "mscale": None, "mscale_all_dim": None},
    ),
}

# The largest numbers that are read, far beyond every published model: what is above them would take an hour, or the
# memory of the machine, before a tensor could be missed.
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
PartT = TypeVar("PartT")

_KINDS: dict[str, LayerKind] = {"sliding_attention": "local", "full_attention": "global"}
LINEAR_KINDS: dict[str, LayerKind] = {"linear_attention": "linear", "full_attention": "global"}


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
        derived: what follows from a decoder's other numbers, for fields that `config.json` does not have.
        further: whether it may have a layer that predicts tokens further ahead.
    """

    title: str
    architecture: str
    model_types: tuple[str, ...]
    choices: Mapping[str, object]
    read: Callable[[Mapping[str, Any]], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    derived: Callable[[DecoderConfig], Mapping[str, object]] = lambda _: {}
    further: bool = False

    def refusals(self, config: DecoderConfig) -> list[str]:
        """Everything in which a decoder differs from those of this family, as "field=what it is here"."""
        wanted = {
            "dense_pattern": (),
            **self.choices,
            **self.derived(config),
            **({} if self.further else {"mtp_layers": 0}),
        }
        return [
            f"{name}={value!r} (not {getattr(config, name)!r})"
            for name, value in wanted.items()
            if getattr(config, name) != value
        ]


UNREAD = Rope(theta=1.0)
"""Stands for rotary positions that could not be read; the problem is noted."""


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
                elif value > (most := MOST.get(name, MOST_OTHERS)):
                    self.problems.append(f"{name}: expected at most {most:,}, got {value!r}")
                else:
                    found[name] = float(value) if name == "rms_norm_eps" else value
            elif name in fixed:
                if (value or None) != (fixed[name] or None):
                    self.problems.append(f"{name}: only {fixed[name]!r} is implemented, got {value!r}")
            elif name == _QUANTIZATION:
                if value and (message := _quantization_problem(value)):
                    self.problems.append(f"{name}: {message}")
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
            The positions; `UNREAD` if there is a problem.
        """
        if not isinstance(entry, Mapping | None):
            self.problems.append(f"{where}: expected an object, got {entry!r}")
            return UNREAD
        given: dict[str, Any] = {name: value for name, value in (entry or {}).items() if value is not None}
        kind = given.pop("rope_type", None) or given.get("type") or "default"
        given.pop("type", None)  # older files carry both names
        if not isinstance(kind, str) or kind not in _ROPE_KINDS:
            *names, last = map(repr, _ROPE_KINDS)
            known = f"{', '.join(names)} and {last}"
            self.problems.append(f"{where}: only rope_type {known} are implemented, got {kind!r}")
            return UNREAD
        needed, optional = _ROPE_KINDS[kind]
        numbers: dict[str, Any] = {"rope_theta": given.pop("rope_theta", base)}
        numbers |= {name: given.pop(name, None) for name in needed}
        numbers |= {name: given.pop(name) for name in optional if name in given}
        whole = given.pop("truncate", True) if kind == "yarn" else True
        given.pop("factor", None)  # with rope_type "default" transformers reads none, so neither does this
        if kind == "yarn" and numbers["original_max_position_embeddings"] is None:
            numbers["original_max_position_embeddings"] = self.fields.get("max_position_embeddings")
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                self.problems.append(f"{where}: {name}: expected a number above 0, got {value!r}")
                return UNREAD
        if given or not isinstance(whole, bool):
            self.problems.append(f"{where}: not understood: {given or {'truncate': whole}!r}")
        base, scale = float(numbers["rope_theta"]), float(numbers.get("factor", 1.0))
        try:
            match kind:
                case "llama3":
                    ramp = Llama3RopeScaling(**{name: numbers[name] for name in _LLAMA3})
                case "yarn":
                    found = optional | numbers
                    ramp = Yarn(
                        **{name: found[name] for name in _YARN},
                        attention_factor=_amplitude(
                            scale, found["attention_factor"], found["mscale"], found["mscale_all_dim"]
                        ),
                        truncate=bool(whole),
                    )
                case _:
                    ramp = None
            return Rope(theta=base, factor=scale, scaling=ramp)
        except ValueError as error:
            self.problems.append(f"{where}: {error}")
            return UNREAD

    def one_rope(self, base: float = 10_000.0, part: float | None = None) -> Rope:
        """Rotary positions that all layers share: `rope_theta` and `rope_scaling`, or `rope_parameters`.

        Args:
            base: transformers' wavelength where the file says none.
            part: of a head that is turned, where the file does not say (`partial_rotary_factor`); None in families that
                turn all of it, for which that field is not understood.
        """
        name = "rope_parameters" if self.fields.get("rope_parameters") is not None else "rope_scaling"
        entry = self.fields.get(name)
        if part is None:
            return self.rope(entry, self.fields.get("rope_theta", base), name)
        given = self.fields.get("partial_rotary_factor", part)
        if isinstance(entry, Mapping) and "partial_rotary_factor" in entry:
            entry = {key: value for key, value in entry.items() if key != "partial_rotary_factor"}
            given = self.fields[name]["partial_rotary_factor"]
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1:
            self.problems.append(f"partial_rotary_factor: expected a number above 0 and at most 1, got {given!r}")
            given = 1.0
        rope = self.rope(entry, self.fields.get("rope_theta", base), name)
        return attrs.evolve(rope, partial_rotary_factor=float(given))

    def ropes(self, bases: tuple[float, float]) -> tuple[Rope, Rope]:
        """Rotary positions of the local and of the global layers, from `rope_parameters` of both kinds.

        Args:
            bases: transformers' wavelengths, local and global, where an entry says none.
        """
        given = self.fields.get("rope_parameters")
        if not isinstance(given, Mapping) or not set(given) <= set(_KINDS):
            *others, last = map(repr, _KINDS)
            self.problems.append(f"rope_parameters: expected entries {', '.join(others)} and {last}, got {given!r}")
            return UNREAD, UNREAD
        local, everywhere = (
            self.rope(given.get(kind), base, f"rope_parameters.{kind}")
            for kind, base in zip(_KINDS, bases, strict=True)
        )
        return local, everywhere

    def count(self, name: str, default: int, least: int = 0) -> int:
        """A whole number that `numbers` does not take, from `least` on."""
        value, most = self.fields.get(name, default), MOST.get(name, MOST_OTHERS)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.problems.append(f"{name}: expected an integer from {least} to {most:,}, got {value!r}")
            return default
        return value

    def number(self, name: str, default: float) -> float:
        """A number above 0 that `numbers` does not take."""
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
        """A bound of scores or logits; null where there is none."""
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

    def pattern(
        self, layers: int, default: Sequence[LayerKind], kinds: Mapping[str, LayerKind] = _KINDS
    ) -> tuple[LayerKind, ...]:
        """The period of the layers' kinds, from `layer_types`.

        Args:
            layers: how many there are.
            default: the period where the file does not say.
            kinds: those that there may be, under the Hub's names.

        Returns:
            `default`, where it gives the layers that the file says; else the shortest that does.
        """
        named = self.fields.get("layer_types")
        wanted = [default[layer % len(default)] for layer in range(layers)]
        if named is None:
            return tuple(default)
        if not isinstance(named, Sequence) or len(named) != layers or not set(named) <= set(kinds):
            *others, last = map(repr, kinds)
            self.problems.append(
                f"layer_types: expected {layers} layers of the kinds {', '.join(others)} and {last}, got {named!r}"
            )
            return tuple(default)
        found: list[LayerKind] = [kinds[name] for name in named]
        return tuple(default) if found == wanted else period_of(found)

    def feed_forward(self, pattern: Sequence[LayerKind], layers: int, experts: MoEConfig | None) -> dict[str, Any]:
        """Which layers have experts, from `mlp_only_layers` and `decoder_sparse_step`.

        As in transformers, layer i has experts if it is not in `mlp_only_layers` and i + 1 is a multiple of
        `decoder_sparse_step`.

        Args:
            pattern: the period of the layers' kinds.
            layers: how many there are.
            experts: of the layers that have them; None if no layer can have any.

        Returns:
            `pattern`, `experts`, `dense_layers` and `dense_pattern`. A decoder without a layer that has experts has no
            `experts`.
        """
        step, only = self.count("decoder_sparse_step", 1, least=1), self.fields.get("mlp_only_layers")
        only = [] if only is None else only
        if not isinstance(only, Sequence) or not all(type(layer) is int and 0 <= layer < layers for layer in only):
            self.problems.append(f"mlp_only_layers: expected a list of layers from 0 to {layers - 1}, got {only!r}")
            only = []
        dense = [layer in only or (layer + 1) % step != 0 for layer in range(layers)]
        if all(dense) or not any(dense) or experts is None:
            kept = None if all(dense) else experts
            return {"pattern": tuple(pattern), "moe": kept, "dense_layers": 0, "dense_pattern": ()}
        kinds: list[LayerKind] = [pattern[layer % len(pattern)] for layer in range(layers)]
        return {**dense_fields(kinds, dense), "moe": experts}

    def part(self, kind: Callable[..., PartT], **fields: Any) -> PartT | None:
        """A part of the decoder, such as its experts, of these numbers; None if there is a problem."""
        if self.problems:
            return None
        try:
            return kind(**fields)
        except ValueError as error:
            self.problems.append(str(error))
            return None

    def experts(self, **fields: Any) -> MoEConfig | None:
        """The experts of these numbers; None if there is a problem."""
        return self.part(MoEConfig, **fields)

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
            found = DecoderConfig(**fields)
            if found.moe is not None and found.num_layers * found.moe.num_experts > MOST_EXPERTS:
                each = f"{found.num_layers} layers of {found.moe.num_experts} experts"
                raise ValueError(f"{each} are more than {MOST_EXPERTS:,} experts in all")
            return found
        except ValueError as error:
            raise WeightsError(f"config.json is not a {self._title} that can be read: {error}") from None


def fill_heads(file: ConfigFile, numbers: dict[str, Any]) -> None:
    """Works out what a file may leave to others: as many key/value heads as queries', heads that share the width."""
    heads = numbers["num_attention_heads"]
    if numbers["num_key_value_heads"] is None:
        numbers["num_key_value_heads"] = heads
    if numbers["head_dim"] is None:
        numbers["head_dim"] = numbers["hidden_size"] // heads
    if numbers["head_dim"] < 1:
        file.problems.append(f"num_attention_heads: {heads} are more than hidden_size={numbers['hidden_size']}")
        numbers["head_dim"] = 1


def late_windows(file: ConfigFile, layers: int) -> dict[str, Any]:
    """`window` and `pattern` where `use_sliding_window` gives one to the layers from `max_window_layers` on."""
    window = file.window(4096) if file.flag("use_sliding_window", False) else None
    first = file.count("max_window_layers", 28)
    kinds: list[LayerKind] = ["global" if window is None or layer < first else "local" for layer in range(layers)]
    pattern = file.pattern(layers, period_of(kinds))
    return {"window": window if "local" in pattern else None, "pattern": pattern}


def by_head_dim(config: DecoderConfig) -> dict[str, object]:
    """What follows where scores are divided by the root of a head's width."""
    return {"query_scale": config.head_dim**-0.5}


def numbers_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The numbers that every family has, under the Hub's names."""
    return {theirs: getattr(config, ours) for theirs, ours in NUMBERS.items()}


def layer_types(config: DecoderConfig) -> list[str]:
    """The kind of every layer, under the Hub's names."""
    names = {ours: theirs for theirs, ours in (_KINDS | LINEAR_KINDS).items()}
    return [names[kind] for kind in config.layers]


def dense_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Which layers have experts: a step where the dense layers follow one, else a list of the dense layers."""
    dense = config.dense
    for step in range(1, config.num_layers + 1):
        if all(is_dense == ((layer + 1) % step != 0) for layer, is_dense in enumerate(dense)):
            return {"decoder_sparse_step": step, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, one in enumerate(dense) if one]}


def dense_as_read(config: DecoderConfig) -> dict[str, object]:
    """The fields that `ConfigFile.feed_forward` reads for these layers, where some have experts and some do not."""
    if all(config.dense) or not any(config.dense):
        return {"dense_layers": 0}
    return dense_fields(config.layers, config.dense)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """Rotary positions in the spelling that transformers 4 and 5 read."""
    scaling: dict[str, Any] | None = None
    match rope.scaling:
        case Llama3RopeScaling():
            numbers = {name: getattr(rope.scaling, name) for name in _LLAMA3}
            scaling = {"rope_type": "llama3", "factor": rope.factor, **numbers}
        case Yarn():
            numbers = {name: getattr(rope.scaling, name) for name in _YARN}
            tables = {"attention_factor": rope.scaling.attention_factor, "truncate": rope.scaling.truncate}
            scaling = {"rope_type": "yarn", "factor": rope.factor, **numbers, **tables}
        case None if rope.factor != 1.0:
            scaling = {"rope_type": "linear", "factor": rope.factor}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _amplitude(factor: float, given: float | None, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What sines and cosines are multiplied by under YaRN, as transformers works it out."""

    def by(part: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * part * math.log(factor) + 1.0

    if given is not None:
        return float(given)
    return by(mscale) / by(mscale_all_dim) if mscale and mscale_all_dim else by(1.0)


def _quantization_problem(given: Any) -> str | None:
    """Why what a `config.json` says of its weights' form cannot be read; None where it can."""
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method in ("mxfp4", "fp8"):
        return None
    return f"only quant_method 'mxfp4' and 'fp8' are read, got {method or given!r}; convert the weights to bfloat16"
