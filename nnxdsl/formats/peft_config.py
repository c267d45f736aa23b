"""PEFT's `adapter_config.json`: ranks and alphas, and settings that our adapters do not support."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nnxdsl.errors import Problem
from nnxdsl.formats.files import read_json

CONFIG = "adapter_config.json"

WHOLE_MODULES = ("embed_tokens", "lm_head", "score")
"""The embedding and the heads, which `modules_to_save` may replace."""

Scale = tuple[int, float]
"""Rank and alpha."""


# Supported values of fields; any other value would change the forward pass or the base weights.
_FIXED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", "SEQ_CLS", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "pissa"),
}
_MERGE = "merge the adapter with PEFT (merge_and_unload) and load that model"
_REASONS = {
    "bias": f": biases that are trained beside A and B are no part of Adapter.LoRA; {_MERGE}",
    "init_lora_weights": f": it stands on a base without some of its weights, which this does not compute; {_MERGE}",
    "modules_to_save": f"; {_MERGE}",
}
# Fields without effect on the forward pass: the origin of an adapter, its initialization and training.
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
        "layers_to_transform",  # read below
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",  # as `layers_to_transform`
        "target_parameters",  # as `layers_to_transform`, see `peft_experts`
        "use_dora",  # read below, as the next
        "use_rslora",
    ]
)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads the adapter config of a directory.

    Raises:
        WeightsError: The file is missing or damaged.
    """
    return read_json(directory / CONFIG)


def problems_of(fields: Mapping[str, Any]) -> list[Problem]:
    """Settings that `Adapter.LoRA` and `Adapter.DoRA` do not support."""
    problems = [
        Problem(f"{CONFIG}: {name}", f"expected true or false, got {fields[name]!r}")
        for name in ("use_rslora", "use_dora")
        if not isinstance(fields.get(name, False), bool)
    ]
    for name, value in fields.items():
        reason = _REASONS.get(name, "")
        if name == "modules_to_save" and isinstance(value, list):
            value = [module for module in value if str(module).rpartition(".")[2] not in WHOLE_MODULES]
        if name in _FIXED:
            if value not in _FIXED[name]:
                allowed = " or ".join(map(repr, _FIXED[name]))
                problems.append(Problem(f"{CONFIG}: {name}", f"expected {allowed}, got {value!r}{reason}"))
        elif name not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            # An unknown field has no effect only if it is off.
            message = f"{value!r} is not supported by Adapter.LoRA or Adapter.DoRA{reason}"
            problems.append(Problem(f"{CONFIG}: {name}", message))
    return problems


def scales_of(
    fields: Mapping[str, Any], modules: Iterable[tuple[str, str]], problems: list[Problem]
) -> dict[str, Scale] | None:
    """Rank and alpha of each layer by its path within a layer group; None, and a problem, if they are invalid.

    Args:
        fields: The adapter config.
        modules: For each layer, its path within a layer group and the name of its module.
        problems: Problems are appended to this list.
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
        module_scale = pattern_value(patterns[0], module, rank), float(pattern_value(patterns[1], module, alpha))
        if scales.setdefault(path, module_scale) != module_scale:
            message = (
                f"{first[path]} has r={scales[path][0]}, alpha={scales[path][1]:g}, {module} has r={module_scale[0]}, "
                f"alpha={module_scale[1]:g}; layers that are stacked must share rank and alpha"
            )
            problems.append(Problem(f"{CONFIG}: rank_pattern, alpha_pattern", message))
            return None
        first.setdefault(path, module)
    return scales or {"": (rank, float(alpha))}


def pattern_value(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key, a regular expression, that matches the end of the module's name."""
    for key, value in pattern.items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error:
            continue
    return default


def is_pissa(fields: Mapping[str, Any]) -> bool:
    """Whether A and B stand on a base without its principal components."""
    return fields.get("init_lora_weights") == "pissa"


def is_targeted(fields: Mapping[str, Any], module: str) -> bool:
    """Whether the settings give this module an adapter, as PEFT reads them.

    Args:
        fields: The adapter config.
        module: The name of a linear layer in the base model, such as "model.layers.0.self_attn.q_proj".
    """
    excluded, targets = fields.get("exclude_modules"), fields.get("target_modules")
    if excluded and _names(excluded, module):
        return False
    if targets and targets != "all-linear" and not _names(targets, module):
        return False
    layers = fields.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = fields.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if match := re.match(rf".*\.{pattern}\.(\d+)\.", module):
            return int(match[1]) in (layers if isinstance(layers, list) else [layers])
    return False


def _names(pattern: Any, module: str) -> bool:
    """Whether a regular expression matches the whole name of a module, or a list names it or its end."""
    if isinstance(pattern, str):
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error:
            return True
    return isinstance(pattern, list) and any(f".{module}".endswith(f".{name}") for name in pattern)
