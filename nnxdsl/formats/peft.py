"""Reads and writes LoRA and DoRA adapters in the format of PEFT.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named after the linear layers
of transformers: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]`, `lora_B` `[out, r]`, and
`lora_magnitude_vector` `[out]` of DoRA. Our arrays are `<path>.kernel_lora_a` `[..., in, r]`, `<path>.kernel_lora_b`
`[..., r, out]` and `<path>.kernel_lora_m` `[..., out]`, with layer groups stacked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np

from nnxdsl.config.adapter import DoRA, LoRA, LowRank, alpha_at, named, rank_at
from nnxdsl.errors import Problem, WeightsError
from nnxdsl.formats import safetensors
from nnxdsl.formats.files import PICKLE_REFUSED
from nnxdsl.formats.finite import require_finite
from nnxdsl.formats.hf import PREFIXES, tensor_name
from nnxdsl.formats.hf_names import mapped, tensor_sources
from nnxdsl.formats.peft_config import CONFIG, Scale, problems_of, read_config, scales_of
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.tensors import TensorSource
from nnxdsl.models.families.registry import family_named
from nnxdsl.models.params import ParamSpec, is_stacked, path_in_group

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"

_SUFFIXES = {"A": "_lora_a", "B": "_lora_b", "magnitude_vector": "_lora_m"}
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_"
    r"(?:(?P<side>[AB])(?:\.default)?\.weight|(?P<size>magnitude_vector)(?:\.default)?(?:\.weight)?)"
)


@attrs.frozen(eq=False)
class PeftAdapter:
    """An adapter that was read from PEFT's format.

    Attributes:
        adapter: Its config as `Adapter.LoRA` or `Adapter.DoRA`.
        leaves: Its arrays by our path, in the dtype of the file.
        base: The `base_model_name_or_path` of its config: a name, a path or None.
    """

    adapter: LowRank
    leaves: Mapping[str, np.ndarray]
    base: str | None

    def unlike(self, adapter: LowRank, paths: Iterable[str]) -> Iterator[Problem]:
        """Differences to an adapter that starts from this one and has arrays at `paths`."""
        mine, start = self.adapter, f"as in {CONFIG} of adapter.start"
        if type(adapter) is not type(mine):
            kinds = type(mine).__qualname__, type(adapter).__qualname__
            yield Problem("adapter", f"expected {kinds[0]}, {start}, got {kinds[1]}")
        if adapter.scaling != mine.scaling:
            yield Problem("adapter.scaling", f"expected {mine.scaling!r}, {start}, got {adapter.scaling!r}")
        theirs, ours = ({path.rpartition("_lora_")[0] for path in each} for each in (paths, self.leaves))
        if theirs != ours:
            yield Problem("adapter.targets", f"expected {mine.targets!r}, {start}, got {adapter.targets!r}")
        for field, value_at in (("rank", rank_at), ("alpha", alpha_at)):
            for path in map(_in_period, sorted(theirs & ours)):
                if (got := value_at(adapter, path)) != (expected := value_at(mine, path)):
                    yield Problem(f"adapter.{field}", f"expected {expected!r} at {path}, {start}, got {got!r}")
                    break


class _Part(NamedTuple):
    """The position of a linear layer of the Hub in our arrays: the path, and the index in the stack."""

    path: str
    number: int


def read(
    directory: str | Path,
    config: DecoderConfig,
    base: Mapping[str, ParamSpec],
    model_type: str | None = None,
    *,
    allow_non_finite: bool = False,
) -> PeftAdapter:
    """Reads an adapter for a model.

    Args:
        directory: Holds `adapter_config.json` and `adapter_model.safetensors`.
        config: The architecture of the base model.
        base: The arrays of the base model, which determine the shapes of the adapter.
        model_type: The Hub's name of the family, for names that differ between families.
        allow_non_finite: Whether NaN and infinity are accepted.

    Raises:
        WeightsError: A file is missing, damaged or pickled; a tensor holds NaN or infinity; or the adapter is not
            supported: names every such setting, and every tensor that is missing, unexpected or of another shape.
    """
    directory = Path(directory)
    fields = read_config(directory)
    tensors = _index(directory)
    problems = problems_of(fields)
    kind = DoRA if fields.get("use_dora") is True else LoRA
    sides = [side for side in _SUFFIXES if kind is DoRA or side in "AB"]
    sources = tensor_sources(config, model_type)
    parts = _parts(sources)
    by_side: dict[tuple[str, str], dict[int, safetensors.Tensor]] = {}  # by path and matrix ("A", "B")
    names: dict[str, str] = {}  # module names in the file, by tensor of the Hub
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        side = "" if match is None else match["side"] or match["size"]
        hub_name = "" if match is None else _without_prefix(match["module"]) + ".weight"
        if match is None or hub_name not in parts or side not in sides:
            problems.append(Problem(name, f"is no adapter of a linear layer of this model, shape {tensor.shape}"))
            continue
        part = parts[hub_name]
        names[hub_name] = match["module"]
        by_side.setdefault((part.path, side), {})[part.number] = tensor
    modules = [(_in_period(parts[hub_name].path), module) for hub_name, module in names.items()]
    scales = scales_of(fields, modules, problems)
    targets = targets_of({path for path, _ in by_side}, base)
    # The targets may cover more layers than the file: those are reported as missing.
    paths = [path for path in base if path.endswith(".kernel") and any(_matches(target, path) for target in targets)]
    problems += _misfits(by_side, sides, paths, base, sources, names, scales)
    if not by_side and not problems:
        problems.append(Problem(WEIGHTS, "holds no tensors"))
    if problems or scales is None:
        raise WeightsError("\n  ".join([f"{directory}: cannot be read as {kind.__qualname__}:", *map(str, problems)]))
    if not allow_non_finite:
        require_finite({name: tensor.read for name, tensor in tensors.items()}, directory / WEIGHTS)
    leaves = {
        path + _SUFFIXES[side]: _stacked(sources[path], side, by_number) for (path, side), by_number in by_side.items()
    }
    (rank, alpha), ranks, alphas = _patterns(scales, base)
    scaling = "sqrt_rank" if fields.get("use_rslora") is True else "rank"
    adapter = kind(rank=rank, alpha=alpha, targets=targets, scaling=scaling, ranks=ranks, alphas=alphas)
    return PeftAdapter(adapter, leaves, fields.get("base_model_name_or_path"))


def write(
    directory: str | Path,
    config: DecoderConfig,
    leaves: Mapping[str, np.ndarray],
    *,
    adapter: LowRank,
    base: str | None,
    is_multimodal: bool = False,
    model_type: str | None = None,
) -> None:
    """Writes an adapter that PEFT loads onto the base model.

    Args:
        directory: An existing directory, in which the two files are written.
        config: The architecture of the base model.
        leaves: The adapter's arrays by path, each stored in its own dtype.
        adapter: The adapter's config.
        base: The base model: a directory or a repository's name; None if it is in no Hub format.
        is_multimodal: Whether transformers loads the base as a multimodal model.
        model_type: The Hub's name of the family, for names that differ between families.

    Raises:
        WeightsError: A path is not that of a linear layer's adapter.
    """
    directory = Path(directory)
    sources = tensor_sources(config, model_type)
    family = family_named(model_type)
    is_multimodal |= family is not None and family.written_in is not None
    prefix = PREFIXES[0] if is_multimodal else "model."
    origin: dict[str, tuple[str, int]] = {}
    modules: dict[str, str] = {}  # paths within a layer group, by module
    for path in leaves:
        side = next((side for side, ending in _SUFFIXES.items() if path.endswith(ending)), None)
        kernel = path if side is None else path.removesuffix(_SUFFIXES[side])
        source = None if side is None else sources.get(kernel)
        if source is None or not _is_linear(kernel, source):
            raise WeightsError(f"{path}: PEFT does not support this layer; export the model with its adapter merged")
        for number, name in enumerate(source.names):
            module = tensor_name(name, prefix).removesuffix(".weight")
            ending = ".weight" if side in ("A", "B") else ""
            origin[f"base_model.model.{module}.lora_{side}{ending}"] = (path, number)
            modules[module] = _in_period(kernel)

    def value(name: str) -> np.ndarray:
        path, number = origin[name]
        return (leaves[path][number] if sources[path.rpartition("_lora_")[0]].leading else leaves[path]).T

    tensors = {name: (value(name).shape, leaves[path].dtype) for name, (path, _) in origin.items()}
    safetensors.write(directory / WEIGHTS, tensors, value)
    linears = {tensor_name(name, prefix).removesuffix(".weight") for name in _parts(sources)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": _number(adapter.alpha),
        "target_modules": _target_modules(set(modules), linears),
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": adapter.scaling == "sqrt_rank",
        "use_dora": isinstance(adapter, DoRA),
        "rank_pattern": {
            module: rank for module, path in modules.items() if (rank := rank_at(adapter, path)) != adapter.rank
        },
        "alpha_pattern": {
            module: _number(alpha)
            for module, path in modules.items()
            if (alpha := alpha_at(adapter, path)) != adapter.alpha
        },
        "modules_to_save": None,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def targets_of(paths: Iterable[str], base: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """The shortest `targets` of `Adapter.LoRA` that match exactly the linear layers of some kernels.

    Args:
        paths: Paths of kernels, such as `layers.blocks.0.mlp.up.kernel`.
        base: The arrays of the base model.
    """
    linears = {_in_period(path) for path in base if path.endswith(".kernel") and ".blocks." in path}
    chosen = {_in_period(path) for path in paths}
    targets: list[str] = []
    left = set(chosen)
    # From groups of layers to single ones.
    split = sorted(path.split(".") for path in linears)
    candidates = {tuple(keys[2:-1]): None for keys in split}  # ("attention",)
    candidates |= {tuple(keys[2:]): None for keys in split}  # ("attention", "query")
    candidates |= {tuple(keys): None for keys in split}  # ("blocks", "0", "attention", "query")
    for candidate in candidates:
        target = ".".join(candidate)
        covered = {path for path in linears if _matches(target, path)} if target else set()
        if covered & left and covered <= chosen:
            targets.append(target)
            left -= covered
    return tuple(targets)


def _is_linear(path: str, source: TensorSource) -> bool:
    """Whether an array holds the kernel of a linear layer; PEFT has none for experts, nor for part of a tensor."""
    periods = int(is_stacked(path))
    is_kernel = path.endswith(".kernel") and ".blocks." in path and source.names[0].endswith(".weight")
    return is_kernel and source.transposed and source.columns is None and len(source.leading) == periods


def _parts(sources: Mapping[str, TensorSource]) -> dict[str, _Part]:
    """The position of each tensor of a linear layer, by its name without prefix."""
    return {
        name: _Part(path, number)
        for path, source in sources.items()
        if _is_linear(path, source)
        for number, name in enumerate(source.names)
    }


def _index(directory: Path) -> dict[str, safetensors.Tensor]:
    if not (directory / WEIGHTS).exists() and (directory / PICKLED).exists():
        raise WeightsError(
            f"{directory}: {PICKLED} {PICKLE_REFUSED}. "
            f'If you trust it, convert it with torch: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{directory / PICKLED}', weights_only=True), '{directory / WEIGHTS}')\""
        )
    return safetensors.index(directory / WEIGHTS)


Patterns = tuple[tuple[str, Any], ...]


def _patterns(scales: Mapping[str, Scale], base: Mapping[str, ParamSpec]) -> tuple[Scale, Patterns, Patterns]:
    """The rank and alpha of most layers, and `ranks` and `alphas` of `Adapter.LoRA` for the others."""
    linears = [path for path in base if path.endswith(".kernel") and ".blocks." in path]
    defaults: list[Any] = []
    others: list[Patterns] = []
    for number in range(2):
        ((default, _),) = Counter(scale[number] for scale in scales.values()).most_common(1)
        values = dict.fromkeys(scale[number] for scale in scales.values() if scale[number] != default)
        patterns: list[tuple[str, Any]] = []
        for value in values:
            matching = [path for path in linears if scales.get(_in_period(path), (None, None))[number] == value]
            patterns += [(target, value) for target in targets_of(matching, base)]
        defaults.append(default)
        others.append(tuple(patterns))
    return (defaults[0], defaults[1]), others[0], others[1]


def _misfits(
    by_side: Mapping[tuple[str, str], Mapping[int, safetensors.Tensor]],
    sides: Iterable[str],
    paths: Iterable[str],
    base: Mapping[str, ParamSpec],
    sources: Mapping[str, TensorSource],
    names: Mapping[str, str],
    scales: Mapping[str, Scale] | None,
) -> list[Problem]:
    """Every tensor of some arrays that is missing, has another shape, or a dtype that is not supported."""
    problems: list[Problem] = []
    for path in paths:
        inputs, outputs = base[path].shape[-2:]
        rank = 0 if scales is None else scales.get(_in_period(path), (0, 0))[0]
        shapes = {"A": (rank, inputs), "B": (outputs, rank), "magnitude_vector": (outputs,)}
        for side in sides:
            tensors, shape, array = by_side.get((path, side), {}), shapes[side], path + _SUFFIXES[side]
            ending = ".weight" if side in ("A", "B") else ""
            for number, name in enumerate(sources[path].names):
                module = names.get(name) or f"{_module_prefix(names)}{name}".removesuffix(".weight")
                full, tensor = f"base_model.model.{module}.lora_{side}{ending}", tensors.get(number)
                if tensor is None:
                    message = f"expected a tensor {full}, there is none; an adapter must cover all stacked layers"
                    problems.append(Problem(array, message))
                elif rank and tensor.shape != shape:
                    problems.append(Problem(array, f"{full}: expected shape {shape}, got {tensor.shape}"))
                elif not tensor.readable:
                    problems.append(Problem(array, f"{full}: dtype {tensor.dtype} is not supported"))
    return problems


def _module_prefix(names: Mapping[str, str]) -> str:
    """The prefix of the file's module names."""
    name, module = next(iter(names.items()))
    return module.removesuffix(name.removesuffix(".weight"))


def _stacked(source: TensorSource, side: str, tensors: Mapping[int, safetensors.Tensor]) -> np.ndarray:
    parts = [tensors[number] for number in range(len(tensors))]
    if side in ("A", "B"):
        return mapped(source, parts).read()
    return np.stack([part.read() for part in parts]) if source.leading else np.array(parts[0].read())


def _number(value: float) -> int | float:
    """A whole number as an int, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value


def _target_modules(modules: set[str], linears: set[str]) -> list[str]:
    """Short names ("q_proj") if they cover exactly these modules, else full ones."""
    short = {module.rpartition(".")[2] for module in modules}
    if {linear for linear in linears if linear.rpartition(".")[2] in short} == modules:
        return sorted(short)
    return sorted(modules)


def _without_prefix(module: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix + "layers.")), "")
    return module.removeprefix(prefix)


def _in_period(path: str) -> str:
    return path_in_group(path).removesuffix(".kernel")


def _matches(target: str, path: str) -> bool:
    """Whether a target of `Adapter.LoRA` matches the layer of a kernel, or a module around it."""
    return named(target, _in_period(path))
