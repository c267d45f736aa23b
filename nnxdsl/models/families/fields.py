"""Groups of `config.json` fields that several families have, each read, written and compared; no family, no jax."""

# ruff: noqa: D102 - the methods are those of `Fields`

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, dense_fields, period_of
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import DynamicNTK, LongRope, Rope
from nnxdsl.models.families import hf_rope
from nnxdsl.models.families.hf_config import ConfigFile, layer_types


class Fields:
    """Some fields of `config.json`, and the fields of DecoderConfig that they decide.

    Attributes:
        names: the fields of `config.json` that are read, beside the family's `defaults`.
        decides: fields of DecoderConfig in which members of a family may differ.
    """

    names: ClassVar[tuple[str, ...]] = ()
    decides: ClassVar[tuple[str, ...]] = ()

    def reads(self) -> tuple[str, ...]:
        """`names`, and those that an object adds to them."""
        return self.names

    def decided(self) -> tuple[str, ...]:
        """`decides`, or those of them that an object decides."""
        return self.decides

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of DecoderConfig.

        Args:
            file: the file; notes the problems.
            decoder: the fields of DecoderConfig that are read already.
        """
        raise NotImplementedError

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Fields of `config.json`."""
        return {}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        """Fields of DecoderConfig that follow from its others in these families."""
        return {}


class Heads(Fields):
    """Heads of which a file may leave the number and the width to others; scores are divided by the width's root."""

    decides: ClassVar[tuple[str, ...]] = ("attention.query_scale",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        numbers = file.numbers
        heads = numbers["num_attention_heads"]
        if numbers["num_key_value_heads"] is None:
            numbers["num_key_value_heads"] = heads
        if numbers["head_dim"] is None:
            numbers["head_dim"] = numbers["hidden_size"] // heads
        if numbers["head_dim"] < 1:
            file.problems.append(f"num_attention_heads: {heads} are more than hidden_size={numbers['hidden_size']}")
            numbers["head_dim"] = 1
        return {"attention.query_scale": numbers["head_dim"] ** -0.5}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {"attention.query_scale": config.head_dim**-0.5}


class ScaledQueries(Fields):
    """`query_pre_attn_scalar`, by whose root scores are divided; it is among the family's `defaults`."""

    decides: ClassVar[tuple[str, ...]] = ("attention.query_scale",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention.query_scale": file.numbers["query_pre_attn_scalar"] ** -0.5}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"query_pre_attn_scalar": round(config.attention.query_scale**-2)}


@attrs.frozen(kw_only=True)
class SharedRope(Fields):
    """Rotary positions that all layers share, in both spellings.

    Attributes:
        theta: transformers' default.
        partial_rotary_factor: transformers' default; None where all of a head is rotated.
        ignored: entries of `rope_parameters` without effect on text.
        interleaved: whether pairs of neighbours are rotated.
        has_long: whether LongRoPE is read; in other families a decoder with it does not fit.
    """

    theta: float = 10_000.0
    partial_rotary_factor: float | None = None
    ignored: tuple[str, ...] = ()
    interleaved: bool = False
    has_long: bool = False
    names: ClassVar[tuple[str, ...]] = hf_rope.NAMES
    decides: ClassVar[tuple[str, ...]] = ("rope_global",)

    def reads(self) -> tuple[str, ...]:
        partial = () if self.partial_rotary_factor is None else ("partial_rotary_factor",)
        return (*self.names, *partial, *(("original_max_position_embeddings",) if self.has_long else ()))

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        rope = hf_rope.read_rope(file, self.theta, self.partial_rotary_factor, self.ignored, self.has_long)
        rope = attrs.evolve(rope, interleaved=True) if self.interleaved else rope
        return {"rope_global": rope, **_extended(rope)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        rope = config.rope_global
        partial = {} if self.partial_rotary_factor is None else {"partial_rotary_factor": rope.partial_rotary_factor}
        short: dict[str, Any] = {}
        if isinstance(rope.scaling, LongRope | DynamicNTK):
            is_long = isinstance(rope.scaling, LongRope)
            name = "original_max_position_embeddings" if is_long else "max_position_embeddings"
            short = {name: rope.scaling.original_max_position_embeddings}
        return partial | short | hf_rope.rope_to_hf(rope)

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        rope = attrs.evolve(config.rope_global, interleaved=self.interleaved)
        if isinstance(rope.scaling, LongRope) and not self.has_long:
            rope = attrs.evolve(rope, scaling=None)
        return {"rope_global": rope, **_extended(rope)}


def _extended(rope: Rope) -> dict[str, Any]:
    """The context length, where it is not the file's `max_position_embeddings` but follows from it."""
    if not isinstance(rope.scaling, DynamicNTK):
        return {}
    return {"max_length": math.ceil(rope.factor * rope.scaling.original_max_position_embeddings)}


@attrs.frozen(kw_only=True)
class TiedHead(Fields):
    """`tie_word_embeddings`, which differs between sizes.

    Attributes:
        default: transformers' default.
    """

    default: bool = False
    names: ClassVar[tuple[str, ...]] = ("tie_word_embeddings",)
    decides: ClassVar[tuple[str, ...]] = ("head.tied",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {"head.tied": file.flag("tie_word_embeddings", self.default)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"tie_word_embeddings": config.head.tied}


class PadToken(Fields):
    """`pad_token_id`, null where nothing else gives it: transformers' default may be beyond the vocabulary."""

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"pad_token_id": None}


@attrs.frozen(kw_only=True)
class SoftCaps(Fields):
    """Soft caps of attention scores and of logits.

    Attributes:
        scores: transformers' default.
        logits: transformers' default.
    """

    scores: float | None = None
    logits: float | None = None
    names: ClassVar[tuple[str, ...]] = ("attn_logit_softcapping", "final_logit_softcapping")
    decides: ClassVar[tuple[str, ...]] = ("attention.soft_cap", "head.soft_cap")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "attention.soft_cap": file.soft_cap("attn_logit_softcapping", self.scores),
            "head.soft_cap": file.soft_cap("final_logit_softcapping", self.logits),
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "attn_logit_softcapping": config.attention.soft_cap,
            "final_logit_softcapping": config.head.soft_cap,
        }


_PATTERN = ("window", "layers.pattern")


@attrs.frozen(kw_only=True)
class UniformWindow(Fields):
    """`sliding_window` of all layers, or of none where it is null.

    Attributes:
        default: transformers' default.
        is_switched: whether the window counts with `use_sliding_window` alone.
    """

    default: int | None
    is_switched: bool = False
    names: ClassVar[tuple[str, ...]] = ("sliding_window",)
    decides: ClassVar[tuple[str, ...]] = _PATTERN

    def reads(self) -> tuple[str, ...]:
        return (*self.names, "use_sliding_window") if self.is_switched else self.names

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        is_on = not self.is_switched or file.flag("use_sliding_window", False)
        window = file.window(self.default) if is_on else None
        return {"window": window, "layers.pattern": _uniform(window)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        switch = {"use_sliding_window": config.window is not None} if self.is_switched else {}
        return {**switch, "sliding_window": config.window}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {"layers.pattern": _uniform(config.window)}


def _uniform(window: int | None) -> tuple[LayerKind, ...]:
    return ("global",) if window is None else ("local",)


class LateWindows(Fields):
    """`use_sliding_window` gives a window to the layers from `max_window_layers` on; `layer_types` overrides that."""

    names: ClassVar[tuple[str, ...]] = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    decides: ClassVar[tuple[str, ...]] = _PATTERN

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers = range(file.numbers["num_hidden_layers"])
        window = file.window(4096) if file.flag("use_sliding_window", False) else None
        first = file.count("max_window_layers", 28)
        kinds: list[LayerKind] = ["global" if window is None or layer < first else "local" for layer in layers]
        pattern = file.pattern(period_of(kinds))
        return {"window": window if "local" in pattern else None, "layers.pattern": pattern}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
            "layer_types": layer_types(config),
        }


@attrs.frozen(kw_only=True)
class WindowPattern(Fields):
    """Layers with and without a window by turns; `sliding_window` is among the family's `defaults`.

    Attributes:
        pattern: the period where a file has no `layer_types`.
        default: transformers' window, which is written where no layer has one.
    """

    pattern: tuple[LayerKind, ...]
    default: int
    names: ClassVar[tuple[str, ...]] = ("layer_types",)
    decides: ClassVar[tuple[str, ...]] = _PATTERN

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {"window": file.numbers["sliding_window"], "layers.pattern": file.pattern(self.pattern)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"sliding_window": config.window or self.default, "layer_types": layer_types(config)}


@attrs.frozen(kw_only=True)
class MoE(Fields):
    """Experts of all layers.

    Attributes:
        count: the name of `num_experts` in `config.json`; it is among the family's `defaults`, as are the next two.
        width: the name of an expert's `mlp_dim`.
        others: the names of other numbers, and their fields of MoEConfig.
        norm_topk_prob: transformers' default of that field; None in families without it.
        constants: fields of MoEConfig that all members share.
    """

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    others: Mapping[str, str] = attrs.Factory(dict)
    norm_topk_prob: bool | None = None
    constants: Mapping[str, Any] = attrs.Factory(dict)
    names: ClassVar[tuple[str, ...]] = ("num_local_experts", "output_router_logits", "router_aux_loss_coef")
    decides: ClassVar[tuple[str, ...]] = ("feed_forward",)

    @property
    def numbers(self) -> dict[str, str]:
        """The names in `config.json`, and the fields of MoEConfig."""
        named = {self.count: "num_experts", "num_experts_per_tok": "num_experts_per_tok", self.width: "mlp_dim"}
        return {**named, **self.others}

    def reads(self) -> tuple[str, ...]:
        return self.names if self.norm_topk_prob is None else (*self.names, "norm_topk_prob")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {"feed_forward": file.part(MoEConfig, **self.values(file))}

    def values(self, file: ConfigFile) -> dict[str, Any]:
        """Fields of MoEConfig."""
        values = {ours: file.numbers[theirs] for theirs, ours in self.numbers.items()}
        if self.norm_topk_prob is not None:
            values["norm_topk_prob"] = file.flag("norm_topk_prob", self.norm_topk_prob)
        return {**values, **self.constants}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        if config.moe is None:
            return {}
        written = {theirs: getattr(config.moe, ours) for theirs, ours in self.numbers.items()}
        flag = {} if self.norm_topk_prob is None else {"norm_topk_prob": config.moe.norm_topk_prob}
        return written | flag

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe or MoEConfig(num_experts=8, num_experts_per_tok=2, mlp_dim=config.mlp.dim)
        values = {ours: getattr(moe, ours) for ours in self.numbers.values()}
        if self.norm_topk_prob is not None:
            values["norm_topk_prob"] = moe.norm_topk_prob
        if self.width == "intermediate_size":
            values["mlp_dim"] = config.mlp.dim
        if self.constants.get("shared_expert_gate"):
            values["shared_expert_dim"] = moe.shared_expert_dim or moe.mlp_dim
        return {"feed_forward": MoEConfig(**{**values, **self.constants})}


def with_num_experts(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields with the number of experts under transformers 4's name; transformers 5 may write `num_local_experts`."""
    return {"num_experts": fields["num_local_experts"], **fields} if "num_local_experts" in fields else fields


class DenseLayers(Fields):
    """Layers without experts among layers with: `mlp_only_layers` and `decoder_sparse_step`.

    As in transformers, layer i has experts if it is not in `mlp_only_layers` and i + 1 is a multiple of
    `decoder_sparse_step`. A decoder without a layer that has experts has no `feed_forward`.
    """

    names: ClassVar[tuple[str, ...]] = ("decoder_sparse_step", "mlp_only_layers")
    decides: ClassVar[tuple[str, ...]] = ("layers.pattern", "layers.dense_layers", "layers.dense_pattern")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers, pattern, moe = file.numbers["num_hidden_layers"], decoder["layers.pattern"], decoder["feed_forward"]
        step, listed = file.count("decoder_sparse_step", 1, least=1), file.fields.get("mlp_only_layers")
        listed = [] if listed is None else listed
        if not isinstance(listed, Sequence) or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
            file.problems.append(f"mlp_only_layers: expected a list of layers from 0 to {layers - 1}, got {listed!r}")
            listed = []
        dense = [layer in listed or (layer + 1) % step != 0 for layer in range(layers)]
        if all(dense) or not any(dense) or moe is None:
            return {"feed_forward": None if all(dense) else moe}
        kinds: list[LayerKind] = [pattern[layer % len(pattern)] for layer in range(layers)]
        return dense_fields(kinds, dense)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        dense = config.dense  # as a step where the dense layers follow one, else as a list
        for step in range(1, config.layers.num_layers + 1):
            if all(is_dense == ((layer + 1) % step != 0) for layer, is_dense in enumerate(dense)):
                return {"decoder_sparse_step": step, "mlp_only_layers": []}
        return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, one in enumerate(dense) if one]}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        if all(config.dense) or not any(config.dense):
            return {"layers.dense_layers": 0, "layers.dense_pattern": ()}
        return dense_fields(config.layers.kinds, config.dense)
