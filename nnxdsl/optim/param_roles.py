"""What each trained array is to an optimizer: a matrix with its true axes, a table of tokens, a filter, or a vector.

Knows names of axes and ends of paths; knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from nnxdsl.models.params import ParamSpec

STACKED = ("layers", "experts")
"""Axes along which an array holds one weight after another: each is a matrix, or a vector, of its own."""


class Role(NamedTuple):
    """What an array is.

    Attributes:
        kind: "matrix" for weights of linear layers and the two of an adapter, "table" for embeddings and output heads,
            "filter" for convolutions, "vector" for scales, biases and all else of one axis.
        inputs: Of a matrix, the axis that a product sums over; counted from the end.
        outputs: Of a matrix, the axis that it gives; counted from the end.
    """

    kind: Literal["matrix", "table", "filter", "vector"]
    inputs: int = -2
    outputs: int = -1

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay is for it: not for norms, biases and other vectors."""
        return self.kind != "vector"


def role(path: str, leaf: ParamSpec) -> Role:
    """The role of one array, however many layers and experts are stacked in it."""
    own = [axis for axis in leaf.axes if axis not in STACKED]
    if len(own) < 2:
        return Role("vector")
    if "vocab" in own:
        return Role("table")
    if len(own) > 2:
        return Role("filter")
    # A router's weight has a row for each expert; those of linear layers, and of adapters, have one for each input.
    return Role("matrix", -1, -2) if path.endswith("router.weight") else Role("matrix")


def roles(leaves: Mapping[str, ParamSpec]) -> dict[str, Role]:
    """The role of every array, by path."""
    return {path: role(path, leaf) for path, leaf in leaves.items()}
