"""What PEFT's `adapter_config.json` says of an adapter, and what of it our adapters cannot be; knows no arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nnxdsl.errors import Problem
from nnxdsl.formats.files import read_json

CONFIG = "adapter_config.json"

Scale = tuple[int, float]
"""Rank and alpha."""


# Fields with the values that change nothing here; any other value would change the mathematics, or the base.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
# What says nothing of the forward pass: where an adapter came from, and how it was drawn and trained.
_WITHOUT_EFFECT = frozenset(
    [
        "alpha_pattern",  # read below, with the next two
        "rank_pattern",
        "lora_alpha",
        "r",
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",  # the tensors say which layers there are
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",  # as with layers
        "use_dora",  # read below, as the next
        "use_rslora",
    ]
)


def read_config(directory: Path) -> dict[str, Any]:
    """The settings of a directory.

    Raises:
        WeightsError: the file is missing or damaged.
    """
    return read_json(directory / CONFIG)


def problems_of(fields: Mapping[str, Any]) -> list[Problem]:
    """Settings under which the tensors would mean something else than `Adapter.LoRA` or `Adapter.DoRA` does."""
    problems = [
        Problem(f"{CONFIG}: {name}", f"expected true or false, got {fields[name]!r}")
        for name in ("use_rslora", "use_dora")
        if not isinstance(fields.get(name, False), bool)
    ]
    for name, value in fields.items():
        if name in _FIXED:
            if value not in _FIXED[name]:
                allowed = " or ".join(map(repr, _FIXED[name]))
                problems.append(Problem(f"{CONFIG}: {name}", f"expected {allowed}, got {value!r}"))
        elif name not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            # Something that is switched off cannot matter; anything else might.
            problems.append(Problem(f"{CONFIG}: {name}", f"{value!r} is not what Adapter.LoRA and Adapter.DoRA can do"))
    return problems


def scales_of(
    fields: Mapping[str, Any], modules: Iterable[tuple[str, str]], problems: list[Problem]
) -> dict[str, Scale] | None:
    """Rank and alpha of each layer by its path within a period; None, and a problem, where they are no numbers.

    Args:
        fields: the settings.
        modules: of each layer its path within a period, and the name of its module.
        problems: takes what is wrong.
    """
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    patterns = [fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        problems.append(Problem(f"{CONFIG}: rank_pattern, alpha_pattern", "expected objects"))
        return None
    ranks, alphas = ((rank, *patterns[0].values()), (alpha, *patterns[1].values()))
    for name, value in (("r", rank) for rank in ranks):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(Problem(f"{CONFIG}: {name}", f"expected an integer above 0, got {value!r}"))
            return None
    for name, value in (("lora_alpha", alpha) for alpha in alphas):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            problems.append(Problem(f"{CONFIG}: {name}", f"expected a number above 0, got {value!r}"))
            return None
    scales: dict[str, Scale] = {}
    first: dict[str, str] = {}
    for path, module in modules:
        own = of_module(patterns[0], module, rank), float(of_module(patterns[1], module, alpha))
        if scales.setdefault(path, own) != own:
            message = (
                f"{first[path]} has r={scales[path][0]}, alpha={scales[path][1]:g}, {module} has r={own[0]}, "
                f"alpha={own[1]:g}; layers that repeat are one stack here, of one rank and alpha"
            )
            problems.append(Problem(f"{CONFIG}: rank_pattern, alpha_pattern", message))
            return None
        first.setdefault(path, module)
    return scales or {"": (rank, float(alpha))}


def of_module(pattern: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """What a pattern gives a module: the value of the first key, a regular expression, that its name ends with."""
    for key, value in pattern.items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error:
            continue
    return otherwise
