"""Selects arrays of a plan by path or pattern, and groups arrays of the same layout."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnxdsl.errors import RunError

Array = Mapping[str, Any]
"""One of the plan's `arrays`."""

_SHOWN = 6
_LAYOUT = ("group", "shape", "dtype", "axes", "spec", "device_shape", "replicas", "memory", "why")


def by_layout(arrays: Sequence[Array], extra: Callable[[Array], str] = lambda _: "") -> list[list[Array]]:
    """Arrays of a group with the same layout (and the same `extra`) together, in the order of the first of each."""
    groups: dict[str, list[Array]] = {}
    for array in arrays:
        groups.setdefault(json.dumps([extra(array), *(array[name] for name in _LAYOUT)]), []).append(array)
    return list(groups.values())


def array_name(group: Sequence[Array]) -> str:
    """The path of an array, or the group's (with a star for the number of a block) where there are several."""
    return group[0]["path"] if len({array["path"] for array in group}) == 1 else group[0]["group"]


def select(arrays: Sequence[Array], path: str) -> tuple[list[list[Array]], bool]:
    """The arrays that a path means, by layout; and whether it is the exact path or group of all of them.

    Args:
        arrays: Of the plan.
        path: A path; a group (with a star for the number of a block); any pattern with stars; or the end of a path
            (`mlp.up.kernel`), which means the optimizer's arrays only where no others end so. `PART:` before it takes
            those of one part.

    Raises:
        RunError: No array matches; names the nearest paths.
    """
    part, colon, rest = path.partition(":")
    chosen = [array for array in arrays if array["part"] == part] if colon else list(arrays)
    pattern = rest if colon else path
    exact = [array for array in chosen if pattern in (array["path"], array["group"])]
    matched = exact or [
        array
        for array in chosen
        if any(name.endswith(f".{pattern}") for name in (array["path"], array["group"]))
        or ("*" in pattern and fnmatch.fnmatchcase(array["path"], pattern))
    ]
    if not exact:
        matched = [array for array in matched if array["part"] != "optimizer"] or matched
    if not matched:
        raise RunError(_no_array(path, part if colon else "", pattern, arrays))
    return by_layout(matched), bool(exact)


def _no_array(path: str, part: str, pattern: str, arrays: Sequence[Array]) -> str:
    parts = list(dict.fromkeys(array["part"] for array in arrays))
    if part and part not in parts:
        return f"the plan has no part '{part}' in '{path}'; there are: {', '.join(parts)}"
    depth = pattern.count(".") + 1
    ends: dict[str, dict[str, str]] = {}  # for each path or end of one: the path to print, by its group
    for key in ("group", "path"):
        for array in arrays:
            for end in (array[key], ".".join(array[key].split(".")[-depth:])):
                ends.setdefault(end, {}).setdefault(array["group"], array[key])
    near: dict[str, str] = {}
    for end in difflib.get_close_matches(pattern, ends, n=12, cutoff=0.5):
        for group, name in ends[end].items():
            near.setdefault(group, name)
    listed = "".join(f"\n  {name}" for name in list(near.values())[:_SHOWN])
    hint = f"; nearest are:{listed}" if near else f"; `nnxdsl plan --arrays` lists all {len(arrays)} of them"
    return f"the plan has no array '{path}'{hint}"
