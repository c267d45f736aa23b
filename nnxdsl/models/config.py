"""The families that there are: their published sizes, and the Hub's `config.json` of each in and out; no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnxdsl.models.decoder_config import DecoderConfig, RopeRamp
from nnxdsl.models.families.gemma3 import FAMILY as _GEMMA3
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import FAMILY as _LLAMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.spec.errors import WeightsError

__all__ = ["FAMILIES", "GEMMA3", "LLAMA3", "DecoderConfig", "RopeRamp", "from_hf", "to_hf"]

FAMILIES = (_GEMMA3, _LLAMA3)


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


def to_hf(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` that transformers 4.50 or newer reads as the same model.

    Args:
        config: the decoder's numbers.
        dtype: the name of the dtype in which the weights are stored.

    Returns:
        A dictionary of JSON values; `from_hf` of it is `config` again.

    Raises:
        WeightsError: no family has a decoder like this; says what each would need.
    """
    problems = []
    for family in FAMILIES:
        refused = family.refusals(config)
        if not refused:
            return {"architectures": [family.architecture], "torch_dtype": dtype, **family.write(config)}
        problems.append(f"{family.title} has {', '.join(refused)}")
    raise WeightsError("\n  ".join(["no family of the Hub has a decoder like this:", *problems]))
