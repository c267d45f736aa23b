"""Formats meshes, shapes, partitions, byte counts and plurals for the terminal and the app."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PALETTE = ("#8dd3c7", "#ffd92f", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#d9d9d9", "#bc80bd")
"""Light background colours, for black text."""


def format_mesh(mesh: Mapping[str, int]) -> str:
    """`fsdp=4 x tensor=2 (8 devices)`, without axes of size 1."""
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    return f"{axes} ({math.prod(mesh.values()):,} devices)" if axes else "one device"


def format_bytes(count: float) -> str:
    """Bytes in at most four significant digits: `512 B`, `1.5 KiB`, `72.04 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB" if count < 10_000 else f"{count:,.0f} TiB"


def pluralize(number: int, noun: str, plural: str = "s") -> str:
    """`1 array`, `2 arrays`; `plural` is the ending."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def format_shape(shape: Sequence[int]) -> str:
    """`4x1152x6912`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def mesh_axes(entry: str | Sequence[str] | None) -> Sequence[str]:
    """The mesh axes of one entry of a partition spec, the slowest first."""
    return [entry] if isinstance(entry, str) else entry or []


def format_axes(entry: str | Sequence[str] | None) -> str:
    """One entry of a partition spec, or the mesh axes of a rule: `fsdp`, `data+fsdp`, `-`."""
    return "+".join(mesh_axes(entry)) or "-"


def format_spec(spec: Iterable[str | Sequence[str] | None]) -> str:
    """A partition spec: `-, fsdp, tensor`."""
    return ", ".join(map(format_axes, spec)) or "-"


def format_names(axes: Iterable[str | None]) -> str:
    """Logical axes: `layers, embed, -`."""
    return ", ".join(axis or "-" for axis in axes)


def applied_rules(array: Mapping[str, Any]) -> Iterator[str]:
    """The sharding rule that each named dimension of an array of the plan follows: `embed→fsdp #8`."""
    for dimension, (logical, entry) in enumerate(zip(array["axes"], array["spec"], strict=True)):
        if logical is None:
            continue
        tried = [rule for rule in array["why"] if rule["dimension"] == dimension]
        taken = [rule for rule in tried if rule["outcome"] == "taken"]
        if taken:  # the last one: a further split by ZeRO follows the rule
            number, why = taken[-1]["rule"], taken[-1]["why"]
            by = f"({why.partition(':')[0]})" if number is None else f"#{number}"
        else:
            by = f"({tried[-1]['outcome']})" if tried else "(no rule)"
        yield f"{logical}→{format_axes(entry)} {by}"
