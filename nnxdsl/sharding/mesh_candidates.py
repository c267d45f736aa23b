"""Meshes with the same number of devices as another one, nearest first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import attrs

from nnxdsl.config.sharding import Mesh
from nnxdsl.errors import SpecError

_MESHES_TRIED = 400


def candidates(mesh: Mesh) -> Iterator[Mesh]:
    """Meshes of the same number of devices over the axes in use and data, fsdp and tensor; nearest first."""
    axes = [axis for axis, size in mesh.sizes.items() if size > 1 or axis in ("data", "fsdp", "tensor")]
    sizes = [mesh.sizes[axis] for axis in axes]

    def distance(split: tuple[int, ...]) -> float:
        return sum(abs(math.log2(one / other)) for one, other in zip(split, sizes, strict=True))

    others = [split for split in factorizations(mesh.device_count, len(axes)) if list(split) != sizes]
    for split in sorted(others, key=lambda split: (distance(split), split))[:_MESHES_TRIED]:
        with contextlib.suppress(SpecError):  # not every mesh can be divided into slices
            yield attrs.evolve(mesh, **dict(zip(axes, split, strict=True)))


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [factor for factor in range(1, number + 1) if number % factor == 0]


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in divisors(number):
        for rest in factorizations(number // factor, parts - 1):
            yield (factor, *rest)
