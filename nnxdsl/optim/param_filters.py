"""Patterns for the paths of arrays, such as `layers.*.mlp`: what they name, and what is wrong where that is nothing.

They name modules as the targets of adapters do; a star stands for any part of a path, dots included.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from nnxdsl.errors import Problem, suggest
from nnxdsl.models.params import STACKS

PLAIN = (*STACKS, "blocks", "kernel", "scale")
"""Parts of paths that tell little, so that nobody who mistyped is shown them."""


def matches(patterns: Sequence[str], path: str) -> bool:
    """Whether one of the patterns names an array, or a module around it: "embed", "mlp.up", "*norm", "tail.*.bias"."""
    return any(fnmatch.fnmatchcase(f".{path}.", f"*.{pattern}.*") for pattern in patterns)


def unmatched_patterns(where: str, patterns: Sequence[str], paths: Iterable[str]) -> list[Problem]:
    """A problem for each pattern that names none of the paths, with the nearest name that there is, or all of them."""
    all_paths = list(paths)
    parts = {part for path in all_paths for part in path.split(".") if not part.isdigit() and part not in PLAIN}
    return [
        Problem(f"{where}.{index}", f"'{pattern}' names no array{suggest(pattern, parts)}")
        for index, pattern in enumerate(patterns)
        if not any(matches((pattern,), path) for path in all_paths)
    ]
