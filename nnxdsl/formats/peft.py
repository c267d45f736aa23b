"""Reads and writes LoRA and DoRA adapters in the format of PEFT.

A directory holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named after the linear layers
of transformers: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]`, `lora_B` `[out, r]`, and
`lora_magnitude_vector` `[out]` of DoRA. Our arrays are `<path>.kernel_lora_a` `[..., in, r]`, `<path>.kernel_lora_b`
`[..., r, out]` and `<path>.kernel_lora_m` `[..., out]`, with layer groups stacked.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.formats.peft_config import (
    CONFIG,
    WHOLE_MODULES,
    Scale,
    is_pissa,
    is_targeted,
    problems_of,
    read_config,
    scales_of,
)
from nnxdsl.formats.peft_experts import (
    ExpertParameter,
    expert_parameters,
    is_targeted_parameter,
    nested_modules,
    parameter_of,
)
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
        is_pissa: Whether it stands on a base without its principal components, see `adapters.pissa`.
        whole: Embedding and heads that replace those of the base (`modules_to_save`), by our path.
    """

    adapter: LowRank
    leaves: Mapping[str, np.ndarray]
    base: str | None
    is_pissa: bool = False
    whole: Mapping[str, np.ndarray] = attrs.field(factory=dict)

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
    """The position of a linear layer of the Hub in our arrays: the path, and the index in the stack.

    A layer that joins several of ours, such as `qkv_proj`, has such a part for each: A is theirs in common, and the
    rows of B are divided among them.
    """

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
    kernels = {path: leaf.shape for path, leaf in base.items() if path.endswith(".kernel")}
    sources = _sources(config, model_type, {path: (shape[-3:][0], shape[-1]) for path, shape in kernels.items()})
    parts = _parts(sources)
    by_side: dict[tuple[str, str], dict[int, safetensors.Tensor]] = {}  # by path and matrix ("A", "B")
    names: dict[str, str] = {}  # module names in the file, by tensor of the Hub
    whole, tensors_of_adapter = _whole(fields, tensors, base, sources, problems)
    for name, tensor in tensors_of_adapter.items():
        match = _TENSOR.fullmatch(name)
        side = "" if match is None else match["side"] or match["size"]
        module = "" if match is None else match["module"]
        module_name = _without_prefix(module)
        hub_name = parameter_of(module_name, parts, fields) or module_name + ".weight"
        if match is None or hub_name not in parts or side not in sides:
            problems.append(Problem(name, f"is no adapter of a linear layer of this model, shape {tensor.shape}"))
            continue
        names[hub_name] = module.removesuffix(module_name) + hub_name.removesuffix(".weight")
        for part in parts[hub_name]:
            by_side.setdefault((part.path, side), {})[part.number] = tensor
    modules = [(_in_period(part.path), module) for hub_name, module in names.items() for part in parts[hub_name]]
    scales = scales_of(fields, modules, problems)
    targets = targets_of({path for path, _ in by_side}, base)
    # The targets may cover more layers than the file: those are reported as missing.
    paths = [path for path in base if path.endswith(".kernel") and any(_matches(target, path) for target in targets)]
    problems += _misfits(by_side, sides, paths, base, sources, names, scales, fields)
    if is_pissa(fields) and any(sources[path].columns is not None for path, _ in by_side):
        reason = "of projections that join several layers is not supported; merge it with PEFT (merge_and_unload)"
        problems.append(Problem(f"{CONFIG}: init_lora_weights", f"'pissa' {reason}"))
    if not by_side and not problems:
        problems.append(Problem(WEIGHTS, "holds no tensors"))
    if problems or scales is None:
        raise WeightsError("\n  ".join([f"{directory}: cannot be read as {kind.__qualname__}:", *map(str, problems)]))
    if not allow_non_finite:
        require_finite({name: tensor.read for name, tensor in tensors.items()}, directory / WEIGHTS)
    leaves = {
        path + _SUFFIXES[side]: _stacked(sources[path], side, by_number) for (path, side), by_number in by_side.items()
    }
    scaling = "sqrt_rank" if fields.get("use_rslora") is True else "rank"
    _reduce_blocks(leaves, scales, sources, parts, scaling)
    (rank, alpha), ranks, alphas = _patterns(scales, base)
    adapter = kind(rank=rank, alpha=alpha, targets=targets, scaling=scaling, ranks=ranks, alphas=alphas)
    replaced = {path: np.array(tensor.read()) for path, tensor in whole.items()}
    return PeftAdapter(adapter, leaves, fields.get("base_model_name_or_path"), is_pissa(fields), replaced)


def write(
    directory: str | Path,
    config: DecoderConfig,
    leaves: Mapping[str, np.ndarray],
    *,
    adapter: LowRank,
    base: str | None,
    is_multimodal: bool = False,
    model_type: str | None = None,
    is_pissa: bool = False,
    whole: Mapping[str, np.ndarray] | None = None,
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
        is_pissa: Whether the adapter stands on a base without its principal components, which PEFT then computes.
        whole: A head that was trained beside the adapter (`modules_to_save`), by path.

    Raises:
        WeightsError: A path is not that of a linear layer's adapter.
    """
    directory = Path(directory)
    shapes = {path.removesuffix("_lora_b"): leaf.shape for path, leaf in leaves.items() if path.endswith("_lora_b")}
    sources = _sources(config, model_type, {path: (shape[-3:][0], shape[-1]) for path, shape in shapes.items()})
    family = family_named(model_type)
    is_multimodal |= family is not None and family.written_in is not None
    prefix = PREFIXES[0] if is_multimodal else "model."
    by_module: dict[str, list[_Part]] = {}  # the parts of each module
    for path in leaves:
        side = next((side for side, ending in _SUFFIXES.items() if path.endswith(ending)), None)
        kernel = path if side is None else path.removesuffix(_SUFFIXES[side])
        source = None if side is None else sources.get(kernel)
        if source is None or not _is_linear(kernel, source) or _is_unsupported(source, adapter):
            raise WeightsError(f"{path}: PEFT does not support this layer; export the model with its adapter merged")
        for number, name in enumerate(source.names if side == "A" else ()):
            by_module.setdefault(tensor_name(name, prefix).removesuffix(".weight"), []).append(_Part(kernel, number))
    matrices = {module: _matrices(module, parts, leaves, sources, adapter) for module, parts in by_module.items()}
    # A layer that its adapter leaves out has zeros in the stack of those that it does not, see `read`.
    if any(np.any(each.a) for each in matrices.values()):
        matrices = {module: each for module, each in matrices.items() if np.any(each.a) or np.any(each.b)}
    linears = {tensor_name(name, prefix).removesuffix(".weight") for name in _parts(sources)}
    parameters = {module for module, parts in by_module.items() if isinstance(sources[parts[0].path], ExpertParameter)}
    nested = nested_modules(module for module in matrices if module in parameters)
    whole = whole or {}
    heads = {module: whole[path] for module, path in _WHOLE.items() if path in whole}
    tensors = {
        f"base_model.model.{nested.get(module, module)}.lora_{side}{'.weight' if side in 'AB' else ''}": matrix
        for module, each in matrices.items()
        for side, matrix in _to_peft(each, sources[by_module[module][0].path])
    }
    tensors |= {f"base_model.model.{module}.weight": head for module, head in heads.items()}
    shapes = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    safetensors.write(directory / WEIGHTS, shapes, tensors.__getitem__)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if config.head.num_labels is None else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": _number(adapter.alpha),
        **_target_modules(set(matrices) - parameters, linears),
        "target_parameters": _target_parameters(set(nested), linears),
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": "pissa" if is_pissa else True,
        "use_rslora": adapter.scaling == "sqrt_rank",
        "use_dora": isinstance(adapter, DoRA),
        "rank_pattern": {module: each.rank for module, each in matrices.items() if each.rank != adapter.rank},
        "alpha_pattern": {
            module: _number(each.alpha) for module, each in matrices.items() if each.alpha != adapter.alpha
        },
        "modules_to_save": list(heads) or None,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


_WHOLE = {"embed_tokens": "embed.embedding", "lm_head": "lm_head.kernel", "score": "score.kernel"}
_TIED = (
    "the head of this model is its embedding, and the adapter replaces only one of them; set ensure_weight_tying=True "
    "where it is trained, or merge it with PEFT (merge_and_unload) and load that model"
)


def _whole(
    fields: Mapping[str, Any],
    tensors: Mapping[str, safetensors.Tensor],
    base: Mapping[str, ParamSpec],
    sources: Mapping[str, TensorSource],
    problems: list[Problem],
) -> tuple[dict[str, safetensors.Tensor], dict[str, safetensors.Tensor]]:
    """The tensors of embedding and head by our path, and all others by name; `problems` are appended to."""
    merged, others = {}, dict(tensors)
    is_tied = "lm_head.kernel" not in sources and "score.kernel" not in sources
    for module in WHOLE_MODULES:
        path = "embed.embedding" if is_tied and module == "lm_head" else _WHOLE[module]
        names = [name for name in tensors if re.fullmatch(rf"base_model\.model\.(.+\.)?{module}\.weight", name)]
        for name in names:
            tensor = merged[path] = others.pop(name)
            if path not in base:
                problems.append(Problem(path, f"{name}: this model has no such head"))
            elif tensor.shape != base[path].shape:
                message = f"{name}: expected shape {base[path].shape}, got {tensor.shape}"
                problems.append(Problem(path, message))
            elif not tensor.readable:
                problems.append(Problem(path, f"{name}: dtype {tensor.dtype} is not supported"))
        is_named = any(str(one).rpartition(".")[2] == module for one in fields.get("modules_to_save") or ())
        if is_named and not names and not is_tied and path in base:
            message = f"expected a tensor base_model.model.(...){module}.weight, there is none"
            problems.append(Problem(path, message))
    if merged and is_tied and not fields.get("ensure_weight_tying"):
        problems.append(Problem(f"{CONFIG}: modules_to_save", _TIED))
    return merged, others


def _sources(
    config: DecoderConfig, model_type: str | None, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, TensorSource]:
    """The tensors of the base model that make up each array, with experts as transformers stacks them."""
    sources = tensor_sources(config, model_type)
    return sources | expert_parameters(sources, shapes)


def _is_unsupported(source: TensorSource, adapter: LowRank) -> bool:
    """Whether PEFT refuses this adapter of experts."""
    return isinstance(source, ExpertParameter) and (isinstance(adapter, DoRA) or adapter.dropout > 0)


class _Matrices(NamedTuple):
    """The adapter of one module of the Hub: A `[in, r]`, B `[r, out]`, magnitudes `[out]` of DoRA, rank and alpha.

    A and B of experts have an axis for these before.
    """

    a: np.ndarray
    b: np.ndarray
    m: np.ndarray | None
    rank: int
    alpha: float


def _to_peft(each: _Matrices, source: TensorSource) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a module by side, in PEFT's layout."""
    for side, matrix in (("A", each.a), ("B", each.b), ("magnitude_vector", each.m)):
        if matrix is not None:
            yield side, source.from_array(side, matrix) if isinstance(source, ExpertParameter) else matrix.T


def _matrices(
    module: str,
    parts: Sequence[_Part],
    leaves: Mapping[str, np.ndarray],
    sources: Mapping[str, TensorSource],
    adapter: LowRank,
) -> _Matrices:
    """The adapter of a module; of one that joins several layers with an A each, that of `_block_diagonal`.

    Raises:
        WeightsError: not all layers that a module joins have adapters, or their ranks or alphas differ.
    """

    def matrix(part: _Part, side: str) -> np.ndarray | None:
        leaf = leaves.get(part.path + _SUFFIXES[side])
        return None if leaf is None else np.asarray(leaf[part.number] if sources[part.path].leading else leaf)

    parts = sorted(parts, key=lambda part: sources[part.path].columns or ())
    each = [[matrix(part, side) for part in parts] for side in ("A", "B", "magnitude_vector")]
    a, b, m = ([array for array in arrays if array is not None] for arrays in each)
    scales = {(rank_at(adapter, _in_period(part.path)), alpha_at(adapter, _in_period(part.path))) for part in parts}
    (rank, alpha), *others = scales
    columns = sources[parts[0].path].columns
    if others or (columns is not None and sum(array.shape[-1] for array in b) != columns[2]):
        names = ", ".join(_in_period(part.path) for part in parts)
        raise WeightsError(
            f"{module}: PEFT has one adapter for all layers that it joins, this adapter has {names}; target all of "
            "them with the same rank and alpha, or export the model with its adapter merged"
        )
    magnitude = np.concatenate(m) if m else None
    if all(np.array_equal(one, a[0]) for one in a) or not any(map(np.any, b)):
        return _Matrices(a[0], np.concatenate(b, axis=-1), magnitude, rank, alpha)
    ratio = len(parts) if adapter.scaling == "rank" else math.sqrt(len(parts))
    return _Matrices(np.concatenate(a, axis=-1), _block_diagonal(b), magnitude, rank * len(parts), alpha * ratio)


def _block_diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """`[..., r, out]` matrices as the blocks of one, so that each has rows of its own of the A that they share."""
    rows = [[np.zeros((*one.shape[:-1], other.shape[-1]), one.dtype) for other in blocks] for one in blocks]
    for number, one in enumerate(blocks):
        rows[number][number] = one
    return np.block(rows)


def _reduce_blocks(
    leaves: dict[str, np.ndarray],
    scales: dict[str, Scale],
    sources: Mapping[str, TensorSource],
    parts: Mapping[str, Sequence[_Part]],
    scaling: str,
) -> None:
    """Takes the blocks of `_block_diagonal` apart: each layer keeps the rank that is its own."""
    stored = dict(scales)  # layers of several groups share an entry
    for each in parts.values():
        paths = sorted((part.path for part in each), key=lambda path: sources[path].columns or ())
        b = [leaves.get(path + _SUFFIXES["B"]) for path in paths]
        if len(paths) < 2 or each[0].number or any(one is None for one in b):
            continue
        rank, alpha = stored[_in_period(paths[0])]
        block_rank, rest = divmod(rank, len(paths))
        used = [
            np.flatnonzero(np.any(one, axis=(*range(one.ndim - 2), -1))) // max(block_rank, 1)
            for one in b
            if one is not None
        ]
        if rest or not any(map(len, used)) or any(np.any(rows != number) for number, rows in enumerate(used)):
            continue
        ratio = len(paths) if scaling == "rank" else math.sqrt(len(paths))
        for number, path in enumerate(paths):
            rows = slice(number * block_rank, (number + 1) * block_rank)
            leaves[path + _SUFFIXES["A"]] = leaves[path + _SUFFIXES["A"]][..., rows]
            leaves[path + _SUFFIXES["B"]] = leaves[path + _SUFFIXES["B"]][..., rows, :]
            scales[_in_period(path)] = block_rank, float(f"{alpha / ratio:.12g}")


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
    """Whether an array holds the kernel of a linear layer or of experts, or some of its columns."""
    if isinstance(source, ExpertParameter):
        return True
    periods = int(is_stacked(path))
    is_kernel = path.endswith(".kernel") and ".blocks." in path and source.names[0].endswith(".weight")
    return is_kernel and source.transposed and len(source.leading) == periods


def _parts(sources: Mapping[str, TensorSource]) -> dict[str, list[_Part]]:
    """The positions of each tensor of a linear layer, by its name without prefix."""
    parts: dict[str, list[_Part]] = {}
    for path, source in sources.items():
        for number, name in enumerate(source.names if _is_linear(path, source) else ()):
            parts.setdefault(name, []).append(_Part(path, number))
    return parts


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
    fields: Mapping[str, Any],
) -> list[Problem]:
    """Every tensor of some arrays that is missing, has another shape, or a dtype that is not supported.

    LoRA's tensors of a layer that the settings leave out may be missing: they are zero.
    """
    problems: list[Problem] = []
    for path in paths:
        inputs, outputs = base[path].shape[-2:]
        rank = 0 if scales is None else scales.get(_in_period(path), (0, 0))[0]
        source = sources[path]
        outputs = (source.columns or (0, 0, outputs))[2]
        rank *= source.experts if isinstance(source, ExpertParameter) else 1
        shapes = {"A": (rank, inputs), "B": (outputs, rank), "magnitude_vector": (outputs,)}
        for side in sides:
            tensors, shape, array = by_side.get((path, side), {}), shapes[side], path + _SUFFIXES[side]
            ending = ".weight" if side in ("A", "B") else ""
            for number, name in enumerate(source.names):
                module = names.get(name) or f"{_module_prefix(names)}{name}".removesuffix(".weight")
                full, tensor = f"base_model.model.{module}.lora_{side}{ending}", tensors.get(number)
                is_expert = isinstance(source, ExpertParameter)
                if tensor is None and not (is_targeted_parameter if is_expert else is_targeted)(fields, module):
                    if "magnitude_vector" in sides:
                        reason = "DoRA of some of the layers that are stacked is not supported; merge it with PEFT"
                        problems.append(Problem(array, f"{module}: is left out by {CONFIG}; {reason}"))
                elif tensor is None:
                    problems.append(Problem(array, f"expected a tensor {full}, there is none"))
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
    """The array of all layers; zero where a layer has no tensor."""

    def array(tensor: safetensors.Tensor) -> np.ndarray:
        if isinstance(source, ExpertParameter):
            return source.to_array(side, tensor.read())
        values = tensor.read().T  # of B and of magnitudes, the layer's own outputs
        return values if side == "A" or source.columns is None else values[..., slice(*source.columns[:2])]

    arrays = {number: array(tensor) for number, tensor in tensors.items()}
    missing = np.zeros_like(next(iter(arrays.values())))
    parts = [arrays.get(number, missing) for number in range(len(source.names))]
    return np.stack(parts) if source.leading else np.array(parts[0])


def _number(value: float) -> int | float:
    """A whole number as an int, as PEFT writes it."""
    return int(value) if float(value).is_integer() else value


def _target_modules(modules: set[str], linears: set[str]) -> dict[str, list[str] | list[int] | None]:
    """Short names ("q_proj"), and numbers of layers, if they cover exactly these modules; else full names."""
    short = {module.rpartition(".")[2] for module in modules}
    layers = {_layer_of(module) for module in modules}
    named = {linear for linear in linears if linear.rpartition(".")[2] in short}
    if named == modules:
        return {"target_modules": sorted(short), "layers_to_transform": None}
    if {linear for linear in named if _layer_of(linear) in layers} == modules:
        return {"target_modules": sorted(short), "layers_to_transform": sorted(layers)}
    return {"target_modules": sorted(modules), "layers_to_transform": None}


def _target_parameters(parameters: set[str], names: set[str]) -> list[str] | None:
    """Short names ("mlp.experts.down_proj") if they cover exactly these parameters; else full names."""
    short = {_in_layer(name) for name in parameters}
    return sorted(short if {name for name in names if _in_layer(name) in short} == parameters else parameters) or None


def _in_layer(module: str) -> str:
    """The name of a module or parameter within its layer."""
    return re.sub(r".*layers\.\d+\.", "", module)


def _layer_of(module: str) -> int:
    """The number of a module's layer."""
    return int(module.partition("layers.")[2].partition(".")[0])


def _without_prefix(module: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if module.startswith(prefix + "layers.")), "")
    return module.removeprefix(prefix)


def _in_period(path: str) -> str:
    return path_in_group(path).removesuffix(".kernel")


def _matches(target: str, path: str) -> bool:
    """Whether a target of `Adapter.LoRA` matches the layer of a kernel, or a module around it."""
    return named(target, _in_period(path))
