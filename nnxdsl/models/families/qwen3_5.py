"""Qwen3.5, of which 3.6 and 3.8 are: spec, the published sizes (Qwen Team, 2026) and spellings; no jax."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a spec class replaces the default of `Model`)

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import attrs

from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.family import Family, decoder, transformers_defaults
from nnxdsl.models.families.fields import Heads, SharedRope, TiedHead
from nnxdsl.models.families.qwen3_next import CHOICES, MTP, PARTIAL_ROTARY, Mixers
from nnxdsl.models.families.registry import register


@attrs.frozen(kw_only=True)
class Qwen35(Model):
    """Qwen3.5, 3.6 and 3.8, dense and text only (Qwen Team, 2026): three layers of four are gated DeltaNets.

    The others have gated attention.

    Attributes:
        size: Published size, or "tiny": 4 layers, 0.9 million parameters, for a laptop.
    """

    size: Literal["tiny", "0.8b", "2b", "4b", "9b", "27b"] = attrs.field(kw_only=False)
    mtp_layers: int = attrs.field(default=0, validator=Limit(at_least=0, at_most=1))


def deltanets(*, delta: tuple[int, int], width: int = 128, **numbers: Any) -> DecoderConfig:
    """A size, of DeltaNet's (key heads, value heads) and their width."""
    key_heads, value_heads = delta
    mixer = GatedDeltaNetConfig(
        key_heads=key_heads, value_heads=value_heads, key_head_dim=width, value_head_dim=width, projections="separate"
    )
    common: dict[str, Any] = {"head_dim": 256, "vocab": 248_320, "length": 262_144}
    return decoder(
        pattern=("linear", "linear", "linear", "global"),
        linear_attention=mixer,
        rope=Rope(theta=1e7, partial_rotary_factor=PARTIAL_ROTARY),
        **{**CHOICES, **common, **numbers},
    )


_small = partial(deltanets, layers=24, heads=8, kv_heads=2, delta=(16, 16), tied_head=True)

# The text decoders as their published config.json files have them; `tiny` is ours, for laptops and the byte tokenizer.
QWEN3_5 = {
    "tiny": deltanets(layers=4, embed=128, mlp=384, heads=4, kv_heads=2, head_dim=32, delta=(2, 4), width=32, vocab=320,
                      length=1024, tied_head=True),
    "0.8b": _small(embed=1024, mlp=3584),
    "2b": _small(embed=2048, mlp=6144),
    "4b": deltanets(layers=32, embed=2560, mlp=9216, heads=16, kv_heads=4, delta=(16, 32), tied_head=True),
    "9b": deltanets(layers=32, embed=4096, mlp=12_288, heads=16, kv_heads=4, delta=(16, 32), tied_head=False),
    "27b": deltanets(layers=64, embed=5120, mlp=17_408, heads=24, kv_heads=4, delta=(16, 48), tied_head=False),
}  # fmt: skip

DELTA_DEFAULTS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
FIXED = {"attention_dropout": 0.0, "attn_output_gate": True}
IGNORED = ("mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
ROPE = SharedRope(partial_rotary_factor=PARTIAL_ROTARY, ignored=("mrope_section", "mrope_interleaved"))
"""Positions of text: the three of multimodal rotary positions are equal there."""

FAMILY = register(
    Family(
        title="Qwen3.5",
        spec=Qwen35,
        sizes=QWEN3_5,
        architecture="Qwen3_5ForCausalLM",
        classifier="Qwen3_5TextForSequenceClassification",
        model_types=("qwen3_5_text",),
        wrappers=("qwen3_5",),
        choices=CHOICES,
        defaults=transformers_defaults(layers=32, embed=4096, mlp=12_288, heads=16, kv_heads=4, head_dim=256,
                                       vocab=248_320, length=32_768, **DELTA_DEFAULTS),
        fixed=FIXED,
        ignored=IGNORED,
        fields=(Heads(), Mixers(projections="separate"), ROPE, TiedHead()),
        mtp=MTP,
    )
)  # fmt: skip
