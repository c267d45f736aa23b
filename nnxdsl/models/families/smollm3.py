"""SmolLM3: spec, the published size (Hugging Face, 2025) and the spellings of `config.json`; no jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind, Rope, period_of
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Fields, Heads, PadToken, SharedRope, TiedHead
from nnxdsl.models.families.hf_config import ConfigFile
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


class _Positions(Fields):
    """Layers without rotary positions: `no_rope_layers`, a 0 for each, or every `no_rope_layer_interval`th layer."""

    names: ClassVar[tuple[str, ...]] = ("no_rope_layers", "no_rope_layer_interval", "layer_types")
    decides: ClassVar[tuple[str, ...]] = ("pattern",)

    def read(self, file: ConfigFile, decoder: Mapping[str, Any]) -> dict[str, Any]:
        layers = file.numbers["num_hidden_layers"]
        interval = file.count("no_rope_layer_interval", 4, least=1)
        flags = file.fields.get("no_rope_layers")
        if flags is None:
            flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(flags, Sequence) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
            file.problems.append(f"no_rope_layers: expected 0 or 1 for each of {layers} layers, got {flags!r}")
            return {}
        attention = file.fields.get("layer_types") or []
        if not isinstance(attention, list) or any(kind != "full_attention" for kind in attention):
            file.problems.append("layer_types: only 'full_attention' is implemented")
        kinds: list[LayerKind] = ["global" if flag else "nope" for flag in flags[:layers]]
        return {"pattern": period_of(kinds)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"no_rope_layers": [int(kind != "nope") for kind in config.layers]}

    def expected(self, config: DecoderConfig) -> dict[str, Any]:
        kinds: list[LayerKind] = ["nope" if kind == "nope" else "global" for kind in config.layers]
        return {"pattern": period_of(kinds)}


FAMILY = register(
    Family(
        title="SmolLM3",
        spec=SmolLM3,
        sizes=SMOLLM3,
        architecture="SmolLM3ForCausalLM",
        model_types=("smollm3",),
        defaults=transformers_defaults(layers=36, embed=2048, mlp=11_008, heads=16, kv_heads=4, head_dim=None,
                                       vocab=128_256, length=32_768),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "use_sliding_window": False,
        },
        ignored=("sliding_window", "max_window_layers"),  # which no layer has
        fields=(Heads(), _Positions(), SharedRope(theta=2e6), TiedHead(default=True), PadToken()),
    )
)  # fmt: skip
