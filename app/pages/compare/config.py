"""Differences between experiments, and what they mean for a comparison of metrics. Works on JSON trees only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

NAMES = ("name", "notes", "schema")
"""Fields that are ignored in comparisons."""

ABSENT = "-"


@attrs.frozen
class Unfair:
    """A difference between runs that makes their metrics hard to compare.

    Attributes:
        what: Short name.
        why: Explanation, one sentence.
        paths: Fields that differ.
    """

    what: str
    why: str
    paths: tuple[str, ...]


CHECKS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("data", ("data",), "They train on different rows, so a lower loss does not imply a better method."),
    ("base model", ("model",), "They start from different models or weights."),
    (
        "seed",
        ("seed",),
        "Data order and adapter initialization differ: small differences are noise.",
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
        "Metrics on held-out data are computed on different rows.",
    ),
    (
        "size of a step",
        ("batch_size",),
        "Steps have different numbers of rows: plot over tokens instead of steps.",
    ),
)
"""Checks of a comparison: a name, the fields (with their subfields) that must be equal, and an explanation."""


def flat(tree: Any) -> dict[str, str]:
    """Flattens a JSON tree into `{path: text}`; a list of plain values is one leaf.

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
    """Returns the paths whose values differ, ordered by first occurrence."""
    return [path for path in paths(configs) if len({config.get(path, ABSENT) for config in configs}) > 1]


def paths(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns all paths, ordered by first occurrence."""
    return list(dict.fromkeys(path for config in configs for path in config))


def brief(configs: Sequence[Mapping[str, str]], changed: Sequence[str]) -> list[str]:
    """Drops paths inside an earlier experiment that some configs lack, except for that experiment's name."""

    def is_shown(path: str) -> bool:
        start, stage, field = path.partition(".experiment.")
        if not stage or field == "name":
            return True
        return all(any(other.startswith(start + stage) for other in config) for config in configs)

    return [path for path in changed if is_shown(path)]


def unfair(configs: Sequence[Mapping[str, str]]) -> list[Unfair]:
    """Returns the differences that make metrics of these runs hard to compare; empty if there are none."""
    changed = brief(configs, [path for path in differing(configs) if path not in NAMES])
    found: list[Unfair] = []
    for what, roots, why in CHECKS:
        here = tuple(path for path in changed if any(path == root or path.startswith(f"{root}.") for root in roots))
        if here:
            found.append(Unfair(what, why, here))
    return found
