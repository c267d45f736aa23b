"""The families that there are: their published sizes, and the Hub's `config.json` of each in and out; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import (
    DecoderConfig,
    Llama3RopeScaling,
    MLAConfig,
    MoEConfig,
    Rope,
    Yarn,
    local_then_global,
)
from nnxdsl.models.families import (
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    llama3,
    mistral,
    mixtral,
    olmo3,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from nnxdsl.models.families.deepseek_v3 import DEEPSEEK_V3
from nnxdsl.models.families.gemma import GEMMA
from nnxdsl.models.families.gemma2 import GEMMA2
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.gpt_oss import GPT_OSS
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.mistral import MISTRAL
from nnxdsl.models.families.mixtral import MIXTRAL
from nnxdsl.models.families.olmo3 import OLMO3
from nnxdsl.models.families.qwen2 import QWEN2
from nnxdsl.models.families.qwen3 import QWEN3
from nnxdsl.models.families.qwen3_moe import QWEN3_MOE
from nnxdsl.models.families.qwen3_next import QWEN3_NEXT

__all__ = [
    "DEEPSEEK_V3",
    "FAMILIES",
    "GEMMA",
    "GEMMA2",
    "GEMMA3",
    "GPT_OSS",
    "LLAMA3",
    "MISTRAL",
    "MIXTRAL",
    "OLMO3",
    "QWEN2",
    "QWEN3",
    "QWEN3_MOE",
    "QWEN3_NEXT",
    "DecoderConfig",
    "Llama3RopeScaling",
    "MLAConfig",
    "MoEConfig",
    "Rope",
    "Yarn",
    "from_hf",
    "local_then_global",
    "to_hf",
]

# The first that has a decoder like it writes it.
_MODULES = (
    gemma3,
    llama3,
    gemma,
    gemma2,
    mistral,
    qwen2,
    qwen3,
    olmo3,
    mixtral,
    qwen3_moe,
    deepseek_v3,
    gpt_oss,
    qwen3_next,
)
FAMILIES = tuple(module.FAMILY for module in _MODULES)


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hub `config.json`, of the family that its `model_type` names.

    Args:
        config: the parsed file.

    Returns:
        The decoder's numbers. What a file leaves out has transformers' default.

    Raises:
        WeightsError: another model, a field of a wrong type, or a field that could change the mathematics and is
            not understood; every such field at once.
    """
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family.read(config)
    known = ", ".join(repr(name) for family in FAMILIES for name in family.model_types)
    raise WeightsError(f"model_type: expected one of {known}, got {kind!r}")


def to_hf(config: DecoderConfig, dtype: str = "float32", like: str | None = None) -> dict[str, Any]:
    """The `config.json` that transformers 4.50 or newer reads as the same model.

    Args:
        config: the decoder's numbers.
        dtype: the name of the dtype in which the weights are stored.
        like: the `model_type` to write if several families have such a decoder; of itself the first of `FAMILIES`.

    Returns:
        A dictionary of JSON values; `from_hf` of it is `config` again.

    Raises:
        WeightsError: no family has a decoder like this; says what each would need.
    """
    problems = []
    for family in sorted(FAMILIES, key=lambda family: like not in family.model_types):
        refused = family.refusals(config)
        if not refused:
            return {"architectures": [family.architecture], "torch_dtype": dtype, **family.write(config)}
        problems.append(f"{family.title} has {', '.join(refused)}")
    raise WeightsError("\n  ".join(["no family of the Hub has a decoder like this:", *problems]))
