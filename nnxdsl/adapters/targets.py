"""The layers that the targets of adapters and quantizations match, and problems with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from nnxdsl.adapters.lora_math import A
from nnxdsl.adapters.weight_only_quant import QVALUE
from nnxdsl.config.adapter import HUB_NAMES, Adapter, DoRA, LoRA, LowRank, named
from nnxdsl.config.quantization import Quantization
from nnxdsl.errors import Problem, nearest, suggest
from nnxdsl.models.params import AbstractModel, ParamSpec, path_in_group
from nnxdsl.sharding.layout import starred

_HEAD_KERNEL = "lm_head.kernel"
_HEADS = ("lm_head", "embed_tokens", "embedder", "embedding", "head")


def matches(path: str, spec: Adapter | Quantization | None) -> bool:
    """Whether a target of `spec` matches the path of a layer within its layer group."""
    return spec is not None and any(named(target, path) for target in spec.targets)


def is_targeted(path: str, spec: Adapter | Quantization | None) -> bool:
    """Whether a target of `spec` matches the layer that an array belongs to."""
    return matches(path_in_group(path).rpartition(".")[0], spec)


def problems(
    adapter: Adapter | None, quantization: Quantization | None, base: Mapping[str, ParamSpec]
) -> list[Problem]:
    """Targets and patterns that match no linear layer, dropout of experts, block sizes that do not divide weights."""
    linears = {
        path_in_group(path).removesuffix(".kernel"): leaf
        for path, leaf in base.items()
        if path.endswith(".kernel") and path != _HEAD_KERNEL
    }
    listed: list[Problem] = []
    for field, spec in (("adapter", adapter), ("quantization", quantization)):
        for index, target in enumerate(spec.targets if spec is not None else ()):
            if not any(named(target, path) for path in linears):
                listed.append(Problem(f"{field}.targets.{index}", _unmatched(target, field, linears)))
    if isinstance(adapter, LoRA | DoRA):
        listed += _pattern_problems(adapter, linears)
    if quantization is not None:
        targeted = {path: leaf for path, leaf in linears.items() if matches(path, quantization)}
        if not quantization.freezes:
            listed += [
                Problem(
                    "quantization.targets", f"{path} is of experts, whose products cannot be quantized; name others"
                )
                for path in dict.fromkeys(starred(path) for path, leaf in targeted.items() if "experts" in leaf.axes)
            ]
        block = quantization.block_size or 1
        sizes = {starred(path): leaf.shape[-2] for path, leaf in targeted.items()}
        listed += [
            Problem("quantization.block_size", f"{size} inputs of {path} are not divisible by blocks of {block}")
            for path, size in sizes.items()
            if size % block
        ]
    return listed


def _unmatched(target: str, field: str, linears: Iterable[str]) -> str:
    """Why a target is refused, with the name that it may have been meant to be, else with those that there are."""
    if target.rpartition(".")[2] in _HEADS:
        what = "output head" if "head" in target else "embedding"
        remedy = " (adapter=None trains all weights)" if field == "adapter" else ""
        return f"'{target}' takes no {field}: the {what} stays as it is; name linear layers of blocks{remedy}"
    parts = sorted({part for path in linears for part in path.split(".")[2:]})
    hub = sorted(name for name in HUB_NAMES if any(named(name, path) for path in linears))
    listed = f"; there are: {', '.join(parts)}, or as transformers names them: {', '.join(hub)}"
    return f"'{target}' matches no linear layer{nearest(target, parts + hub) or listed}"


def _pattern_problems(adapter: LowRank, linears: Mapping[str, ParamSpec]) -> Iterator[Problem]:
    """Patterns without effect, and dropout on experts."""
    targeted = {path: leaf for path, leaf in linears.items() if matches(path, adapter)}
    parts = {part for path in targeted for part in path.split(".")[2:]}
    for field, patterns in (("ranks", adapter.ranks), ("alphas", adapter.alphas)):
        left = set(targeted)
        for index, (target, _) in enumerate(patterns):
            matched = {path for path in targeted if named(target, path)}
            if not matched:
                message = f"'{target}' matches no layer that the adapter is on{suggest(target, parts)}"
                yield Problem(f"adapter.{field}.{index}.0", message)
            elif not matched & left:
                message = (
                    f"'{target}' has no effect: earlier patterns match all of its layers, and the first one counts"
                )
                yield Problem(f"adapter.{field}.{index}.0", message)
            left -= matched
    experts = next((path for path, leaf in targeted.items() if "experts" in leaf.axes), None)
    if adapter.dropout and experts is not None:
        message = (
            f"{starred(experts)} is of experts, where dropout is not supported, since they see the tokens in another "
            "order; target other layers, or set 0.0"
        )
        yield Problem("adapter.dropout", message)


def missed(
    adapter: Adapter | None, quantization: Quantization | None, template: AbstractModel, base: Mapping[str, ParamSpec]
) -> list[Problem]:
    """Targeted layers that are unchanged in `template`: qwix silently skips layers that it does not recognize."""
    frozen_format = quantization if quantization is not None and quantization.freezes else None
    return [
        Problem(f"{field}.targets", f"{path} was targeted but is unchanged")
        for field, spec, suffix in (("adapter", adapter, A), ("quantization", frozen_format, QVALUE))
        for path in base
        if path.endswith(".kernel") and is_targeted(path, spec) and path + suffix not in template.variables
    ]
