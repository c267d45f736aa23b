"""Parameters of published sizes: as many as transformers' modules of the same `config.json` have, and as published."""

from __future__ import annotations

import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.gemma4 import GEMMA4
from nnxdsl.models.families.llama4 import LLAMA4
from nnxdsl.models.families.registry import FAMILIES, from_hf, text_fields, to_hf

# Of text decoders; encoders of images and sound, and layers of multi-token prediction, are beside them.
PUBLISHED = {
    "DeepSeekV2": {"lite-16b": 15.7e9, "236b": 236e9},
    "DeepSeekV32": {"671b": 671.88e9},
    "Gemma4": {"12b": 11.9e9, "26b-a4b": 25.2e9, "31b": 30.7e9},
    "GLM4MoE": {"4.5-air": 106.9e9},
    "GLM4MoELite": {"4.7-flash": 29.9e9},
    "GLM5": {"744b": 743.91e9, "5.2-744b": 743.38e9},  # of the latter 57 of 78 layers have no indexer
    "Granite": {"3.3-2b": 2.53e9, "3.3-8b": 8.17e9},
    "Kimi": {"moonlight-16b-a3b": 15.96e9, "k2": 1.026e12},
    "Ministral3": {"3b": 3.43e9, "8b": 8.49e9, "14b": 13.51e9},
    "MiniMaxM2": {"230b-a10b": 228.7e9},
    "Mistral4": {"small-119b": 118.97e9},
    "MuseGlimmer": {"30b": 27_854_780_928},  # with the image encoder of transformers 29,776,626,688
    # Those of the Hub's GGUF files of Nemotron 3, and of the safetensors files of the others.
    "NemotronH": {
        "h-8b": 8_100_852_736,
        "nano-9b-v2": 8_888_227_328,
        "3-nano-30b-a3b": 31_577_940_288,
        "3-super-120b-a12b": 120_668_707_840,
    },
    "OlmoHybrid": {"7b": 7.43e9},
    "Phi3": {"3-mini-4k": 3.82e9, "3-medium-4k": 13.96e9, "4": 14.66e9, "4-mini": 3.836e9},
    "Qwen35": {"0.8b": 0.752e9, "4b": 4.21e9, "27b": 26.9e9},
    "Qwen35MoE": {"35b-a3b": 34.7e9, "397b-a17b": 396e9},
    "SmolLM3": {"3b": 3.075e9},
}
LLAMA4_ENCODER = 871_932_416
"""Parameters of Llama 4's image encoder and of its projector, the same in both sizes."""
SIZES = {
    f"{family.spec.__name__}-{size}": (family.model_types[0], config)
    for family in FAMILIES
    for size, config in family.sizes.items()
}


def parameters(config: DecoderConfig) -> int:
    template = abstract_decoder(config)
    return sum(int(np.prod(leaf.shape)) for leaf in template.variables.values())


@pytest.mark.default_variants(5)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    sizes = next(family.sizes for family in FAMILIES if family.spec.__name__ == name)
    assert {size: parameters(sizes[size]) for size in PUBLISHED[name]} == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.parametrize(("size", "published"), [("e2b", 4_647_450_147), ("e4b", 7_518_069_290)])
def test_published_files_of_gemma_4_e(size: str, published: int) -> None:
    # Those of the Hub's GGUF files, which have the keys and values of sharing layers, and 256 rotary frequencies.
    config = GEMMA4[size]
    unread = 256
    for kind in config.layers.kv_shared:
        ours = config.of(kind)
        unread += 2 * ours.embed_dim * ours.num_kv_heads * ours.head_dim + ours.head_dim
    assert parameters(config) + unread == published


@pytest.mark.parametrize(
    ("size", "published"), [("scout-17b-16e", 108_641_793_536), ("maverick-17b-128e", 401_583_781_376)]
)
def test_published_files_of_llama_4(size: str, published: int) -> None:
    # With the image encoder and its projector.
    assert parameters(LLAMA4[size]) + LLAMA4_ENCODER == published


@pytest.mark.slow
def test_the_image_encoder_of_llama_4_is_that_of_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from transformers.models.llama4 import modeling_llama4  # noqa: PLC0415

    published = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}  # where others than its defaults
    config = transformers.Llama4Config(vision_config=published)
    with torch.device("meta"):
        parts = (
            modeling_llama4.Llama4VisionModel(config.vision_config),
            modeling_llama4.Llama4MultiModalProjector(config),
        )
    assert sum(parameter.numel() for part in parts for parameter in part.parameters()) == LLAMA4_ENCODER


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_all_sizes_are_those_of_transformers(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model_type, config = SIZES[name]
    fields = to_hf(config, like=model_type)
    assert text_fields(fields)["model_type"] == model_type
    assert from_hf(fields) == config
    others = {key: value for key, value in fields.items() if key not in ("architectures", "model_type", "torch_dtype")}
    theirs = transformers.AutoConfig.for_model(fields["model_type"], **{**others, "pad_token_id": None})
    with torch.device("meta"):
        model = getattr(transformers, fields["architectures"][0])(theirs)
    buffers = ("e_score_correction_bias", "layer_scalar")
    counted = [buffer.numel() for name, buffer in model.named_buffers() if name.endswith(buffers)]
    counted += [each.numel() for name, each in model.named_parameters() if not hf._UNUSED.match(name)]
    assert parameters(config) == sum(counted)
