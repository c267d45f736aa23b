"""The flat view of a model: arrays by dotted path, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import jax
from flax import nnx

STACKS = ("lead", "layers", "tail", "kv_sharing")
"""The layer groups of a decoder, in their order; those of "layers" and "kv_sharing" are stacked."""


@attrs.frozen
class ParamSpec:
    """The shape, dtype and logical axes of an array.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        axes: the logical name of each axis, None where it has none.
        kind: the class of its Variable: `nnx.Param`, `nnx.LoRAParam`, ...
    """

    shape: tuple[int, ...]
    dtype: jax.numpy.dtype
    axes: tuple[str | None, ...]
    kind: type[nnx.Variable]


class AbstractModel:
    """A module without its arrays: its graphdef, and the spec of each array.

    Attributes:
        graphdef: the static part.
        variables: `ParamSpec` by dotted path, in the order of the paths.
    """

    def __init__(self, graphdef: nnx.GraphDef, flat: Iterable[tuple[tuple[Any, ...], nnx.Variable]]) -> None:
        self.graphdef = graphdef
        self._flat = {join(path): (path, variable) for path, variable in flat}
        self.variables: dict[str, ParamSpec] = {
            path: _leaf(path, variable) for path, (_, variable) in self._flat.items()
        }

    def merge(self, leaves: Mapping[str, jax.Array]) -> nnx.Module:
        """The module with these arrays; may be called inside `jit`.

        Args:
            leaves: an array for each path of `variables`, no more and no fewer.

        Returns:
            The module.

        Raises:
            KeyError: a path is missing or unknown.
        """
        if leaves.keys() != self._flat.keys():
            missing = sorted(self._flat.keys() - leaves.keys())
            unknown = sorted(leaves.keys() - self._flat.keys())
            raise KeyError(f"arrays do not match the model: missing {missing}, unknown {unknown}")
        state = nnx.from_flat_state(
            [(path, variable.replace(leaves[name])) for name, (path, variable) in self._flat.items()]
        )
        return nnx.merge(self.graphdef, state)


def abstract(build: Callable[[], nnx.Module]) -> AbstractModel:
    """The abstract model of what a constructor builds; it is traced, and no arrays are made."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    return AbstractModel(graphdef, nnx.to_flat_state(state))


def flatten(module: nnx.Module) -> dict[str, jax.Array]:
    """The arrays of a module by dotted path, as `AbstractModel.merge` takes them."""
    return {join(path): variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(module))}


def is_mtp_param(path: str) -> bool:
    """Whether a path is one of the multi-token-prediction (MTP) layer."""
    return path.startswith("mtp.")


def is_indexer_param(path: str) -> bool:
    """Whether a path is one of the indexer of a layer with sparse attention."""
    return ".attention.indexer." in path


def is_stacked(path: str) -> bool:
    """Whether a path is one of a stack of layers, whose arrays have a leading axis of periods."""
    return path.startswith(("layers.", "kv_sharing."))


def path_in_group(path: str) -> str:
    """A path within its layer group: `layers.blocks.0.mlp.up.kernel` to `blocks.0.mlp.up.kernel`."""
    first, _, rest = path.partition(".")
    return rest if first in STACKS else path


def join(path: Iterable[Any]) -> str:
    """A path of attribute names and list indices as a dotted string."""
    return ".".join(str(part) for part in path)


def _leaf(path: str, variable: nnx.Variable) -> ParamSpec:
    value = variable.get_value()
    axes = variable.get_metadata().get("axes") or (None,) * len(value.shape)
    if len(axes) != len(value.shape):
        raise ValueError(f"{path}: {len(axes)} logical axes {axes} for shape {tuple(value.shape)}")
    return ParamSpec(tuple(value.shape), value.dtype, tuple(axes), type(variable))
