"""GPT-OSS: spec, the published sizes (OpenAI 2025, arXiv:2508.10925), `config.json` and tensor names; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope, Yarn
from nnxdsl.models.config.tensors import TensorSource
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, MoE, SharedRope, TiedHead, WindowPattern
from nnxdsl.models.families.hf_config import ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class GPTOSS(Model):
    """GPT-OSS (OpenAI 2025, arXiv:2508.10925): experts with biases, attention sinks, every second layer with a window.

    Attention has biases, and the experts' gate is clamped.

    Attributes:
        size: Published size, or "tiny": 4 layers, 1.1 million parameters, for a laptop.
    """

    size: Literal["tiny", "20b", "120b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_CHOICES: dict[str, Any] = {"attention.sinks": True, "attention.bias": "all"}
_EXPERTS: dict[str, Any] = {
    "scoring": "softmax_of_chosen",
    "router_bias": True,
    "expert_bias": True,
}
_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Of the activation of experts; transformers' defaults."""
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ATTENTION_FACTOR = 1.3465735902799727  # 0.1 ln 32 + 1
# The experts of a layer are in one tensor, [experts, in, out] as ours, gate and up column by column.
_TENSORS = {
    "mlp.router.weight": TensorSource(("mlp.router.weight",)),
    "mlp.router.bias": TensorSource(("mlp.router.bias",)),
    "mlp.gate.kernel": TensorSource(("mlp.experts.gate_up_proj",), share=(0, 2)),
    "mlp.up.kernel": TensorSource(("mlp.experts.gate_up_proj",), share=(1, 2)),
    "mlp.down.kernel": TensorSource(("mlp.experts.down_proj",)),
    "mlp.gate.bias": TensorSource(("mlp.experts.gate_up_proj_bias",), share=(0, 2)),
    "mlp.up.bias": TensorSource(("mlp.experts.gate_up_proj_bias",), share=(1, 2)),
    "mlp.down.bias": TensorSource(("mlp.experts.down_proj_bias",)),
}


def _size(*, experts: int, per_tok: int = 4, mlp: int = 2880, original: int = 4096, **numbers: Any) -> DecoderConfig:
    scaling = Yarn(original_max_position_embeddings=original, attention_factor=_ATTENTION_FACTOR, truncate=False)
    common: dict[str, Any] = {
        "embed": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "vocab": 201_088, "length": 131_072,
    }  # fmt: skip
    return decoder(
        mlp=mlp,
        feed_forward=MoEConfig(
            num_experts=experts, num_experts_per_tok=per_tok, mlp_dim=mlp, swiglu_limit=7.0, **_EXPERTS
        ),
        pattern=("local", "global"),
        rope=Rope(theta=150_000.0, factor=32.0, scaling=scaling),
        norm_eps=1e-5,
        tied_head=False,
        **{**_CHOICES, **common, **numbers},
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
GPT_OSS = {
    "tiny": _size(layers=4, embed=128, mlp=128, heads=4, kv_heads=2, head_dim=32, experts=4, per_tok=2, window=64,
                  original=64, vocab=320, length=1024),
    "20b": _size(layers=24, experts=32),
    "120b": _size(layers=36, experts=128),
}  # fmt: skip


class _Experts(MoE):
    """Experts, and the numbers of their activation."""

    names: ClassVar[tuple[str, ...]] = (*MoE.names, *_SWIGLU)

    def values(self, file: ConfigFile) -> dict[str, Any]:
        return super().values(file) | {name: file.number(name, default) for name, default in _SWIGLU.items()}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return super().write(config) | {name: getattr(config.moe, name) for name in _SWIGLU}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        moe, expected = config.moe, super().expected(config)["feed_forward"]
        numbers = {name: (moe and getattr(moe, name)) or default for name, default in _SWIGLU.items()}
        return {"feed_forward": attrs.evolve(expected, **numbers)}


def _with_rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with transformers' default of RoPE, which is scaled."""
    if fields.get("rope_parameters") is None and fields.get("rope_scaling") is None:
        return {**fields, "rope_scaling": _YARN}
    return fields


_DEFAULTS = transformers_defaults(layers=36, embed=2880, mlp=2880, heads=64, kv_heads=8, head_dim=64, vocab=201_088,
                                  length=131_072, norm_eps=1e-5, sliding_window=128, num_local_experts=128,
                                  num_experts_per_tok=4)  # fmt: skip

FAMILY = register(
    Family(
        title="GPT-OSS",
        spec=GPTOSS,
        sizes=GPT_OSS,
        architecture="GptOssForCausalLM",
        classifier="GptOssForSequenceClassification",
        model_types=("gpt_oss",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        fixed={
            "attention_dropout": 0.0,
        },
        ignored=("experts_per_token", "initial_context_length", "hidden_act"),  # second names; not read by transformers
        layers=LayerFields(activation=()),
        fields=(
            Heads(),
            _Experts(
                count="num_local_experts",
                width="intermediate_size",
                constants=_EXPERTS,
            ),
            WindowPattern(pattern=("local", "global"), default=128),
            SharedRope(theta=150_000.0),
            TiedHead(),
        ),
        prepare=_with_rope,
        layer_tensors=lambda _, tensors: tensors | _TENSORS,
    )
)
