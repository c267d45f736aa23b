"""Our flat paths as the nested trees of Flax Linen, and back, bit for bit; knows names and axes, no files.

Linen numbers what stands in a list by name: `layers.blocks.0.mlp.up.kernel` is
`{'params': {'layers': {'blocks_0': {'mlp': {'up': {'kernel': ...}}}}}}`, with the axis of a scan over layers first, as
`nn.scan` has it. Unrolled, each layer stands by itself under its published number: `layers_7`, `mlp`, `up`, `kernel`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from nnxdsl.errors import WeightsError

Name = tuple[str, ...]
"""Where an array is in a tree: its keys from the top, the collection "params" left out."""

PARAMS = "params"

_NUMBERED = re.compile(r"(?P<name>.*\D)_(?P<number>\d+)")
_STACK, _TAIL = ("layers", "blocks"), ("tail", "blocks")


@attrs.frozen
class Part:
    """What of one of our leaves an array of a tree is.

    Attributes:
        path: the leaf's.
        number: the place in the leaf's stack of periods; None for the whole leaf.
    """

    path: str
    number: int | None = None


def parts(shapes: Mapping[str, tuple[int, ...]], *, unrolled: bool = False) -> dict[Name, Part]:
    """What each array of a tree is made of.

    Args:
        shapes: of our leaves, by path.
        unrolled: each layer by itself, and not the periods of a stack together.

    Returns:
        In the order of the leaves.

    Raises:
        WeightsError: a name that looks like one that Linen has numbered, and could not be told from it.
    """
    for path in shapes:
        if any(_NUMBERED.fullmatch(key) for key in path.split(".")):
            raise WeightsError(f"{path}: a name that ends in a number cannot be told from a numbered one in a tree")
    period = _period(shapes)
    found: dict[Name, Part] = {}
    for path, shape in shapes.items():
        keys = path.split(".")
        block = int(keys[2]) if len(keys) > 3 and keys[2].isdecimal() else 0
        if unrolled and tuple(keys[:2]) == _STACK:
            for number in range(shape[0]):
                found[(f"layers_{number * period + block}", *_joined(keys[3:]))] = Part(path, number)
        elif unrolled and tuple(keys[:2]) == _TAIL:
            found[(f"layers_{_periods(shapes) * period + block}", *_joined(keys[3:]))] = Part(path)
        else:
            found[_joined(keys)] = Part(path)
    return found


def leaves(names: Iterable[Name], period: int | None = None) -> dict[str, tuple[Name, ...]]:
    """Of which arrays of a tree each of our leaves is made.

    Args:
        names: the arrays of a tree, scanned or unrolled.
        period: layers of one period, which an unrolled tree does not say.

    Returns:
        By path of ours: the one array, or those of a stack of periods in order; `is_stacked` tells.

    Raises:
        WeightsError: layers are missing from a stack, or the period is needed and not given.
    """
    names = list(names)
    layers = [int(match["number"]) for name in names if (match := _layer_of(name))]
    if layers and period is None:
        raise WeightsError("layers stand each by themselves; to stack them, the network's config.json must be known")
    count = max(layers, default=-1) + 1
    periods = count // period if period else 0
    found: dict[str, dict[int, Name]] = {}
    for name in names:
        match = _layer_of(name)
        if match is None:
            found[".".join(_split(name))] = {0: name}
            continue
        assert period is not None
        layer, rest = int(match["number"]), ".".join(_split(name[1:]))
        number, block = divmod(layer, period)
        if number < periods:
            found.setdefault(f"layers.blocks.{block}.{rest}", {})[number] = name
        else:
            found[f"tail.blocks.{block}.{rest}"] = {0: name}
    missing = [
        f"layers_{number * (period or 0) + int(path.split('.')[2])}: has no {'.'.join(path.split('.')[3:])}"
        for path, stack in found.items()
        if layers and path.startswith("layers.blocks.")
        for number in range(periods)
        if number not in stack
    ]
    if missing:
        raise WeightsError("\n  ".join(["arrays of a stack are missing:", *missing]))
    return {path: tuple(stack[number] for number in sorted(stack)) for path, stack in found.items()}


def is_stacked(path: str, made_of: tuple[Name, ...]) -> bool:
    """Whether a leaf is the stack of what it is made of, and not the one array itself."""
    return path.startswith("layers.blocks.") and _layer_of(made_of[0]) is not None


def to_tree(arrays: Mapping[str, Any], *, unrolled: bool = False) -> dict[str, Any]:
    """Our leaves as a tree `{'params': {...}}`.

    Args:
        arrays: by path.
        unrolled: as of `parts`.
    """
    shapes = {path: tuple(array.shape) for path, array in arrays.items()}
    tree: dict[str, Any] = {}
    for name, part in parts(shapes, unrolled=unrolled).items():
        array = arrays[part.path]
        put(tree, name, array if part.number is None else array[part.number])
    return {PARAMS: tree}


def from_tree(tree: Mapping[str, Any], period: int | None = None) -> dict[str, Any]:
    """Our leaves from a tree, with or without its collection.

    Args:
        tree: scanned or unrolled.
        period: as of `leaves`.
    """
    flat = dict(flat_tree(tree))
    return {path: assemble(path, made_of, flat.__getitem__) for path, made_of in leaves(flat, period).items()}


def assemble(path: str, made_of: tuple[Name, ...], read: Callable[[Name], Any]) -> Any:
    """One of our leaves from the arrays that it is made of."""
    if not is_stacked(path, made_of):
        return read(made_of[0])
    return np.stack([np.asarray(read(name)) for name in made_of])


def flat_tree(tree: Mapping[str, Any], above: Name = ()) -> Iterator[tuple[Name, Any]]:
    """The arrays of a tree by name, its collection "params" left out, once or (as MaxText saves it) twice."""
    while not above and set(tree) == {PARAMS} and isinstance(tree[PARAMS], Mapping):
        tree = tree[PARAMS]
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_tree(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value


def put(tree: dict[str, Any], name: Name, value: Any) -> None:
    """Puts an array where its name says."""
    for key in name[:-1]:
        tree = tree.setdefault(key, {})
    tree[name[-1]] = value


def _joined(keys: list[str]) -> Name:
    """Positions of lists put behind the names before them: ("blocks", "0") is ("blocks_0",)."""
    found: list[str] = []
    for key in keys:
        if key.isdecimal() and found:
            found[-1] += f"_{key}"
        else:
            found.append(key)
    return tuple(found)


def _split(name: Name) -> list[str]:
    found: list[str] = []
    for key in name:
        match = _NUMBERED.fullmatch(key)
        found += [match["name"], match["number"]] if match else [key]
    return found


def _layer_of(name: Name) -> re.Match[str] | None:
    return re.fullmatch(r"layers_(?P<number>\d+)", name[0]) if len(name) > 1 else None


def _period(shapes: Iterable[str]) -> int:
    """Layers of one period, of which the stack's paths tell."""
    blocks = [int(keys[2]) for keys in (path.split(".") for path in shapes) if tuple(keys[:2]) == _STACK]
    return max(blocks, default=-1) + 1


def _periods(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next((shape[0] for path, shape in shapes.items() if tuple(path.split(".")[:2]) == _STACK), 0)
