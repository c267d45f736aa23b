"""Llama 4: spec, the published sizes (Meta, 2025), the spellings of `config.json` and tensor names; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.attention import QueryTemperature
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, dense_fields, period_of
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Llama3RopeScaling, Rope
from nnxdsl.models.config.tensors import TensorSource, joined
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Llama4(Model):
    """Llama 4, text only (Meta, 2025): chunked attention, every fourth layer without rotary positions, one expert each.

    In every fourth layer queries have a factor that grows with their position. The sigmoid score of the expert scales
    its input; a shared expert is beside it.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.2 million parameters, for a laptop.
    """

    size: Literal["tiny", "scout-17b-16e", "maverick-17b-128e"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_CHOICES: dict[str, Any] = {"window_kind": "chunks"}
_EXPERTS: dict[str, Any] = {"scoring": "sigmoid", "norm_topk_prob": False, "scales_input": True}
_PATTERN: tuple[LayerKind, ...] = ("local", "local", "local", "nope")


def _size(*, experts: int, expert_mlp: int, qk_norm: bool, temperature: int = 8192, **numbers: Any) -> DecoderConfig:
    moe = MoEConfig(num_experts=experts, num_experts_per_tok=1, mlp_dim=expert_mlp, shared_expert_dim=expert_mlp,
                    **_EXPERTS)  # fmt: skip
    return decoder(
        pattern=_PATTERN,
        **{
            "attention.query_key_norm": "rotated" if qk_norm else "none",
            "attention.query_temperature": QueryTemperature(beta=0.1, length=temperature, offset=1, layers="nope"),
        },
        feed_forward=moe,
        norm_eps=1e-5,
        tied_head=False,
        **{**_CHOICES, **numbers},
    )


_LARGE: dict[str, Any] = {
    "layers": 48,
    "embed": 5120,
    "mlp": 16_384,
    "expert_mlp": 8192,
    "heads": 40,
    "kv_heads": 8,
    "head_dim": 128,
    "window": 8192,
    "vocab": 202_048,
}
_PLAIN = Rope(theta=500_000.0, interleaved=True)
_SCALING = Llama3RopeScaling(low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192)
_DENSE = (True, False, True, False)

# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
LLAMA4 = {
    "tiny": _size(layers=4, embed=128, mlp=256, expert_mlp=128, heads=4, kv_heads=2, head_dim=32, experts=4, window=64,
                  vocab=320, length=1024, qk_norm=True, temperature=256, rope=_PLAIN),
    "scout-17b-16e": _size(experts=16, length=10_485_760, qk_norm=True,
                           rope=attrs.evolve(_PLAIN, factor=16.0, scaling=_SCALING), **_LARGE),
    "maverick-17b-128e": _size(experts=128, length=1_048_576, qk_norm=False, dense_pattern=_DENSE, rope=_PLAIN,
                               **_LARGE),
}  # fmt: skip

_TYPES = {"chunked_attention": True, "full_attention": False}


class _Layers(Fields):
    """Kinds of layers: `no_rope_layers`, a 0 for each without rotary positions, and `layer_types`."""

    names: ClassVar[tuple[str, ...]] = (
        *("no_rope_layers", "no_rope_layer_interval", "layer_types"),
        *("attention_chunk_size", "use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale"),
    )
    decides: ClassVar[tuple[str, ...]] = (
        *("layers.pattern", "window"),
        *("attention.query_key_norm", "attention.query_temperature"),
    )

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        tuning = file.fields.get("attn_temperature_tuning", True)  # published files have the number 4, too
        beta, length = file.number("attn_scale", 0.1), file.number("floor_scale", 8192)
        if length != int(length):
            file.problems.append(f"floor_scale: expected a whole number, got {length!r}")
        temperature = QueryTemperature(beta=beta, length=max(int(length), 1), offset=1, layers="nope")
        return {
            "layers.pattern": period_of(self._kinds(file)),
            "window": file.count("attention_chunk_size", 8192, least=1),
            "attention.query_key_norm": "rotated" if file.flag("use_qk_norm", True) else "none",
            "attention.query_temperature": temperature if tuning else None,
        }

    @staticmethod
    def _kinds(file: ConfigFile) -> list[LayerKind]:
        layers, flags = file.numbers["num_hidden_layers"], file.fields.get("no_rope_layers")
        interval = file.count("no_rope_layer_interval", 4, least=1)
        if not flags:  # published files have an empty list
            flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
        types = file.fields.get("layer_types")
        if not isinstance(flags, Sequence) or len(flags) < layers or any(one not in (0, 1) for one in flags):
            file.problems.append(f"no_rope_layers: expected 0 or 1 for each of {layers} layers, got {flags!r}")
            return ["nope"]
        if types is None:
            types = ["chunked_attention" if flag else "full_attention" for flag in flags]
        if not isinstance(types, Sequence) or len(types) < layers or any(one not in tuple(_TYPES) for one in types):
            file.problems.append(f"layer_types: expected {layers} of {list(_TYPES)}, got {types!r}")
            return ["nope"]
        kinds: list[LayerKind] = []
        for layer, (flag, kind) in enumerate(zip(flags[:layers], types, strict=False)):
            if _TYPES[kind] and not flag:
                file.problems.append(f"layer_types: layer {layer} has chunks, but no rotary positions")
            kinds.append("nope" if not flag else "local" if _TYPES[kind] else "global")
        return kinds

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        kinds, temperature = config.layers.kinds, config.attention.query_temperature
        return {
            "no_rope_layers": [int(kind != "nope") for kind in kinds],
            "layer_types": ["chunked_attention" if kind == "local" else "full_attention" for kind in kinds],
            "attention_chunk_size": config.window or 8192,
            "use_qk_norm": config.attention.query_key_norm == "rotated",
            "attn_temperature_tuning": temperature is not None,
            "floor_scale": 8192 if temperature is None else temperature.length,
            "attn_scale": 0.1 if temperature is None else temperature.beta,
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        norm, temperature = config.attention.query_key_norm, config.attention.query_temperature
        expected: dict[str, Any] = {"attention.query_key_norm": "none" if norm == "none" else "rotated"}
        if temperature is not None:
            expected["attention.query_temperature"] = attrs.evolve(temperature, offset=1, layers="nope")
        if "linear" in config.layers.pattern:
            expected["layers.pattern"] = _PATTERN
        return expected


class _Experts(Fields):
    """Experts and layers without: `moe_layers`, or every `interleave_moe_layer_step`th layer; two widths of MLPs."""

    names: ClassVar[tuple[str, ...]] = (
        *("moe_layers", "interleave_moe_layer_step"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    )
    decides: ClassVar[tuple[str, ...]] = ("feed_forward", "layers.dense_layers", "layers.dense_pattern")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        numbers, layers = file.numbers, file.numbers["num_hidden_layers"]
        step, listed = file.count("interleave_moe_layer_step", 1, least=1), file.fields.get("moe_layers")
        listed = list(range(step - 1, layers, step)) if listed is None else listed
        if not isinstance(listed, Sequence) or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
            file.problems.append(f"moe_layers: expected a list of layers from 0 to {layers - 1}, got {listed!r}")
        elif not listed:
            file.problems.append("moe_layers: expected at least one layer with experts")
        if file.problems:
            return {}
        width = numbers["intermediate_size"]
        experts = file.part(MoEConfig, num_experts=numbers["num_local_experts"], mlp_dim=width, shared_expert_dim=width,
                            num_experts_per_tok=numbers["num_experts_per_tok"], **_EXPERTS)  # fmt: skip
        pattern = decoder["layers.pattern"]
        kinds: list[LayerKind] = [pattern[layer % len(pattern)] for layer in range(layers)]
        dense = [layer not in listed for layer in range(layers)]
        split = dense_fields(kinds, dense) if any(dense) else {}
        return {"feed_forward": experts, "mlp.dim": numbers["intermediate_size_mlp"], **split}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe
        assert moe is not None  # or the decoder is refused
        return {
            "intermediate_size": moe.mlp_dim,
            "intermediate_size_mlp": config.mlp.dim,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_tok,
            "moe_layers": [layer for layer, is_dense in enumerate(config.dense) if not is_dense],
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe or MoEConfig(num_experts=16, num_experts_per_tok=1, mlp_dim=config.mlp.dim)
        numbers = {"num_experts": moe.num_experts, "num_experts_per_tok": moe.num_experts_per_tok}
        width = {"mlp_dim": moe.mlp_dim, "shared_expert_dim": moe.mlp_dim}
        return {"feed_forward": MoEConfig(**numbers, **width, **_EXPERTS)}


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    """A layer's tensors: another name of the MLP; all experts in one tensor, `[experts, in, out]`, gate before up."""

    def named(name: str) -> str:
        return name.replace("mlp.shared_experts.", "feed_forward.shared_expert.").replace("mlp.", "feed_forward.")

    renamed = {path: attrs.evolve(one, names=tuple(map(named, one.names))) for path, one in tensors.items()}
    if "mlp.router.weight" in renamed:
        assert config.moe is not None  # it is theirs
        width, experts = config.moe.mlp_dim, "feed_forward.experts"
        renamed["mlp.router.weight"] = TensorSource(("feed_forward.router.weight",))
        renamed |= joined(
            f"{experts}.gate_up_proj", {"mlp.gate.kernel": width, "mlp.up.kernel": width}, transposed=False
        )
        renamed["mlp.down.kernel"] = TensorSource((f"{experts}.down_proj",))
    return renamed


FAMILY = register(
    Family(
        title="Llama 4",
        spec=Llama4,
        sizes=LLAMA4,
        architecture="Llama4ForCausalLM",
        model_types=("llama4_text",),
        wrappers=("llama4",),
        choices=_CHOICES,
        defaults=transformers_defaults(layers=48, embed=5120, mlp=8192, heads=40, kv_heads=8, head_dim=128,
                                       vocab=202_048, length=131_072, norm_eps=1e-5, intermediate_size_mlp=16_384,
                                       num_local_experts=16, num_experts_per_tok=1),
        fixed={"attention_dropout": 0.0},
        ignored=("for_llm_compressor",),
        fields=(Heads(), _Layers(), _Experts(), SharedRope(theta=500_000.0, interleaved=True), TiedHead()),
        layer_tensors=_tensors,
    )
)  # fmt: skip
