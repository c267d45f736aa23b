"""What Muse Glimmer is made of, each part against transformers, and its `config.json`."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.parts import EmbeddingConfig
from nnxdsl.models.families.muse_glimmer import MUSE_GLIMMER
from nnxdsl.models.families.registry import from_hf, to_hf
from tests.models.stored import FAMILIES, Leaves, compared, read

WITHOUT = 1e-2
"""Of the largest logit: what leaving an ingredient out changes at least; the tests of families allow 1e-5."""


@pytest.fixture(scope="module")
def stored() -> tuple[DecoderConfig, Leaves]:
    return read("muse_glimmer")  # with a vision tower in the file


def difference(config: DecoderConfig, leaves: Leaves) -> float:
    """How far logits are from those of transformers, relative to the largest."""
    return compared("muse_glimmer", config)(leaves)


def with_layers(config: DecoderConfig, **kinds: Any) -> DecoderConfig:
    return config.with_fields({"layers.pattern": tuple(kinds.get(kind, kind) for kind in config.layers.pattern)})


LEFT_OUT = {
    "norm of embeddings": lambda config: attrs.evolve(config, embedding=EmbeddingConfig()),
    "norms of queries and keys": lambda config: config.with_fields({"attention.query_key_norm": "none"}),
    "which layers without positions have": lambda config: config.with_fields({"attention.query_key_norm": "rotated"}),
    "factor of queries": lambda config: config.with_fields({"attention.query_scale": config.head_dim**-0.5}),
    "gate": lambda config: config.with_fields({"attention.output_gate": "none"}),
    "zero-centred norms": lambda config: config.with_fields({"norm.scale": "wide"}),
    "last norm": lambda config: config.with_fields({"norm.final_scale": None}),
    "second epsilon": lambda config: config.with_fields({"norm.post_eps": None}),
    "output multiplier": lambda config: config.with_fields({"head.logits_scaling": 1.0}),
    "cap of logits": lambda config: config.with_fields({"head.soft_cap": None}),
    "multiplier before the cap": lambda config: config.with_fields(
        {"head.logits_scaling": 1.0, "head.soft_cap": config.head.soft_cap / config.head.logits_scaling}
    ),
    "layers without positions": lambda config: with_layers(config, nope="global"),
    "layers without a window": lambda config: with_layers(config, nope="local"),
    "windows": lambda config: attrs.evolve(config, window=12),
    "positions": lambda config: with_layers(config, local="nope"),
    "period from the end": lambda config: config.with_fields({"layers.pattern": ("local", "local", "local", "nope")}),
}


def test_all_ingredients_together(stored: tuple[DecoderConfig, Leaves]) -> None:
    assert difference(*stored) == pytest.approx(0, abs=2e-5)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_each_ingredient_counts(stored: tuple[DecoderConfig, Leaves], left_out: str) -> None:
    config, leaves = stored
    assert difference(LEFT_OUT[left_out](config), leaves) > WITHOUT


def fields() -> dict[str, Any]:
    return json.loads((FAMILIES / "muse_glimmer" / "config.json").read_text())


def text() -> dict[str, Any]:
    return fields()["text_config"]


def test_spellings() -> None:
    config = from_hf(fields())
    assert from_hf(text()) == config
    assert config.layers.kinds == ("nope", "local", "local", "local", "nope")
    # Counted from the last layer, where the lists are missing.
    short = {name: value for name, value in text().items() if name not in ("layer_types", "layer_rope_theta")}
    assert from_hf(short) == config
    longer = from_hf({**short, "num_hidden_layers": 6})
    assert longer.layers.kinds == ("local", "nope", "local", "local", "local", "nope")
    kinds = ["full_attention"] * 5
    assert from_hf({**text(), "layer_types": kinds, "layer_rope_theta": [500] * 5}).layers.kinds == ("global",) * 5
    # What transformers has where a file has nothing.
    assert from_hf({"model_type": "muse_glimmer", "text_config": {}}) == MUSE_GLIMMER["30b"]


@pytest.mark.parametrize("size", MUSE_GLIMMER)
def test_sizes_are_written_exactly(size: str) -> None:
    written = to_hf(MUSE_GLIMMER[size])
    assert from_hf(written) == MUSE_GLIMMER[size]
    assert (written["model_type"], written["text_config"]["model_type"]) == ("muse_glimmer", "muse_glimmer_text")
    numbers = {name: written["text_config"][name] for name in ("qk_scale_factor", "output_multiplier")}
    assert numbers == {"qk_scale_factor": 3.87, "output_multiplier": 2**0.5 if size == "tiny" else 0.19611613513818404}


@pytest.mark.parametrize("factor", [0.3, 1 / 3, 0.7654321098765432, 17 / 7])
def test_any_number_is_written_exactly(factor: float) -> None:
    numbers = {"qk_scale_factor": factor, "output_multiplier": factor, "head_dim": 10}
    config = from_hf({**text(), **numbers})
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_rope_theta": [0, 500.0]}, "layer_rope_theta: expected 0 or 500 for each of 5 layers, got"),
        ({"layer_rope_theta": [0, 500.0, 100.0, 500.0, 0]}, "layer_rope_theta: expected 0 or 500 for each of 5 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types: layer 4 has a window, but no rotary positions"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types: expected 5 of"),
        ({"sliding_window": None}, "has local layers, which need a window"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping: expected a number above 0, got None"),
        ({"post_norm_eps": 0}, "post_norm_eps: expected a number above 0, got 0"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: only False is implemented, got True"),
        ({"hidden_activation": "mish"}, "hidden_activation: expected one of 'silu', .* and 'relu2', got 'mish'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0: not understood"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        from_hf({**text(), **change})


def test_other_decoders_are_no_muse_glimmer() -> None:
    for change, message in (
        ({"norm.post_eps": None}, "Muse Glimmer has norm.post_eps="),
        ({"attention.output_gate": "query"}, "Muse Glimmer has attention.output_gate='own'"),
        ({"head.soft_cap": None}, "Muse Glimmer has head.soft_cap=20.0"),
    ):
        with pytest.raises(WeightsError, match=message):
            to_hf(MUSE_GLIMMER["tiny"].with_fields(change))
