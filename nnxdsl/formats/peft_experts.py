"""LoRA of experts in PEFT's format: adapters of the parameters in which transformers stacks them (`target_parameters`).

Whatever the form of a checkpoint, PEFT adapts `gate_up_proj` (`up_proj` without a gate) and `down_proj` of a module
`experts`. With E experts of rank r, A is `[E r, in]`, the rows of one expert after those of another, and B
`[out, r E]`, in whose columns the experts alternate. Where both parameters of a module have one, PEFT nests them: the
tensors of the first are those of `experts.base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from nnxdsl.models.config.tensors import TensorSource
from nnxdsl.models.params import is_stacked

_TENSOR = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+\.)?(?P<matrix>\w+?)(?:\.weight)?")
_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NESTED = ".base_layer"


@attrs.frozen
class ExpertParameter(TensorSource):
    """The parameters of transformers in which experts are stacked, one for each layer of an array.

    Attributes:
        experts: their number. With `share`, the columns of gate and up alternate in the parameter.
    """

    experts: int = attrs.field(kw_only=True)

    def to_array(self, side: str, matrix: np.ndarray) -> np.ndarray:
        """A `[E, in, r]` or B `[E, r, out]` of this array from PEFT's; B has the columns of this array alone."""
        if side == "A":
            return matrix.reshape(self.experts, -1, matrix.shape[-1]).swapaxes(-1, -2)
        b = matrix.reshape(matrix.shape[0], -1, self.experts).transpose(2, 1, 0)
        number, count = self.share
        if count > 1:
            return b[..., number::count]
        return b if self.columns is None else b[..., slice(*self.columns[:2])]

    def from_array(self, side: str, array: np.ndarray) -> np.ndarray:
        """PEFT's A or B from `[E, in, r]` or `[E, r, out]`, the columns of all arrays that the parameter joins."""
        if side == "A":
            return array.swapaxes(-1, -2).reshape(-1, array.shape[-2])
        if self.share[1] > 1:
            array = array.reshape(*array.shape[:-1], self.share[1], -1).swapaxes(-1, -2).reshape(array.shape)
        return array.transpose(2, 1, 0).reshape(array.shape[-1], -1)


def expert_parameters(
    sources: Mapping[str, TensorSource], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ExpertParameter]:
    """The parameters of the experts' kernels, by path.

    Llama 4's are not among them: PEFT takes their inputs for outputs.

    Args:
        sources: Of all arrays of the base model.
        shapes: The numbers of experts and of outputs of kernels, of all whose arrays are read or written.
    """
    parameters: dict[str, ExpertParameter] = {}
    for path, source in sources.items():
        match = _TENSOR.fullmatch(source.names[0])
        if match is None or not path.endswith(".kernel") or ".feed_forward." in source.names[0]:
            continue
        experts, width = shapes.get(path, (source.leading[-1] if match["number"] else 1, 0))
        matrix = _MATRICES.get(match["matrix"], match["matrix"])
        names = source.names[:: 1 if match["number"] is None else experts]
        columns = None
        is_gate = path.endswith(".gate.kernel")
        if is_gate or path.removesuffix(".up.kernel") + ".gate.kernel" in sources:
            start = 0 if is_gate else width
            columns, matrix = (start, start + width, 2 * width), "gate_up_proj"
        modules = (one[: one.rindex(".experts.")].replace("block_sparse_moe", "mlp") for one in names)
        parameters[path] = ExpertParameter(
            tuple(f"{module}.experts.{matrix}" for module in modules),
            source.leading[: int(is_stacked(path))],
            share=source.share,
            columns=columns,
            experts=experts,
        )
    return parameters


def parameter_of(module: str, parameters: Iterable[str], settings: Mapping[str, Any]) -> str | None:
    """The parameter that tensors of a module such as `layers.0.mlp.experts.base_layer` adapt; None if there is none.

    Args:
        module: The module's name without a prefix.
        parameters: Names without a prefix, in the order in which transformers defines them.
        settings: The adapter config.
    """
    outer = module.partition(_NESTED)[0]
    inside = (name for name in parameters if name.rpartition(".")[0] == outer)
    targeted = [name for name in dict.fromkeys(inside) if is_targeted_parameter(settings, name)]
    depth = module.count(_NESTED)
    is_nested = module == outer + depth * _NESTED
    return targeted[-1 - depth] if is_nested and depth < len(targeted) else None


def is_targeted_parameter(settings: Mapping[str, Any], name: str) -> bool:
    """Whether `target_parameters` has a parameter's name, or an end of it."""
    targets = settings.get("target_parameters")
    ends = targets if isinstance(targets, list) else []
    return any(f".{end}".endswith(f".{name}") or f".{name}".endswith(f".{end}") for end in ends)


def nested_modules(parameters: Iterable[str]) -> dict[str, str]:
    """The module that has a parameter's tensors, by the name of the parameter, for all that are adapted in a model."""
    modules: dict[str, str] = {}
    for name in parameters:
        module = name.rpartition(".")[0]
        modules = {one: path + _NESTED * one.startswith(module + ".") for one, path in modules.items()}
        modules[name] = module
    return modules
