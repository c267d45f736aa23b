"""Gemma 4: spec, the published sizes (Gemma Team, 2026) and the spellings of `config.json`; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, local_then_global, period_of
from nnxdsl.models.config.moe import DenseBesideExperts, MoEConfig
from nnxdsl.models.config.parts import GlobalHeads, PerLayerEmbedding
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, SoftCaps
from nnxdsl.models.families.gemma import CHOICES
from nnxdsl.models.families.hf_config import ConfigFile, layer_types
from nnxdsl.models.families.hf_rope import read_ropes, rope_to_hf
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Gemma4(Model):
    """Gemma 4, text only (Gemma Team, 2026): global layers with wider heads; 26b-a4b has experts beside an MLP.

    In e2b and e4b each layer has embeddings of its own, and the last layers share the keys and values of earlier ones.

    Global layers have proportional RoPE, and their values are the keys' projections.

    Attributes:
        size: Published size, or for a laptop "tiny" (6 layers, 1.2 million parameters) and "tiny-e" (as e2b: 8 layers,
            1.8 million parameters).
    """

    size: Literal["tiny", "tiny-e", "e2b", "e4b", "12b", "26b-a4b", "31b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_CHOICES: dict[str, Any] = {
    **CHOICES,
    "norm.placement": "sandwich",
    "norm.scale": "wide",
    "attention.query_key_norm": "head",
    "attention.value_norm": True,
    "layer_scalar": True,
}
_EXPERTS: dict[str, Any] = {"router_norm": True, "per_expert_scale": True}
_LOCAL = Rope(theta=10_000.0)
_GLOBAL = Rope(theta=1e6, partial_rotary_factor=0.25, partial="proportional")
_size = partial(decoder, scalar=1, pattern=local_then_global(6), rope_local=_LOCAL, rope=_GLOBAL, **_CHOICES,
                **{"head.soft_cap": 30.0})  # fmt: skip
_large = partial(_size, head_dim=256, window=1024, vocab=262_144, length=262_144)
_edge = partial(_size, heads=8, head_dim=256, window=512, vocab=262_144, length=131_072,
                per_layer_embedding=PerLayerEmbedding(vocab_size=262_144, dim=256))  # fmt: skip

# The text decoders as their published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GEMMA4 = {
    "tiny": _size(layers=6, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, window=64, vocab=320, length=1024,
                  global_heads=GlobalHeads(head_dim=64, num_kv_heads=1, values="keys")),
    "tiny-e": _size(layers=8, embed=128, mlp=256, heads=4, kv_heads=1, head_dim=32, window=64, vocab=320, length=1024,
                    pattern=local_then_global(2), global_heads=GlobalHeads(head_dim=64, num_kv_heads=1),
                    num_kv_shared_layers=4, kv_shared_mlp=512,
                    per_layer_embedding=PerLayerEmbedding(vocab_size=320, dim=16)),
    "e2b": _edge(layers=35, embed=1536, mlp=6144, kv_heads=1, pattern=local_then_global(5),
                 global_heads=GlobalHeads(head_dim=512, num_kv_heads=1),
                 num_kv_shared_layers=20, kv_shared_mlp=12_288),
    "e4b": _edge(layers=42, embed=2560, mlp=10_240, kv_heads=2,
                 global_heads=GlobalHeads(head_dim=512, num_kv_heads=2),
                 num_kv_shared_layers=18, kv_shared_mlp=10_240),
    "12b": _large(layers=48, embed=3840, mlp=15_360, heads=16, kv_heads=8,
                  global_heads=GlobalHeads(head_dim=512, num_kv_heads=1, values="keys")),
    "26b-a4b": _large(layers=30, embed=2816, mlp=2112, heads=16, kv_heads=8,
                      global_heads=GlobalHeads(head_dim=512, num_kv_heads=2, values="keys"),
                      feed_forward=DenseBesideExperts(experts=MoEConfig(num_experts=128, num_experts_per_tok=8,
                                                                        mlp_dim=704, **_EXPERTS))),
    "31b": _large(layers=60, embed=5376, mlp=21_504, heads=32, kv_heads=16,
                  global_heads=GlobalHeads(head_dim=512, num_kv_heads=4, values="keys")),
}  # fmt: skip


class _Windows(Fields):
    """Layers with a window among global ones; the last is always global, as in transformers."""

    names: ClassVar[tuple[str, ...]] = ("layer_types",)
    decides: ClassVar[tuple[str, ...]] = ("window", "layers.pattern")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers, pattern = file.numbers["num_hidden_layers"], file.pattern(local_then_global(6))
        kinds: list[LayerKind] = [pattern[layer % len(pattern)] for layer in range(layers)]
        if kinds[-1] != "global":
            kinds[-1] = "global"
            pattern = period_of(kinds)
        return {"window": file.numbers["sliding_window"], "layers.pattern": pattern}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"sliding_window": config.window or 512, "layer_types": layer_types(config)}


class _Heads(Fields):
    """Heads of the global layers, in the published spelling or in that of transformers; scores are not scaled."""

    names: ClassVar[tuple[str, ...]] = (
        *("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads"),
        *("per_layer_config", "use_bidirectional_attention"),
    )
    decides: ClassVar[tuple[str, ...]] = ("global_heads", "attention.query_scale")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        if file.fields.get("use_bidirectional_attention") not in (None, "vision"):  # which leaves text causal
            file.problems.append("use_bidirectional_attention: only null and 'vision' are implemented")
        same = file.flag("attention_k_eq_v", False)
        default = file.numbers["num_key_value_heads"]
        heads: Mapping[str, Any] = {"head_dim": file.count("global_head_dim", 512, least=2)}
        if same and file.fields.get("num_global_key_value_heads") is not None:
            heads = {**heads, "num_key_value_heads": file.count("num_global_key_value_heads", default, least=1)}
        if file.fields.get("per_layer_config") is not None:
            heads = self._by_layer(file, decoder["layers.pattern"])
        values = {
            "head_dim": heads.get("head_dim", file.numbers["head_dim"]),
            "values": "keys" if same else "projected",
        }
        values["num_kv_heads"] = heads.get("num_key_value_heads", default)
        return {"global_heads": file.part(GlobalHeads, **values), "attention.query_scale": 1.0}

    @staticmethod
    def _by_layer(file: ConfigFile, pattern: tuple[LayerKind, ...]) -> Mapping[str, Any]:
        overrides, layers = file.fields["per_layer_config"], range(file.numbers["num_hidden_layers"])
        wanted = {str(layer) for layer in layers if pattern[layer % len(pattern)] == "global"}
        entries = list(overrides.values()) if isinstance(overrides, Mapping) else []
        # Of ten layers and more, transformers writes "02".
        named = {str(layer).lstrip("0") or "0" for layer in overrides} if isinstance(overrides, Mapping) else None
        if named != wanted or any(entry != entries[0] or not isinstance(entry, Mapping) for entry in entries):
            file.problems.append(f"per_layer_config: expected one entry for all global layers, got {overrides!r}")
            return {}
        if not set(entries[0]) <= {"head_dim", "num_key_value_heads"}:
            file.problems.append(f"per_layer_config: expected head_dim and num_key_value_heads, got {entries[0]!r}")
        return entries[0]

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        heads = config.global_heads
        assert heads is not None  # or the decoder is refused
        return {
            "attention_k_eq_v": heads.values == "keys",
            "global_head_dim": heads.head_dim,
            "num_global_key_value_heads": heads.num_kv_heads if heads.values == "keys" else None,
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        heads = config.global_heads or GlobalHeads(head_dim=config.head_dim, num_kv_heads=config.num_kv_heads)
        if heads.values == "projected":
            heads = attrs.evolve(heads, num_kv_heads=config.num_kv_heads)
        return {"global_heads": heads, "attention.query_scale": 1.0}


class _Ropes(Fields):
    """Rotary positions of local and global layers."""

    names: ClassVar[tuple[str, ...]] = ("rope_parameters",)
    decides: ClassVar[tuple[str, ...]] = ("rope_global", "rope_local")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        if file.fields.get("rope_parameters") is None:
            return {"rope_local": _LOCAL, "rope_global": _GLOBAL}
        local, everywhere = read_ropes(file, (_LOCAL.theta, _GLOBAL.theta))
        return {"rope_local": local, "rope_global": everywhere}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        ropes = {"sliding_attention": config.rope_local or config.rope_global, "full_attention": config.rope_global}
        written = {kind: rope_to_hf(rope) for kind, rope in ropes.items()}
        return {
            "rope_parameters": {
                kind: {"rope_type": "default", **(rope["rope_scaling"] or {}), "rope_theta": rope["rope_theta"]}
                for kind, rope in written.items()
            }
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {"rope_local": config.rope_local or config.rope_global}


_NUMBERS = {"num_experts": "num_experts", "top_k_experts": "num_experts_per_tok", "moe_intermediate_size": "mlp_dim"}


class _Experts(Fields):
    """Experts beside the MLP, where `enable_moe_block` says so."""

    names: ClassVar[tuple[str, ...]] = ("enable_moe_block",)
    decides: ClassVar[tuple[str, ...]] = ("feed_forward",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        if not file.flag("enable_moe_block", False):
            return {"feed_forward": None}
        missing = [name for name in _NUMBERS if file.numbers[name] is None]
        file.problems += [f"{name}: expected an integer above 0, as enable_moe_block is true" for name in missing]
        experts = file.part(MoEConfig, **{ours: file.numbers[theirs] for theirs, ours in _NUMBERS.items()}, **_EXPERTS)
        return {"feed_forward": None if experts is None else DenseBesideExperts(experts=experts)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        moe = config.moe
        numbers = {theirs: None if moe is None else getattr(moe, ours) for theirs, ours in _NUMBERS.items()}
        return {"enable_moe_block": moe is not None, **numbers}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        if config.moe is None:
            return {"feed_forward": None}
        experts = MoEConfig(**{ours: getattr(config.moe, ours) for ours in _NUMBERS.values()}, **_EXPERTS)
        return {"feed_forward": DenseBesideExperts(experts=experts)}


class _EdgeSizes(Fields):
    """Embeddings of each layer, and last layers without keys and values of their own (E2B and E4B)."""

    names: ClassVar[tuple[str, ...]] = (
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        *("num_kv_shared_layers", "use_double_wide_mlp"),
    )
    decides: ClassVar[tuple[str, ...]] = ("layers.num_kv_shared_layers", "mlp.kv_shared_dim", "per_layer_embedding")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        dim = file.count("hidden_size_per_layer_input", 256)
        vocab_size = file.count("vocab_size_per_layer_input", 262_144, least=1)
        layers = file.count("num_kv_shared_layers", 0)
        width = file.numbers["intermediate_size"] * (2 if file.flag("use_double_wide_mlp", False) else 1)
        embedding = file.part(PerLayerEmbedding, vocab_size=vocab_size, dim=dim) if dim else None
        return {
            "per_layer_embedding": embedding,
            "layers.num_kv_shared_layers": layers,
            "mlp.kv_shared_dim": width if layers else None,
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        embedding, mlp = config.per_layer_embedding, config.mlp
        return {
            "hidden_size_per_layer_input": 0 if embedding is None else embedding.dim,
            "vocab_size_per_layer_input": config.vocab_size if embedding is None else embedding.vocab_size,
            "num_kv_shared_layers": config.layers.num_kv_shared_layers,
            "use_double_wide_mlp": mlp.kv_shared_dim not in (None, mlp.dim),
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        mlp = config.mlp
        if not config.layers.num_kv_shared_layers:
            return {"mlp.kv_shared_dim": None}
        return {"mlp.kv_shared_dim": mlp.dim if mlp.kv_shared_dim == mlp.dim else 2 * mlp.dim}


def _prepared(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with what transformers takes where a file leaves them out."""
    if fields["model_type"] == "gemma4_unified_text":
        others = {"sliding_window": 1024, "max_position_embeddings": 262_144, "hidden_size_per_layer_input": 0}
        return {**others, **fields}
    return fields


FAMILY = register(
    Family(
        title="Gemma 4",
        spec=Gemma4,
        sizes=GEMMA4,
        architecture="Gemma4ForCausalLM",
        model_types=("gemma4_text", "gemma4_unified_text"),
        wrappers=("gemma4", "gemma4_unified"),
        choices=_CHOICES,
        defaults=transformers_defaults(layers=30, embed=2304, mlp=9216, heads=8, kv_heads=4, head_dim=256,
                                       vocab=262_144, length=131_072, sliding_window=512, num_experts=None,
                                       top_k_experts=None, moe_intermediate_size=None),
        fixed={
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
        },
        layers=LayerFields(activation=("hidden_activation",)),
        fields=(_Windows(), _Heads(), _Ropes(), SoftCaps(), _Experts(), _EdgeSizes()),
        prepare=_prepared,
    )
)  # fmt: skip
