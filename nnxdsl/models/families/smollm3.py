"""SmolLM3: spec, the published size (Hugging Face, 2025) and the spellings of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind, period_of
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, PadToken, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import KINDS, ConfigFile, layer_types
from nnxdsl.models.families.layer_fields import LayerFields
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class SmolLM3(Model):
    """SmolLM3 (Hugging Face, 2025): a Llama, every fourth layer of which has no rotary positions (NoPE).

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.8 million parameters, for a laptop.
    """

    size: Literal["tiny", "3b"] = attrs.field(kw_only=False)


_PATTERN: tuple[LayerKind, ...] = ("global", "global", "global", "nope")

# As the published config.json has it; `tiny` is ours, for laptops and the byte tokenizer.
SMOLLM3 = {
    "tiny": decoder(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, vocab=320, length=1024,
                    pattern=_PATTERN, rope=Rope(theta=5e6), tied_head=True),
    "3b": decoder(layers=36, embed=2048, mlp=11_008, heads=16, kv_heads=4, head_dim=128, vocab=128_256, length=65_536,
                  pattern=_PATTERN, rope=Rope(theta=5e6), tied_head=True),
}  # fmt: skip


_NO_ROPE = Rope(theta=1.0, partial_rotary_factor=0.0)
"""Of local layers without rotary positions."""


class _Positions(Fields):
    """Layers without rotary positions, `no_rope_layers` or every `no_rope_layer_interval`th one, and their windows.

    A window is that of the layers that `layer_types` names; without it of those without rotary positions.
    """

    names: ClassVar[tuple[str, ...]] = (
        *("no_rope_layers", "no_rope_layer_interval", "layer_types", "use_sliding_window", "sliding_window"),
    )
    decides: ClassVar[tuple[str, ...]] = ("layers.pattern", "window", "rope_local")

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers = file.numbers["num_hidden_layers"]
        interval = file.count("no_rope_layer_interval", 4, least=1)
        flags = file.fields.get("no_rope_layers")
        if flags is None:
            flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(flags, Sequence) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
            file.problems.append(f"no_rope_layers: expected 0 or 1 for each of {layers} layers, got {flags!r}")
            return {}
        flags = flags[:layers]
        window = file.window(None) if file.flag("use_sliding_window", False) else None
        types = file.fields.get("layer_types") or None
        if types is None:
            types = ["full_attention" if flag or window is None else "sliding_attention" for flag in flags]
        if not isinstance(types, Sequence) or len(types) != layers or any(one not in tuple(KINDS) for one in types):
            file.problems.append(f"layer_types: expected {layers} of {', '.join(map(repr, KINDS))}, got {types!r}")
            return {}
        with_window = {flag for flag, name in zip(flags, types, strict=True) if name == "sliding_attention"}
        if with_window and window is None:
            file.problems.append("layer_types: 'sliding_attention' needs use_sliding_window=true and a sliding_window")
            return {}
        if len(with_window) > 1:
            file.problems.append(
                "layer_types: expected layers with a window either all with rotary positions or all without, got both"
            )
            return {}
        kinds = [_kind(bool(flag), name) for flag, name in zip(flags, types, strict=True)]
        return {
            "layers.pattern": period_of(kinds),
            "window": window if with_window else None,
            "rope_local": _NO_ROPE if with_window == {0} else None,
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        without = {"nope", "local"} if config.rope_local == _NO_ROPE else {"nope"}
        return {
            "no_rope_layers": [int(kind not in without) for kind in config.layers.kinds],
            "layer_types": layer_types(config),
            "use_sliding_window": config.window is not None,
            "sliding_window": config.window,
        }

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        kinds: list[LayerKind] = [kind if kind in ("nope", "local") else "global" for kind in config.layers.kinds]
        rope = _NO_ROPE if config.rope_local == _NO_ROPE else None
        window = config.window if "local" in kinds else None
        return {"layers.pattern": period_of(kinds), "window": window, "rope_local": rope}


def _kind(has_rope: bool, name: str) -> LayerKind:
    if name == "sliding_attention":
        return "local"
    return "global" if has_rope else "nope"


FAMILY = register(
    Family(
        title="SmolLM3",
        spec=SmolLM3,
        sizes=SMOLLM3,
        architecture="SmolLM3ForCausalLM",
        classifier="SmolLM3ForSequenceClassification",
        model_types=("smollm3",),
        defaults=transformers_defaults(layers=36, embed=2048, mlp=11_008, heads=16, kv_heads=4, head_dim=None,
                                       vocab=128_256, length=32_768),
        fixed={
            "attention_dropout": 0.0,
        },
        ignored=("max_window_layers",),
        layers=LayerFields(mlp_bias=True),
        fields=(Heads(), _Positions(), SharedRope(theta=2e6), TiedHead(default=True), PadToken()),
    )
)  # fmt: skip
