"""Patterns for paths of arrays, such as `layers.*.mlp`; a star matches any part of a path, dots included."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from nnxdsl.errors import Problem, suggest
from nnxdsl.models.params import STACKS

COMMON = (*STACKS, "blocks", "kernel", "scale")
"""Parts of most paths, which are not suggested for a pattern without a match."""


def matches(patterns: Sequence[str], path: str) -> bool:
    """Whether a pattern names the array or a module that has it: "embed", "mlp.up", "*norm", "tail.*.bias"."""
    return any(fnmatch.fnmatchcase(f".{path}.", f"*.{pattern}.*") for pattern in patterns)


def unmatched_patterns(field: str, patterns: Sequence[str], paths: Iterable[str]) -> list[Problem]:
    """A problem for each pattern of a field that matches none of the paths; suggests the nearest name."""
    all_paths = list(paths)
    parts = {part for path in all_paths for part in path.split(".") if not part.isdigit() and part not in COMMON}
    return [
        Problem(f"{field}.{index}", f"'{pattern}' names no array{suggest(pattern, parts)}")
        for index, pattern in enumerate(patterns)
        if not any(matches((pattern,), path) for path in all_paths)
    ]
