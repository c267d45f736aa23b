"""Muse Glimmer: spec, the published size (Meta, 2026), the spellings of `config.json` and its place there; no jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, period_of
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, SharedRope
from nnxdsl.models.families.hf_config import KINDS, ConfigFile, layer_types
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class MuseGlimmer(Model):
    """Muse Glimmer, text only (Meta, 2026): gated attention; every fourth layer has no window and no rotary positions.

    Norms without scale of embeddings, queries and keys; a factor and a soft cap of logits.

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.9 million parameters, for a laptop.
    """

    size: Literal["tiny", "30b"] = attrs.field(kw_only=False)


_CHOICES: dict[str, Any] = {
    "norm.placement": "sandwich",
    "norm.scale": "zero_centred",
    "norm.final_scale": "wide",
    "attention.query_key_norm": "unscaled",
    "attention.output_gate": "own",
    "embedding.norm": True,
    "head.tied": False,
}
_PATTERN: tuple[LayerKind, ...] = ("local", "local", "local", "nope")
_FACTOR, _CAP, _WINDOW, _EPS = 3.87, 20.0, 2048, 1e-8


def _size(*, embed: int, head_dim: int, **numbers: Any) -> DecoderConfig:
    logits = {"head.logits_scaling": 1 / (256 / embed) ** 0.5, "head.soft_cap": _CAP, "norm.post_eps": _EPS}
    return decoder(
        embed=embed,
        head_dim=head_dim,
        query_scale=_FACTOR * head_dim**-0.5,
        norm_eps=1e-5,
        pattern=_PATTERN,
        rope=Rope(theta=10_000.0),
        **{**_CHOICES, **logits, **numbers},
    )


# The text decoder as transformers has it by default; `tiny` is ours, for laptops and the byte tokenizer.
MUSE_GLIMMER = {
    "tiny": _size(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, window=64, vocab=320, length=1024),
    "30b": _size(layers=52, embed=6656, mlp=19_968, heads=32, kv_heads=2, head_dim=128, window=_WINDOW, vocab=202_048,
                 length=131_072),
}  # fmt: skip


class _Layers(Fields):
    """Kinds of layers: `layer_types`, and `layer_rope_theta`, 0 for each without rotary positions.

    Where a file has neither, every fourth layer from the last one on is global, without positions.
    """

    names: ClassVar[tuple[str, ...]] = ("layer_types", "layer_rope_theta", "sliding_window")
    decides: ClassVar[tuple[str, ...]] = ("layers.pattern", "window")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers, theta = file.numbers["num_hidden_layers"], decoder["rope_global"].theta
        every_fourth = [(layers - 1 - layer) % 4 == 0 for layer in range(layers)]
        types, thetas = file.fields.get("layer_types"), file.fields.get("layer_rope_theta")
        if types is None:
            types = ["full_attention" if is_last else "sliding_attention" for is_last in every_fourth]
        if thetas is None:
            thetas = [0 if is_last else theta for is_last in every_fourth]
        if not isinstance(types, Sequence) or len(types) != layers or any(one not in tuple(KINDS) for one in types):
            file.problems.append(f"layer_types: expected {layers} of {list(KINDS)}, got {types!r}")
            types = ["full_attention"] * layers
        if not isinstance(thetas, Sequence) or len(thetas) != layers or any(one not in (0, theta) for one in thetas):
            # transformers reads no more of them than whether they are 0
            file.problems.append(f"layer_rope_theta: expected 0 or {theta:g} for each of {layers} layers, got {thetas}")
            thetas = [theta] * layers
        kinds = [KINDS[kind] if theta else "nope" for kind, theta in zip(types, thetas, strict=True)]
        for layer, (kind, name) in enumerate(zip(kinds, types, strict=True)):
            if kind == "nope" and name == "sliding_attention":
                file.problems.append(f"layer_types: layer {layer} has a window, but no rotary positions")
        return {"layers.pattern": period_of(kinds), "window": file.window(_WINDOW) if "local" in kinds else None}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        theta = config.rope_global.theta
        return {
            "layer_types": layer_types(config),
            "layer_rope_theta": [0 if kind == "nope" else theta for kind in config.layers.kinds],
            "sliding_window": config.window or _WINDOW,
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        kinds: list[LayerKind] = ["global" if kind == "linear" else kind for kind in config.layers.kinds]
        return {"layers.pattern": period_of(kinds), "window": config.window if "local" in kinds else None}


class _Scales(Fields):
    """Factors of scores and logits, the cap of logits, and the second epsilon."""

    names: ClassVar[tuple[str, ...]] = (
        *("qk_scale_factor", "output_multiplier", "final_logit_softcapping", "post_norm_eps"),
    )
    decides: ClassVar[tuple[str, ...]] = (
        *("attention.query_scale", "norm.post_eps"),
        *("head.logits_scaling", "head.soft_cap"),
    )

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "attention.query_scale": file.number("qk_scale_factor", _FACTOR) * file.numbers["head_dim"] ** -0.5,
            "head.logits_scaling": 1 / file.number("output_multiplier", (256 / 6656) ** 0.5),
            "head.soft_cap": file.number("final_logit_softcapping", _CAP),
            "norm.post_eps": file.number("post_norm_eps", _EPS),
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        width, scale = config.head_dim**-0.5, config.attention.query_scale
        return {
            "qk_scale_factor": _solved(lambda x: x * width, scale, scale / width),
            "output_multiplier": _solved(lambda x: 1 / x, config.head.logits_scaling, 1 / config.head.logits_scaling),
            "final_logit_softcapping": config.head.soft_cap,
            "post_norm_eps": config.norm.post_eps,
            "bos_token_id": None,  # transformers' defaults may be beyond the vocabulary
            "eos_token_id": None,
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "head.soft_cap": config.head.soft_cap or _CAP,
            "norm.post_eps": config.norm.post_eps or config.norm.eps,
        }


def _solved(function: Callable[[float], float], value: float, near: float) -> float:
    """The number of the fewest digits about `near` of which `function` makes exactly `value`."""
    rounded = (float(f"{near:.{digits}g}") for digits in range(1, 18))
    numbers = (*rounded, math.nextafter(near, 0.0), math.nextafter(near, math.inf))
    return next((number for number in numbers if function(number) == value), near)


# Without layers, and as narrow as can be: weights of encoders are neither trained nor written.
_ENCODERS: dict[str, Any] = {
    "model_type": "muse_glimmer",
    "vision_config": {
        "num_hidden_layers": 0,
        "layer_types": [],
        "hidden_size": 4,
        "num_attention_heads": 1,
        "intermediate_size": 4,
        "pos_emb_height": 1,
        "pos_emb_width": 1,
    },
    "out_hidden_size": 16,
    "projector_hidden_size": 4,
}

FAMILY = register(
    Family(
        title="Muse Glimmer",
        spec=MuseGlimmer,
        sizes=MUSE_GLIMMER,
        architecture="MuseGlimmerForConditionalGeneration",
        model_types=("muse_glimmer_text",),
        wrappers=("muse_glimmer",),
        written_in=_ENCODERS,
        prefix="model.language_model.",
        choices=_CHOICES,
        defaults=transformers_defaults(layers=52, embed=6656, mlp=19_968, heads=32, kv_heads=2, head_dim=128,
                                       vocab=202_048, length=131_072, norm_eps=1e-5),
        fixed={
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        layers=LayerFields(activation=("hidden_activation",)),
        fields=(SharedRope(), _Layers(), _Scales()),
    )
)  # fmt: skip
