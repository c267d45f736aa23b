"""LoRA adapters in the format of PEFT, read into leaves beside our weights and written; knows no training.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named after the linear layers
of transformers: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]`, and `lora_B` `[out, r]`.
Ours are `<path>.kernel_lora_a` `[..., in, r]` and `<path>.kernel_lora_b` `[..., r, out]`, periods stacked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np

from nnxdsl.models import safetensors
from nnxdsl.models.decoder_config import DecoderConfig
from nnxdsl.models.hub import tensor_name
from nnxdsl.models.hub_names import Source, sources
from nnxdsl.models.tree import Leaf, within
from nnxdsl.spec.errors import Problem, WeightsError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"

_OURS = {"A": "_lora_a", "B": "_lora_b"}
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# What stands before the names of layers: of multimodal models, as transformers 5 and 4 call it, and of text models.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")

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
    ]
)


@attrs.frozen(eq=False)
class PeftAdapter:
    """An adapter of PEFT's format in our terms.

    Attributes:
        rank: of all its layers.
        alpha: the update is multiplied by alpha / rank.
        targets: the layers it is on, as `Adapter.LoRA` names them.
        leaves: its arrays by our path, in the file's dtype.
        base: what its `adapter_config.json` says that it was trained on; a name, a path or None.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    leaves: Mapping[str, np.ndarray]
    base: str | None


class _Part(NamedTuple):
    """Where a linear layer of the Hub is in our leaves."""

    path: str
    number: int


def read(directory: str | Path, config: DecoderConfig, base: Mapping[str, Leaf]) -> PeftAdapter:
    """Reads an adapter for a network.

    Args:
        directory: holds `adapter_config.json` and `adapter_model.safetensors`.
        config: the network's numbers.
        base: the leaves of the plain network, which say what shapes an adapter has.

    Raises:
        WeightsError: a file is missing, damaged or pickled; or what it holds is not what `Adapter.LoRA` can be: every
            such setting, and every tensor that is missing, left over or of another shape.
    """
    directory = Path(directory)
    fields = _read_config(directory)
    tensors = _index(directory)
    problems = _problems_of(fields)
    parts = _parts(config)
    found: dict[tuple[str, str], dict[int, safetensors.Tensor]] = {}  # by path and side
    names: dict[str, str] = {}  # modules as the file calls them, by tensor of the Hub
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        hub_name = "" if match is None else _without_prefix(match["module"]) + ".weight"
        if match is None or hub_name not in parts:
            problems.append(Problem(name, f"is no adapter of a linear layer of this network, {_shape(tensor.shape)}"))
            continue
        part = parts[hub_name]
        names[hub_name] = match["module"]
        found.setdefault((part.path, match["side"]), {})[part.number] = tensor
    scale = _scale(fields, names.values(), problems)
    targets = targets_of({path for path, _ in found}, base)
    # What these names mean may be more than there is: then it is missing, since a name has no way to leave it out.
    paths = [path for path in base if path.endswith(".kernel") and any(_means(target, path) for target in targets)]
    problems += _misfits(found, paths, base, config, names, None if scale is None else scale[0])
    if not found and not problems:
        problems.append(Problem(WEIGHTS, "holds no tensors"))
    if problems or scale is None:
        raise WeightsError("\n  ".join([f"{directory}: cannot be read as Adapter.LoRA:", *map(str, problems)]))
    leaves = {path + _OURS[side]: _stacked(path, by_number, config) for (path, side), by_number in found.items()}
    rank, alpha = scale
    return PeftAdapter(rank, alpha, targets, leaves, fields.get("base_model_name_or_path"))


def write(
    directory: str | Path,
    config: DecoderConfig,
    leaves: Mapping[str, np.ndarray],
    *,
    rank: int,
    alpha: float,
    base: str | None,
    is_multimodal: bool = False,
) -> None:
    """Writes a directory that PEFT loads onto the base model.

    Args:
        directory: is there, and takes the two files.
        config: the network's numbers.
        leaves: the adapter's arrays by path, each stored in its own dtype.
        rank: of all its layers.
        alpha: the update is multiplied by alpha / rank.
        base: what it belongs to: a directory or a repository's name; None where there is none.
        is_multimodal: whether transformers loads that base with parts for other inputs than text.

    Raises:
        WeightsError: a path is not that of a linear layer's adapter.
    """
    directory = Path(directory)
    wanted = sources(config)
    prefix = _PREFIXES[0] if is_multimodal else _PREFIXES[-1]
    origin: dict[str, tuple[str, int]] = {}
    modules: list[str] = []
    for path in leaves:
        side = next((side for side, ending in _OURS.items() if path.endswith(ending)), None)
        kernel = path if side is None else path.removesuffix(_OURS[side])
        source = None if side is None else wanted.get(kernel)
        if source is None or not _is_linear(kernel, source):
            raise WeightsError(f"{path}: PEFT has no name for it; export the model with its adapter merged")
        for number, name in enumerate(source.names):
            module = tensor_name(name, prefix).removesuffix(".weight")
            origin[f"base_model.model.{module}.lora_{side}.weight"] = (path, number)
            modules.append(module)

    def shape(path: str) -> tuple[int, ...]:
        return leaves[path].shape[-2:][::-1]

    def value(name: str) -> np.ndarray:
        path, number = origin[name]
        return (leaves[path][number] if leaves[path].ndim == 3 else leaves[path]).T

    tensors = {name: (shape(path), leaves[path].dtype) for name, (path, _) in origin.items()}
    safetensors.write(directory / WEIGHTS, tensors, value)
    linears = {tensor_name(name, prefix).removesuffix(".weight") for name in _parts(config)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "target_modules": _target_modules(set(modules), linears),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def targets_of(paths: Iterable[str], base: Mapping[str, Leaf]) -> tuple[str, ...]:
    """The shortest names by which `Adapter.LoRA` means the linear layers of some kernels, and no others.

    Args:
        paths: of kernels: `layers.blocks.0.mlp.up.kernel`.
        base: the leaves of the plain network.
    """
    every = {_in_period(path) for path in base if path.endswith(".kernel") and ".blocks." in path}
    meant = {_in_period(path) for path in paths}
    found: list[str] = []
    left = set(meant)
    # From groups of layers to single ones; within each, as the network has them.
    candidates = {tuple(part[2:-1]): None for part in sorted(map(_split, every))}  # ("attention",)
    candidates |= {tuple(part[2:]): None for part in sorted(map(_split, every))}  # ("attention", "query")
    candidates |= {tuple(part): None for part in sorted(map(_split, every))}  # ("blocks", "0", "attention", "query")
    for candidate in candidates:
        target = ".".join(candidate)
        covered = {path for path in every if _means(target, path)} if target else set()
        if covered & left and covered <= meant:
            found.append(target)
            left -= covered
    return tuple(found)


def _is_linear(path: str, source: Source) -> bool:
    """Whether a leaf is the kernels of one linear layer a period; those of experts have no modules of their own."""
    periods = 1 if path.startswith("layers.") else 0
    return path.endswith(".kernel") and ".blocks." in path and source.transposed and len(source.leading) == periods


def _parts(config: DecoderConfig) -> dict[str, _Part]:
    """Where each tensor of a linear layer goes, by its name without prefix."""
    return {
        name: _Part(path, number)
        for path, source in sources(config).items()
        if _is_linear(path, source)
        for number, name in enumerate(source.names)
    }


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise WeightsError(f"{file}: damaged: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise WeightsError(f"{file}: expected a JSON object, got {type(fields).__name__}")
    return fields


def _index(directory: Path) -> dict[str, safetensors.Tensor]:
    if not (directory / WEIGHTS).exists() and (directory / PICKLED).exists():
        raise WeightsError(
            f"{directory}: {PICKLED} would be read with pickle, which runs any code that a file holds, so it is not. "
            f'Where you trust it, convert it with torch: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{directory / PICKLED}', weights_only=True), '{directory / WEIGHTS}')\""
        )
    return safetensors.index(directory / WEIGHTS)


def _problems_of(fields: Mapping[str, Any]) -> list[Problem]:
    """Settings under which the tensors would mean something else than `Adapter.LoRA` does."""
    problems: list[Problem] = []
    for name, value in fields.items():
        if name in _FIXED:
            if value not in _FIXED[name]:
                known = " or ".join(map(repr, _FIXED[name]))
                problems.append(Problem(f"{CONFIG}: {name}", f"expected {known}, got {value!r}"))
        elif name not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            # Something that is switched off cannot matter; anything else might.
            problems.append(Problem(f"{CONFIG}: {name}", f"{value!r} is not what Adapter.LoRA can do"))
    return problems


def _scale(fields: Mapping[str, Any], modules: Iterable[str], problems: list[Problem]) -> tuple[int, float] | None:
    """The rank and alpha that all modules have; None, and a problem, where they differ or are no numbers."""
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        problems.append(Problem(f"{CONFIG}: r", f"expected an integer above 0, got {rank!r}"))
        return None
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        problems.append(Problem(f"{CONFIG}: lora_alpha", f"expected a number above 0, got {alpha!r}"))
        return None
    patterns = [fields.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        problems.append(Problem(f"{CONFIG}: rank_pattern, alpha_pattern", "expected objects"))
        return None
    each = {module: (_of(patterns[0], module, rank), _of(patterns[1], module, alpha)) for module in modules}
    kinds = sorted(set(each.values()), key=str)
    if len(kinds) > 1:
        examples = (
            next(f"{module} has r={r}, alpha={a}" for module in each if each[module] == (r, a)) for r, a in kinds
        )
        message = f"layers of several ranks or alphas, where Adapter.LoRA has one of each: {', '.join(examples)}"
        problems.append(Problem(f"{CONFIG}: rank_pattern, alpha_pattern", message))
        return None
    rank, alpha = kinds[0] if kinds else (rank, alpha)
    return rank, float(alpha)


def _of(pattern: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """What a pattern gives a module: the value of the first key, a regular expression, that its name ends with."""
    for key, value in pattern.items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error:
            continue
    return otherwise


def _misfits(
    found: Mapping[tuple[str, str], Mapping[int, safetensors.Tensor]],
    paths: Iterable[str],
    base: Mapping[str, Leaf],
    config: DecoderConfig,
    names: Mapping[str, str],
    rank: int | None,
) -> list[Problem]:
    """Every tensor of some leaves that is missing, of another shape, or of a dtype that is not understood."""
    problems: list[Problem] = []
    wanted = sources(config)
    for path in paths:
        inputs, outputs = base[path].shape[-2:]
        for side, ending in _OURS.items():
            tensors = found.get((path, side), {})
            shape = (rank or 0, inputs) if side == "A" else (outputs, rank or 0)
            for number, name in enumerate(wanted[path].names):
                module = names.get(name) or f"{_like(names)}{name}".removesuffix(".weight")
                full, tensor = f"base_model.model.{module}.lora_{side}.weight", tensors.get(number)
                where = path + ending
                if tensor is None:
                    problems.append(
                        Problem(where, f"expected a tensor {full}, there is none; an adapter is on all layers")
                    )
                elif rank is not None and tensor.shape != shape:
                    problems.append(Problem(where, f"{full}: expected {_shape(shape)}, got {tensor.shape}"))
                elif not tensor.readable:
                    problems.append(Problem(where, f"{full}: dtype {tensor.dtype} is not understood"))
    return problems


def _like(names: Mapping[str, str]) -> str:
    """The prefix that the file's modules have."""
    name, module = next(iter(names.items()))
    return module.removesuffix(name.removesuffix(".weight"))


def _stacked(path: str, tensors: Mapping[int, safetensors.Tensor], config: DecoderConfig) -> np.ndarray:
    return np.array(sources(config)[path].leaf([tensors[number].read() for number in range(len(tensors))]))


def _target_modules(modules: set[str], linears: set[str]) -> list[str]:
    """Last names ("q_proj") where all layers of these names are meant, else whole ones."""
    last = {module.rpartition(".")[2] for module in modules}
    if {linear for linear in linears if linear.rpartition(".")[2] in last} == modules:
        return sorted(last)
    return sorted(modules)


def _without_prefix(module: str) -> str:
    prefix = next((prefix for prefix in _PREFIXES if module.startswith(prefix + "layers.")), "")
    return module.removeprefix(prefix)


def _in_period(path: str) -> str:
    return within(path).removesuffix(".kernel")


def _means(target: str, path: str) -> bool:
    """Whether a target of `Adapter.LoRA` names the layer of a kernel, or a module around it."""
    return f".{target}." in f".{_in_period(path)}."


def _split(path: str) -> list[str]:
    return path.split(".")


def _shape(shape: tuple[int, ...]) -> str:
    return f"shape {shape}"
