"""LoRA and DoRA adapters in the format of PEFT, read into leaves beside our weights and written; knows no training.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named after the linear layers
of transformers: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]`, `lora_B` `[out, r]`, and
`lora_magnitude_vector` `[out]` of DoRA. Ours are `<path>.kernel_lora_a` `[..., in, r]`, `<path>.kernel_lora_b`
`[..., r, out]` and `<path>.kernel_lora_m` `[..., out]`, periods stacked.
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
from nnxdsl.formats.finite import require_finite
from nnxdsl.formats.hf import tensor_name
from nnxdsl.formats.hf_names import mapped, tensor_sources
from nnxdsl.formats.peft_config import CONFIG, Scale, problems_of, read_config, scales_of
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.tensors import TensorSource
from nnxdsl.models.params import ParamSpec, path_in_group

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"

_OURS = {"A": "_lora_a", "B": "_lora_b", "magnitude_vector": "_lora_m"}
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_"
    r"(?:(?P<side>[AB])(?:\.default)?\.weight|(?P<size>magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
# What stands before the names of layers: of multimodal models, as transformers 5 and 4 call it, and of text models.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


@attrs.frozen(eq=False)
class PeftAdapter:
    """An adapter of PEFT's format in our terms.

    Attributes:
        adapter: what it is.
        leaves: its arrays by our path, in the file's dtype.
        base: what its `adapter_config.json` says that it was trained on; a name, a path or None.
    """

    adapter: LowRank
    leaves: Mapping[str, np.ndarray]
    base: str | None

    def unlike(self, adapter: LowRank, paths: Iterable[str]) -> Iterator[Problem]:
        """In what it differs from the adapter that is to go on with it, whose arrays are at `paths`."""
        mine, start = self.adapter, f"as {CONFIG} of adapter.start has it"
        if type(adapter) is not type(mine):
            kinds = type(mine).__qualname__, type(adapter).__qualname__
            yield Problem("adapter", f"expected {kinds[0]}, {start}, got {kinds[1]}")
        if adapter.scaling != mine.scaling:
            yield Problem("adapter.scaling", f"expected {mine.scaling!r}, {start}, got {adapter.scaling!r}")
        here, there = ({path.rpartition("_lora_")[0] for path in each} for each in (paths, self.leaves))
        if here != there:
            yield Problem("adapter.targets", f"expected {mine.targets!r}, {start}, got {adapter.targets!r}")
        for field, at in (("rank", rank_at), ("alpha", alpha_at)):
            for path in map(_in_period, sorted(here & there)):
                if (got := at(adapter, path)) != (wanted := at(mine, path)):
                    yield Problem(f"adapter.{field}", f"expected {wanted!r} at {path}, {start}, got {got!r}")
                    break


class _Part(NamedTuple):
    """Where a linear layer of the Hub is in our leaves."""

    path: str
    number: int


def read(
    directory: str | Path, config: DecoderConfig, base: Mapping[str, ParamSpec], *, allow_non_finite: bool = False
) -> PeftAdapter:
    """Reads an adapter for a network.

    Args:
        directory: holds `adapter_config.json` and `adapter_model.safetensors`.
        config: the network's numbers.
        base: the leaves of the plain network, which say what shapes an adapter has.
        allow_non_finite: whether NaN and infinity are read as any value.

    Raises:
        WeightsError: a file is missing, damaged or pickled; a tensor holds NaN or infinity; or what it holds is not
            what our adapters can be: every such setting, and every tensor that is missing, left over or of another
            shape.
    """
    directory = Path(directory)
    fields = read_config(directory)
    tensors = _index(directory)
    problems = problems_of(fields)
    kind = DoRA if fields.get("use_dora") is True else LoRA
    sides = [side for side in _OURS if kind is DoRA or side in "AB"]
    parts = _parts(config)
    found: dict[tuple[str, str], dict[int, safetensors.Tensor]] = {}  # by path and side
    names: dict[str, str] = {}  # modules as the file calls them, by tensor of the Hub
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        side = "" if match is None else match["side"] or match["size"]
        hub_name = "" if match is None else _without_prefix(match["module"]) + ".weight"
        if match is None or hub_name not in parts or side not in sides:
            problems.append(Problem(name, f"is no adapter of a linear layer of this network, {_shape(tensor.shape)}"))
            continue
        part = parts[hub_name]
        names[hub_name] = match["module"]
        found.setdefault((part.path, side), {})[part.number] = tensor
    modules = [(_in_period(parts[hub_name].path), module) for hub_name, module in names.items()]
    scales = scales_of(fields, modules, problems)
    targets = targets_of({path for path, _ in found}, base)
    # What these names mean may be more than there is: then it is missing, since a name has no way to leave it out.
    paths = [path for path in base if path.endswith(".kernel") and any(_means(target, path) for target in targets)]
    problems += _misfits(found, sides, paths, base, config, names, scales)
    if not found and not problems:
        problems.append(Problem(WEIGHTS, "holds no tensors"))
    if problems or scales is None:
        raise WeightsError("\n  ".join([f"{directory}: cannot be read as {kind.__qualname__}:", *map(str, problems)]))
    if not allow_non_finite:
        require_finite({name: tensor.read for name, tensor in tensors.items()}, directory / WEIGHTS)
    leaves = {path + _OURS[side]: _stacked(path, side, by_number, config) for (path, side), by_number in found.items()}
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
) -> None:
    """Writes a directory that PEFT loads onto the base model.

    Args:
        directory: is there, and takes the two files.
        config: the network's numbers.
        leaves: the adapter's arrays by path, each stored in its own dtype.
        adapter: what it is.
        base: what it belongs to: a directory or a repository's name; None where there is none.
        is_multimodal: whether transformers loads that base with parts for other inputs than text.

    Raises:
        WeightsError: a path is not that of a linear layer's adapter.
    """
    directory = Path(directory)
    wanted = tensor_sources(config)
    prefix = _PREFIXES[0] if is_multimodal else _PREFIXES[-1]
    origin: dict[str, tuple[str, int]] = {}
    modules: dict[str, str] = {}  # where each is within its period
    for path in leaves:
        side = next((side for side, ending in _OURS.items() if path.endswith(ending)), None)
        kernel = path if side is None else path.removesuffix(_OURS[side])
        source = None if side is None else wanted.get(kernel)
        if source is None or not _is_linear(kernel, source):
            raise WeightsError(f"{path}: PEFT has no name for it; export the model with its adapter merged")
        for number, name in enumerate(source.names):
            module = tensor_name(name, prefix).removesuffix(".weight")
            ending = ".weight" if side in ("A", "B") else ""
            origin[f"base_model.model.{module}.lora_{side}{ending}"] = (path, number)
            modules[module] = _in_period(kernel)

    def value(name: str) -> np.ndarray:
        path, number = origin[name]
        return (leaves[path][number] if wanted[path.rpartition("_lora_")[0]].leading else leaves[path]).T

    tensors = {name: (value(name).shape, leaves[path].dtype) for name, (path, _) in origin.items()}
    safetensors.write(directory / WEIGHTS, tensors, value)
    linears = {tensor_name(name, prefix).removesuffix(".weight") for name in _parts(config)}
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


def _is_linear(path: str, source: TensorSource) -> bool:
    """Whether a leaf is the kernels of one linear layer a period; those of experts have no modules of their own."""
    periods = 1 if path.startswith("layers.") else 0
    return path.endswith(".kernel") and ".blocks." in path and source.transposed and len(source.leading) == periods


def _parts(config: DecoderConfig) -> dict[str, _Part]:
    """Where each tensor of a linear layer goes, by its name without prefix."""
    return {
        name: _Part(path, number)
        for path, source in tensor_sources(config).items()
        if _is_linear(path, source)
        for number, name in enumerate(source.names)
    }


def _index(directory: Path) -> dict[str, safetensors.Tensor]:
    if not (directory / WEIGHTS).exists() and (directory / PICKLED).exists():
        raise WeightsError(
            f"{directory}: {PICKLED} would be read with pickle, which runs any code that a file holds, so it is not. "
            f'Where you trust it, convert it with torch: python -c "import torch, safetensors.torch as s; '
            f"s.save_file(torch.load('{directory / PICKLED}', weights_only=True), '{directory / WEIGHTS}')\""
        )
    return safetensors.index(directory / WEIGHTS)


Patterns = tuple[tuple[str, Any], ...]


def _patterns(scales: Mapping[str, Scale], base: Mapping[str, ParamSpec]) -> tuple[Scale, Patterns, Patterns]:
    """The rank and alpha that most layers have, and the patterns that name the others as `Adapter.LoRA` takes them."""
    every = [path for path in base if path.endswith(".kernel") and ".blocks." in path]
    usual: list[Any] = []
    others: list[Patterns] = []
    for number in range(2):
        ((most, _),) = Counter(scale[number] for scale in scales.values()).most_common(1)
        values = dict.fromkeys(scale[number] for scale in scales.values() if scale[number] != most)
        found: list[tuple[str, Any]] = []
        for value in values:
            meant = [path for path in every if scales.get(_in_period(path), (None, None))[number] == value]
            found += [(target, value) for target in targets_of(meant, base)]
        usual.append(most)
        others.append(tuple(found))
    return (usual[0], usual[1]), others[0], others[1]


def _misfits(
    found: Mapping[tuple[str, str], Mapping[int, safetensors.Tensor]],
    sides: Iterable[str],
    paths: Iterable[str],
    base: Mapping[str, ParamSpec],
    config: DecoderConfig,
    names: Mapping[str, str],
    scales: Mapping[str, Scale] | None,
) -> list[Problem]:
    """Every tensor of some leaves that is missing, of another shape, or of a dtype that is not understood."""
    problems: list[Problem] = []
    wanted = tensor_sources(config)
    for path in paths:
        inputs, outputs = base[path].shape[-2:]
        rank = 0 if scales is None else scales.get(_in_period(path), (0, 0))[0]
        shapes = {"A": (rank, inputs), "B": (outputs, rank), "magnitude_vector": (outputs,)}
        for side in sides:
            tensors, shape, where = found.get((path, side), {}), shapes[side], path + _OURS[side]
            ending = ".weight" if side in ("A", "B") else ""
            for number, name in enumerate(wanted[path].names):
                module = names.get(name) or f"{_like(names)}{name}".removesuffix(".weight")
                full, tensor = f"base_model.model.{module}.lora_{side}{ending}", tensors.get(number)
                if tensor is None:
                    problems.append(
                        Problem(where, f"expected a tensor {full}, there is none; an adapter is on all layers")
                    )
                elif rank and tensor.shape != shape:
                    problems.append(Problem(where, f"{full}: expected {_shape(shape)}, got {tensor.shape}"))
                elif not tensor.readable:
                    problems.append(Problem(where, f"{full}: dtype {tensor.dtype} is not understood"))
    return problems


def _like(names: Mapping[str, str]) -> str:
    """The prefix that the file's modules have."""
    name, module = next(iter(names.items()))
    return module.removesuffix(name.removesuffix(".weight"))


def _stacked(path: str, side: str, tensors: Mapping[int, safetensors.Tensor], config: DecoderConfig) -> np.ndarray:
    source, parts = tensor_sources(config)[path], [tensors[number] for number in range(len(tensors))]
    if side in ("A", "B"):
        return mapped(source, parts).read()
    return np.stack([part.read() for part in parts]) if source.leading else np.array(parts[0].read())


def _number(value: float) -> int | float:
    """As PEFT writes it: whole numbers without a point."""
    return int(value) if float(value).is_integer() else value


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
    return path_in_group(path).removesuffix(".kernel")


def _means(target: str, path: str) -> bool:
    """Whether a target of `Adapter.LoRA` names the layer of a kernel, or a module around it."""
    return named(target, _in_period(path))


def _split(path: str) -> list[str]:
    return path.split(".")


def _shape(shape: tuple[int, ...]) -> str:
    return f"shape {shape}"
