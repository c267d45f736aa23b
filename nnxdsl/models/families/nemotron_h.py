"""Nemotron-H and Nemotron 3: spec, published sizes (NVIDIA, arXiv:2504.03624, arXiv:2512.20848), names; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, dense_fields, with_tail
from nnxdsl.models.config.mamba2 import Mamba2Config
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.deepseek_v3 import SCORING
from nnxdsl.models.families.family import Family, Tensors, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, MoE, PadToken
from nnxdsl.models.families.hf_config import MOST, ConfigFile
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class NemotronH(Model):
    """Nemotron-H and Nemotron 3 (NVIDIA, arXiv:2504.03624, arXiv:2512.20848): layers of Mamba-2, attention or MLPs.

    A layer is one of these. Attention has no rotary positions; MLPs have squared ReLU. Nemotron 3 has experts of them,
    with sigmoid scores, a bias correction and a shared expert, in Super between projections of the tokens (LatentMoE).

    Attributes:
        size: Published size, or "tiny": 10 layers, 0.9 million parameters, for a laptop.
    """

    size: Literal["tiny", "h-8b", "nano-9b-v2", "3-nano-30b-a3b", "3-super-120b-a12b"] = attrs.field(kw_only=False)
    router_aux_loss_coef: float = attrs.field(default=0.0, validator=Limit(at_least=0))


_ROPE = Rope(theta=10_000.0)
"""Of no layer."""
_CHOICES: dict[str, Any] = {
    "layers.sublayers": "one",
    "norm.scale": "wide",
    "mlp.activation": "relu2",
    "mlp.gate": False,
    "rope_global": _ROPE,
    "head.tied": False,
}
_NO_LIMIT = (0.0, math.inf)
_KINDS: dict[str, LayerKind] = {"M": "linear", "*": "nope", "E": "none", "-": "none"}
_TYPES = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-", "mamba": "M", "attention": "*"}
"""The letters of kinds of layers; the last two are earlier spellings."""


def _layers(pattern: str) -> dict[str, Any]:
    """Fields of DecoderConfig from the letters of the layers: M Mamba-2, * attention, E experts, - an MLP."""
    kinds: list[LayerKind] = [_KINDS[letter] for letter in pattern]
    dense = [letter == "-" for letter in pattern]
    if "E" in pattern and any(dense):
        return {"layers.tail_pattern": (), **dense_fields(kinds, dense)}
    period, tail = with_tail(kinds)
    others = {"layers.dense_layers": 0, "layers.dense_pattern": ()}
    return {"layers.pattern": period, "layers.tail_pattern": tail, **others}


def _letters(config: DecoderConfig) -> str:
    """The letter of each layer; those of kinds that this family does not have count as attention."""
    letters = {"linear": "M", "none": "E"}
    layers = zip(config.layers.kinds, config.dense, strict=True)
    return "".join("-" if kind == "none" and is_dense else letters.get(kind, "*") for kind, is_dense in layers)


def _size(*, pattern: str, mamba: Mamba2Config, moe: MoEConfig | None = None, **numbers: Any) -> DecoderConfig:
    """A size, of a letter for each layer."""
    common = {name: value for name, value in _CHOICES.items() if name != "rope_global"}
    return decoder(
        layers=len(pattern),
        **_layers(pattern),
        linear_attention=mamba,
        feed_forward=moe,
        rope=_ROPE,
        norm_eps=1e-5,
        **common,
        **numbers,
    )


# As the published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
NEMOTRON_H = {
    "tiny": _size(
        pattern="MEM*EMEM*E",
        embed=128,
        mlp=256,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mamba=Mamba2Config(num_heads=8, head_dim=16, state_size=16, n_groups=2),
        moe=MoEConfig(num_experts=8, num_experts_per_tok=2, mlp_dim=64, shared_expert_dim=128, **SCORING),
        vocab=320,
        length=1024,
    ),
    "h-8b": _size(
        pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        embed=4096,
        mlp=21_504,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mamba=Mamba2Config(num_heads=128, head_dim=64, state_size=128, n_groups=8),
        vocab=131_072,
        length=8192,
    ),
    "nano-9b-v2": _size(
        pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        embed=4480,
        mlp=15_680,
        heads=40,
        kv_heads=8,
        head_dim=128,
        mamba=Mamba2Config(num_heads=128, head_dim=80, state_size=128, n_groups=8),
        vocab=131_072,
        length=131_072,
    ),
    "3-nano-30b-a3b": _size(
        pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        embed=2688,
        mlp=1856,
        heads=32,
        kv_heads=2,
        head_dim=128,
        mamba=Mamba2Config(num_heads=64, head_dim=64, state_size=128, n_groups=8),
        moe=MoEConfig(
            num_experts=128,
            num_experts_per_tok=6,
            mlp_dim=1856,
            shared_expert_dim=3712,
            routed_scaling_factor=2.5,
            **SCORING,
        ),
        vocab=131_072,
        length=262_144,
    ),
    "3-super-120b-a12b": _size(
        pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        embed=4096,
        mlp=2688,
        heads=32,
        kv_heads=2,
        head_dim=128,
        mamba=Mamba2Config(num_heads=128, head_dim=64, state_size=128, n_groups=8),
        moe=MoEConfig(
            num_experts=512,
            num_experts_per_tok=22,
            mlp_dim=2688,
            shared_expert_dim=5376,
            latent_dim=1024,
            routed_scaling_factor=5.0,
            **SCORING,
        ),
        vocab=131_072,
        length=262_144,
    ),
}

_MAMBA = {
    "mamba_num_heads": "num_heads",
    "mamba_head_dim": "head_dim",
    "ssm_state_size": "state_size",
    "n_groups": "n_groups",
    "conv_kernel": "conv_kernel",
}


@attrs.frozen(kw_only=True)
class _Layers(MoE):
    """The layers, `layers_block_type` or `hybrid_override_pattern`; their Mamba-2, and their experts."""

    count: str = "n_routed_experts"
    names: ClassVar[tuple[str, ...]] = (
        *("output_router_logits", "router_aux_loss_coef"),
        *("layers_block_type", "layer_types", "hybrid_override_pattern"),
        *("use_conv_bias", "use_bias", "time_step_limit", "routed_scaling_factor"),
    )
    decides: ClassVar[tuple[str, ...]] = (
        *("layers.pattern", "layers.tail_pattern", "layers.dense_layers", "layers.dense_pattern"),
        *("linear_attention", "feed_forward"),
    )

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        letters = _read_letters(file)
        if not letters:
            return {}
        numbers = {ours: file.numbers[theirs] for theirs, ours in _MAMBA.items()}
        others = {"conv_bias": file.flag("use_conv_bias", True), "time_step_limit": _read_limit(file)}
        others["proj_bias"] = file.flag("use_bias", False)
        return {
            "layers.num_layers": len(letters),
            **_layers(letters),
            "linear_attention": file.part(Mamba2Config, **numbers, **others) if "M" in letters else None,
            **(super().read(file, decoder) if "E" in letters else {}),
        }

    def values(self, file: ConfigFile) -> dict[str, Any]:
        return {**super().values(file), "routed_scaling_factor": file.number("routed_scaling_factor", 1.0)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        mamba, moe = config.linear_attention, config.moe
        written = {"hybrid_override_pattern": _letters(config), **super().write(config)}
        if moe is not None:
            written["routed_scaling_factor"] = moe.routed_scaling_factor
        if isinstance(mamba, Mamba2Config):
            written |= {theirs: getattr(mamba, ours) for theirs, ours in _MAMBA.items()}
            # transformers 5.23 takes the least time step from `time_step_min`, whose logarithm it needs.
            written |= {"use_bias": mamba.proj_bias, "use_conv_bias": mamba.conv_bias}
            written |= {"time_step_min": max(mamba.time_step_limit[0], 1e-12)}
            if mamba.time_step_limit != _NO_LIMIT:  # JSON has no infinity
                written["time_step_limit"] = list(mamba.time_step_limit)
        return written

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        mamba, moe = config.linear_attention, config.moe
        if mamba is not None and not isinstance(mamba, Mamba2Config):
            mamba = NEMOTRON_H["3-nano-30b-a3b"].linear_attention
        expected = {**_layers(_letters(config)), "linear_attention": mamba, "feed_forward": None}
        if moe is not None:
            wanted: MoEConfig = super().expected(config)["feed_forward"]
            width, factor = moe.shared_expert_dim or moe.mlp_dim, moe.routed_scaling_factor
            expected["feed_forward"] = attrs.evolve(wanted, shared_expert_dim=width, routed_scaling_factor=factor)
        return expected


def _read_letters(file: ConfigFile) -> str:
    """The letter of each layer; none if there is a problem."""
    name = next((name for name in ("layers_block_type", "layer_types") if file.fields.get(name)), None)
    if name is None:
        name = "hybrid_override_pattern"
        listed, letters = file.fields.get(name), {letter: letter for letter in _KINDS}
    else:
        listed, letters = file.fields[name], _TYPES
    if not listed or not isinstance(listed, Sequence) or any(kind not in tuple(letters) for kind in listed):
        kinds = ", ".join(map(repr, letters))
        file.problems.append(f"{name}: expected one of {kinds} for each layer, got {listed!r}")
        return ""
    count = file.fields.get("num_hidden_layers")
    if count not in (None, len(listed)):
        file.problems.append(f"num_hidden_layers={count!r}: {name} has {len(listed)} layers")
    if len(listed) > MOST["num_hidden_layers"]:
        file.problems.append(f"{name}: expected at most {MOST['num_hidden_layers']:,} layers, got {len(listed):,}")
        return ""
    return "".join(letters[kind] for kind in listed)


def _read_limit(file: ConfigFile) -> tuple[float, float]:
    """`time_step_limit`: the least and the largest time step."""
    limit = file.fields.get("time_step_limit") or _NO_LIMIT
    if isinstance(limit, Sequence):  # transformers 5 writes infinity as {"__float__": "Infinity"}
        limit = [math.inf if one == {"__float__": "Infinity"} else one for one in limit]
    is_pair = isinstance(limit, Sequence) and len(limit) == 2 and all(type(one) in (int, float) for one in limit)
    if not is_pair or not 0 <= limit[0] < limit[1]:
        file.problems.append(f"time_step_limit: expected the least and the largest time step, got {limit!r}")
        return _NO_LIMIT
    return float(limit[0]), float(limit[1])


_NAMES = {"input_layernorm.": "norm.", "post_attention_layernorm.": "norm.", "self_attn.": "mixer.", "mlp.": "mixer."}


def _tensors(config: DecoderConfig, tensors: Tensors) -> Tensors:
    """A layer's tensors: one norm, and whatever follows it is its mixer."""

    def named(name: str) -> str:
        ours = next((prefix for prefix in _NAMES if name.startswith(prefix)), "")
        return _NAMES.get(ours, "") + name.removeprefix(ours)

    return {path: attrs.evolve(one, names=tuple(map(named, one.names))) for path, one in tensors.items()}


_DEFAULTS = transformers_defaults(layers=52, embed=4096, mlp=21_504, heads=32, kv_heads=8, head_dim=128, vocab=131_072,
                                  length=4096, norm_eps=1e-5, mamba_num_heads=128, mamba_head_dim=64,
                                  ssm_state_size=128, n_groups=8, conv_kernel=4, n_routed_experts=8,
                                  num_experts_per_tok=2, moe_intermediate_size=7688,
                                  moe_shared_expert_intermediate_size=7688, moe_latent_size=None, n_group=1,
                                  topk_group=1)  # fmt: skip

FAMILY = register(
    Family(
        title="Nemotron-H",
        spec=NemotronH,
        sizes=NEMOTRON_H,
        architecture="NemotronHForCausalLM",
        model_types=("nemotron_h",),
        choices=_CHOICES,
        defaults=_DEFAULTS,
        spellings={"rms_norm_eps": "layer_norm_epsilon"},
        fixed={
            "mamba_hidden_act": "silu",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "residual_in_fp32": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        ignored=(
            *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"),  # no layer has positions
            *("time_step_min", "time_step_max", "time_step_floor"),  # of initial values; limits are `time_step_limit`
            *("rescale_prenorm_residual", "moe_shared_expert_overlap", "n_shared_experts"),
            *("chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
            *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),  # beside the decoder
            *("norm_eps", "auto_map"),  # published files have the first twice
            *("attention_bias", "mamba_proj_bias"),  # which transformers does not read
        ),
        layers=LayerFields(attention_bias=None, mlp_bias=True, activation=("mlp_hidden_act",)),
        fields=(
            Heads(),
            _Layers(
                others={
                    "n_group": "n_group",
                    "topk_group": "topk_group",
                    "moe_shared_expert_intermediate_size": "shared_expert_dim",
                    "moe_latent_size": "latent_dim",
                },
                norm_topk_prob=True,
                constants=SCORING,
            ),
            PadToken(),
        ),
        layer_tensors=_tensors,
        outside={"embed.embedding": "embeddings.weight", "norm.scale": "norm_f.weight"},
        prefix="backbone.",
    )
)
