"""Differences between experiments, and what they mean for a comparison of metrics. Works on JSON trees only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NAMES = ("name", "notes", "schema")  # fields that are ignored in comparisons
ABSENT = "-"
MAX_DEPTH = 40


class Unfair(NamedTuple):
    """What makes metrics of runs hard to compare: its name, why in one sentence, and the fields that differ."""

    what: str
    why: str
    paths: tuple[str, ...]


CHECKS = (
    Unfair("data", "They train on different rows, so a lower loss does not imply a better method.", ("data",)),
    Unfair("base model", "They start from different models or weights.", ("model",)),
    Unfair("seed", "Data order and adapter initialization differ: small differences are noise.", ("seed",)),
    Unfair(
        "objective",
        "Losses and rewards of different objectives, or of one with another beta, are different quantities; compare "
        "accuracies, or answers.",
        ("objective",),
    ),
    Unfair("held-out data", "Metrics on held-out data are computed on different rows.", ("evaluation.data",)),
    Unfair(
        "size of a step", "Steps have different numbers of rows: plot over tokens instead of steps.", ("batch_size",)
    ),
)
"""Fields that must be equal in a comparison."""


def flat(tree: Any, path: str = "") -> dict[str, str]:
    """Flattens a JSON tree into `{path: text}`; a list of plain values is one leaf.

    >>> flat({"model": {"type": "Gemma3"}, "rules": [1, 2]})
    {'model.type': 'Gemma3', 'rules': '[1, 2]'}
    """
    children = tree if isinstance(tree, dict) else {}
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        children = dict(enumerate(tree))
    if not children or path.count(".") >= MAX_DEPTH:
        return {path: tree if isinstance(tree, str) else json.dumps(tree)}
    each = [flat(child, f"{path}.{name}" if path else str(name)) for name, child in children.items()]
    return {name: text for leaves in each for name, text in leaves.items()}


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
    changed = [path for path in brief(configs, differing(configs)) if path not in NAMES]
    differences = [
        check._replace(
            paths=tuple(path for path in changed if f"{path}.".startswith(tuple(f"{root}." for root in check.paths)))
        )
        for check in CHECKS
    ]
    return [one for one in differences if one.paths]
