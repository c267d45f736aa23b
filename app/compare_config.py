"""What several experiments differ in, and what that means for a comparison of their figures; knows JSON trees alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

NAMES = ("name", "notes", "schema")
"""Differ from run to run and mean nothing."""

ABSENT = "-"


@attrs.frozen
class Unfair:
    """Something in which runs differ, and why their figures then mean different things.

    Attributes:
        what: In a word or two.
        why: A sentence.
        paths: The fields that differ.
    """

    what: str
    why: str
    paths: tuple[str, ...]


CHECKS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("data", ("data",), "They learn from different rows, so a lower loss need not mean a better method."),
    ("base model", ("model",), "They start from different models or weights."),
    (
        "seed",
        ("seed",),
        "They meet the data in another order and begin with other adapters: small differences are noise.",
    ),
    (
        "objective",
        ("objective",),
        "Losses and rewards of different objectives, or of one with another beta, are different quantities; compare "
        "accuracies, or answers.",
    ),
    (
        "held-out data",
        ("evaluation.data",),
        "Figures on held-out rows are of different rows.",
    ),
    (
        "size of a step",
        ("batch_size",),
        "A step is not as many rows in each: draw the curves over tokens rather than steps.",
    ),
)
"""What makes a comparison unfair: a name, the fields below which a difference counts, and why."""


def flat(tree: Any) -> dict[str, str]:
    """Every leaf of a JSON tree by its path, as text; lists of plain values are one leaf.

    >>> flat({"model": {"type": "Gemma3"}, "rules": [1, 2]})
    {'model.type': 'Gemma3', 'rules': '[1, 2]'}
    """
    found: dict[str, str] = {}

    def walk(value: Any, path: str, depth: int) -> None:
        if isinstance(value, dict) and value and depth < 40:
            for name, child in value.items():
                walk(child, f"{path}.{name}" if path else str(name), depth + 1)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value) and depth < 40:
            for index, child in enumerate(value):
                walk(child, f"{path}.{index}", depth + 1)
        else:
            found[path] = value if isinstance(value, str) else json.dumps(value)

    walk(tree, "", 0)
    return found


def differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The paths at which not all have the same, in the order of the first that has them."""
    return [path for path in paths(configs) if len({config.get(path, ABSENT) for config in configs}) > 1]


def paths(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """All paths, in the order of the first config that has them."""
    return list(dict.fromkeys(path for config in configs for path in config))


def brief(configs: Sequence[Mapping[str, str]], changed: Sequence[str]) -> list[str]:
    """These paths without those of an earlier experiment that some do not have, of which the name alone remains."""

    def is_shown(path: str) -> bool:
        start, stage, field = path.partition(".experiment.")
        if not stage or field == "name":
            return True
        return all(any(other.startswith(start + stage) for other in config) for config in configs)

    return [path for path in changed if is_shown(path)]


def unfair(configs: Sequence[Mapping[str, str]]) -> list[Unfair]:
    """Why figures of these runs cannot be compared as they are; empty if they can."""
    changed = brief(configs, [path for path in differing(configs) if path not in NAMES])
    found: list[Unfair] = []
    for what, roots, why in CHECKS:
        here = tuple(path for path in changed if any(path == root or path.startswith(f"{root}.") for root in roots))
        if here:
            found.append(Unfair(what, why, here))
    return found
