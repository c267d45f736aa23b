"""Converts our flat paths to the nested parameter trees of Flax Linen and back, bit for bit.

Linen puts the index of a list into the name: `layers.blocks.0.mlp.up.kernel` is
`{'params': {'layers': {'blocks_0': {'mlp': {'up': {'kernel': ...}}}}}}`, with the scanned axis first, as in
`nn.scan`. In an unrolled tree each layer is separate, under its published number: `layers_7`, `mlp`, `up`, `kernel`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from nnxdsl.errors import WeightsError

Name = tuple[str, ...]
"""The keys of an array in a tree from the top, without the collection "params"."""

PARAMS = "params"

_NUMBERED = re.compile(r"(?P<name>.*\D)_(?P<number>\d+)")
_STACK, _TAIL = ("layers", "blocks"), ("tail", "blocks")


@attrs.frozen
class Part:
    """The part of one of our arrays that an array of a tree holds.

    Attributes:
        path: The path of our array.
        number: The index into its leading axis (the stacked layer groups); None for the whole array.
    """

    path: str
    number: int | None = None


def parts(shapes: Mapping[str, tuple[int, ...]], *, unrolled: bool = False) -> dict[Name, Part]:
    """The part of our arrays that each array of a tree holds.

    Args:
        shapes: Shapes of our arrays, by path.
        unrolled: Whether each layer is separate; else the layer groups stay stacked.

    Returns:
        In the order of our arrays.

    Raises:
        WeightsError: A name that ends like a number from Linen, and would be ambiguous.
    """
    for path in shapes:
        if any(_NUMBERED.fullmatch(key) for key in path.split(".")):
            raise WeightsError(f"{path}: a name that ends in a number is ambiguous in a tree with numbered lists")
    period = _period(shapes)
    tree_parts: dict[Name, Part] = {}
    for path, shape in shapes.items():
        keys = path.split(".")
        block = int(keys[2]) if len(keys) > 3 and keys[2].isdecimal() else 0
        if unrolled and tuple(keys[:2]) == _STACK:
            for number in range(shape[0]):
                tree_parts[(f"layers_{number * period + block}", *_with_indices(keys[3:]))] = Part(path, number)
        elif unrolled and tuple(keys[:2]) == _TAIL:
            tree_parts[(f"layers_{_periods(shapes) * period + block}", *_with_indices(keys[3:]))] = Part(path)
        else:
            tree_parts[_with_indices(keys)] = Part(path)
    return tree_parts


def leaves(names: Iterable[Name], period: int | None = None) -> dict[str, tuple[Name, ...]]:
    """The arrays of a tree that make up each of ours.

    Args:
        names: The arrays of a tree, scanned or unrolled.
        period: Number of layers in a layer group; needed for an unrolled tree.

    Returns:
        By our path: the one array, or those of a stack of layer groups in order; see `is_stacked`.

    Raises:
        WeightsError: Layers are missing from a stack, or the period is needed and not given.
    """
    names = list(names)
    layers = [int(match["number"]) for name in names if (match := _layer_of(name))]
    if layers and period is None:
        raise WeightsError("the layers are unrolled; stacking them needs the model's config.json")
    count = max(layers, default=-1) + 1
    periods = count // period if period else 0
    sources: dict[str, dict[int, Name]] = {}
    for name in names:
        match = _layer_of(name)
        if match is None:
            sources[".".join(_split(name))] = {0: name}
            continue
        assert period is not None
        layer, rest = int(match["number"]), ".".join(_split(name[1:]))
        number, block = divmod(layer, period)
        if number < periods:
            sources.setdefault(f"layers.blocks.{block}.{rest}", {})[number] = name
        else:
            sources[f"tail.blocks.{block}.{rest}"] = {0: name}
    missing = [
        f"layers_{number * (period or 0) + int(path.split('.')[2])}: has no {'.'.join(path.split('.')[3:])}"
        for path, stack in sources.items()
        if layers and path.startswith("layers.blocks.")
        for number in range(periods)
        if number not in stack
    ]
    if missing:
        raise WeightsError("\n  ".join(["arrays of a stack are missing:", *missing]))
    return {path: tuple(stack[number] for number in sorted(stack)) for path, stack in sources.items()}


def is_stacked(path: str, sources: tuple[Name, ...]) -> bool:
    """Whether one of our arrays is the stack of its sources, rather than a single source itself."""
    return path.startswith("layers.blocks.") and _layer_of(sources[0]) is not None


def to_tree(arrays: Mapping[str, Any], *, unrolled: bool = False) -> dict[str, Any]:
    """Converts our arrays to a tree `{'params': {...}}`.

    Args:
        arrays: Arrays by path.
        unrolled: See `parts`.
    """
    shapes = {path: tuple(array.shape) for path, array in arrays.items()}
    tree: dict[str, Any] = {}
    for name, part in parts(shapes, unrolled=unrolled).items():
        array = arrays[part.path]
        put(tree, name, array if part.number is None else array[part.number])
    return {PARAMS: tree}


def from_tree(tree: Mapping[str, Any], period: int | None = None) -> dict[str, Any]:
    """Converts a tree, with or without its collection, to our arrays.

    Args:
        tree: Scanned or unrolled.
        period: See `leaves`.
    """
    flat = dict(flat_tree(tree))
    return {path: assemble(path, sources, flat.__getitem__) for path, sources in leaves(flat, period).items()}


def assemble(path: str, sources: tuple[Name, ...], read: Callable[[Name], Any]) -> Any:
    """One of our arrays from its sources."""
    if not is_stacked(path, sources):
        return read(sources[0])
    return np.stack([np.asarray(read(name)) for name in sources])


def flat_tree(tree: Mapping[str, Any], prefix: Name = ()) -> Iterator[tuple[Name, Any]]:
    """The arrays of a tree by name, without its collection "params", which MaxText nests twice."""
    while not prefix and set(tree) == {PARAMS} and isinstance(tree[PARAMS], Mapping):
        tree = tree[PARAMS]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_tree(value, (*prefix, str(key)))
        else:
            yield (*prefix, str(key)), value


def put(tree: dict[str, Any], name: Name, value: Any) -> None:
    """Inserts an array into a tree under its name."""
    for key in name[:-1]:
        tree = tree.setdefault(key, {})
    tree[name[-1]] = value


def without_collection(name: Name) -> Name:
    """The name without leading "params", of which MaxText nests two."""
    while len(name) > 1 and name[0] == PARAMS:
        name = name[1:]
    return name


def _with_indices(keys: list[str]) -> Name:
    """Appends indices of lists to the names before them: ("blocks", "0") becomes ("blocks_0",)."""
    joined: list[str] = []
    for key in keys:
        if key.isdecimal() and joined:
            joined[-1] += f"_{key}"
        else:
            joined.append(key)
    return tuple(joined)


def _split(name: Name) -> list[str]:
    parts_of_name: list[str] = []
    for key in name:
        match = _NUMBERED.fullmatch(key)
        parts_of_name += [match["name"], match["number"]] if match else [key]
    return parts_of_name


def _layer_of(name: Name) -> re.Match[str] | None:
    return re.fullmatch(r"layers_(?P<number>\d+)", name[0]) if len(name) > 1 else None


def _period(shapes: Iterable[str]) -> int:
    """Number of layers in a layer group, from the paths of the stack."""
    blocks = [int(keys[2]) for keys in (path.split(".") for path in shapes) if tuple(keys[:2]) == _STACK]
    return max(blocks, default=-1) + 1


def _periods(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next((shape[0] for path, shape in shapes.items() if tuple(path.split(".")[:2]) == _STACK), 0)
