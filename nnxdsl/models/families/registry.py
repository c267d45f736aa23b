"""The families that are registered, and the Hub's `config.json` in and out; no jax.

A family is one file: its spec class, sizes, `config.json` and tensor names, registered when the file is imported. The
files of this package are imported by it, so a new file needs no other edit: `python docs/make_configuration.py` writes
its page and its name for type checkers (`__init__.pyi`). A family of another package registers itself in the same way
when its module is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from nnxdsl.config.model import Model
from nnxdsl.errors import WeightsError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.family import Family

FAMILIES: list[Family] = []
"""In the order of their registration, which is that of their files' names; the first that fits a decoder writes it."""


def register(family: Family) -> Family:
    """Adds a family; one that has the same spec class and was registered before is replaced."""
    FAMILIES[:] = [other for other in FAMILIES if other.spec.tag != family.spec.tag]
    FAMILIES.append(family)
    return family


def family_of(model: Model) -> Family | None:
    """The family whose spec class a model is of."""
    return next((family for family in FAMILIES if family.spec is type(model)), None)


def family_named(model_type: object) -> Family | None:
    """The family that reads this `model_type`."""
    return next((family for family in FAMILIES if model_type in family.model_types + family.wrappers), None)


def text_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the text decoder: of a `config.json` for several modalities those of its `text_config`.

    The others of such a file describe encoders of images or sound, which are not built. Where it says whether the head
    is tied, or how weights are quantized, that holds for the text decoder.

    Raises:
        WeightsError: such a file without `text_config`.
    """
    kind = config.get("model_type")
    family = next((family for family in FAMILIES if kind in family.wrappers), None)
    if family is None:
        return config
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise WeightsError(f"text_config: a {kind} config.json holds the text decoder there; it is missing")
    whole = ("tie_word_embeddings", "quantization_config")
    return {
        "model_type": family.model_types[0],
        **text,
        **{name: config[name] for name in whole if config.get(name) is not None},
    }


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hub `config.json`, of the family that its `model_type` names.

    Args:
        config: the parsed file.

    Returns:
        The decoder's config. A field that the file leaves out has transformers' default.

    Raises:
        WeightsError: another model, a field of a wrong type, or a field that could change the mathematics and is
            not implemented; all such fields together.
    """
    config = text_fields(config)
    kind = config.get("model_type")
    family = family_named(kind)
    if family is None:
        names = ", ".join(map(repr, sorted({n for family in FAMILIES for n in family.model_types + family.wrappers})))
        raise WeightsError(f"model_type: expected one of {names}, got {kind!r}{_near(config)}")
    return family.read(config).with_fields({"head.num_labels": _num_labels(config)})


def _num_labels(config: Mapping[str, Any]) -> int | None:
    """The labels of a sequence classifier, such as a reward model; None for a model with an output head.

    transformers writes the labels' names, and of two labels, its default, nothing.
    """
    classes, names = config.get("architectures"), config.get("id2label")
    if not isinstance(classes, list) or not any(str(name).endswith("ForSequenceClassification") for name in classes):
        return None
    count = len(names) if isinstance(names, Mapping) else config.get("num_labels", 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise WeightsError(f"num_labels: expected a number above 0, got {count!r}")
    return count


def _near(config: Mapping[str, Any]) -> str:
    """The family of the nearest `model_type`, and what it does not read of a file of an unknown one."""
    by_type = {name: family for family in FAMILIES for name in family.model_types + family.wrappers}
    near = difflib.get_close_matches(str(config.get("model_type")), by_type, n=1, cutoff=0.6)
    if not near:
        return ""
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    family = by_type[near[0]]
    try:
        family.read({**fields, "model_type": family.model_types[0]})
    except WeightsError as error:
        return f". The nearest is {near[0]!r}, but {error}"
    return f". The nearest is {near[0]!r}, which has all fields of this file; tensors may differ"


def to_hf(config: DecoderConfig, dtype: str = "float32", like: str | None = None) -> dict[str, Any]:
    """The `config.json` that transformers 4.50 or newer reads as the same model.

    Args:
        config: the decoder's config.
        dtype: name of the dtype in which the weights are stored.
        like: the `model_type` to write if several families have such a decoder; by default the first of `FAMILIES`.

    Returns:
        A dictionary of JSON values; `from_hf` of it is `config` again.

    Raises:
        WeightsError: no family has a decoder like this; names what each would require. Or it has a head of labels, and
            transformers no class for that.
    """
    problems = []

    def order(family: Family) -> tuple[bool, bool]:
        return like not in family.model_types + family.wrappers, family.is_general

    for family in sorted(FAMILIES, key=order):
        differences = family.differences(config)
        if config.head.num_labels is not None and family.classifier is None:
            differences.append("no class for sequence classification in transformers")
        if not differences:
            return {**_class_fields(family, config), "torch_dtype": dtype, **family.write(config)}
        problems.append(f"{family.title} has {', '.join(differences)}")
    raise WeightsError("\n  ".join(["no family of the Hub has a decoder like this:", *problems]))


def _class_fields(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """The fields for the class of transformers: a causal language model, or a sequence classifier with its labels."""
    if config.head.num_labels is None:
        return {"architectures": [family.architecture]}
    labels = {f"LABEL_{number}": number for number in range(config.head.num_labels)}
    names = {str(number): name for name, number in labels.items()}
    return {"architectures": [family.classifier], "id2label": names, "label2id": labels}
