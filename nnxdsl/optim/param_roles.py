"""The role of each trained array for optimizers: a matrix with its axes, an embedding table, a filter or a vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from nnxdsl.models.params import ParamSpec

STACKED = ("layers", "experts")
"""Logical axes that stack weights: each entry along them is a matrix or vector of its own."""


class Role(NamedTuple):
    """The role of an array.

    Attributes:
        kind: "matrix" for weights of linear layers and of adapters, "table" for embeddings and output heads, "filter"
            for convolutions, "vector" for scales, biases and everything else with one axis.
        inputs: For a matrix, the axis that a product sums over, counted from the end.
        outputs: For a matrix, the axis of the product's result, counted from the end.
    """

    kind: Literal["matrix", "table", "filter", "vector"]
    inputs: int = -2
    outputs: int = -1

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies: to all but norms, biases and other vectors."""
        return self.kind != "vector"


def role(path: str, leaf: ParamSpec) -> Role:
    """The role of one array, ignoring the axes that stack layers and experts."""
    axes = [axis for axis in leaf.axes if axis not in STACKED]
    if len(axes) < 2:
        return Role("vector")
    if "vocab" in axes or "per_layer_vocab" in axes:
        return Role("table")
    if len(axes) > 2:
        return Role("filter")
    # A router's weight is [experts, in]; those of linear layers and adapters are [in, out].
    return Role("matrix", -1, -2) if path.endswith("router.weight") else Role("matrix")


def roles(leaves: Mapping[str, ParamSpec]) -> dict[str, Role]:
    """The role of every array, by path."""
    return {path: role(path, leaf) for path, leaf in leaves.items()}
