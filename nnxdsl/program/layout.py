"""Why every array lives where it lives: logical axes to mesh axes, with the reasons; needs no devices.

Resolution follows Flax Linen's `logical_to_mesh_axes`: rules are walked in their order, a rule takes its dimension
only if none of its mesh axes is taken already, and a rule of None claims its dimension as replicated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from nnxdsl.spec.errors import Problem
from nnxdsl.spec.placement import Mesh as MeshSpec

Axes = tuple[str | None, ...]
Target = str | tuple[str, ...] | None
Rules = tuple[tuple[str, Target], ...]

DEFAULT_RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", "fsdp"),
    ("rank", None),
    ("head_dim", None),
    ("norm", None),
    ("blocks", None),
    ("layers", None),
)
"""Batch over the data axes, width over `tensor`, the rest of each matrix over `fsdp`."""


@attrs.frozen
class Tried:
    """One rule that was looked at for one dimension, and what came of it."""

    dimension: int
    rule: int
    axes: Target
    outcome: str


@attrs.frozen
class Resolved:
    """Where the dimensions of one array lie.

    Attributes:
        spec: The partition spec, without mesh axes that are absent or of size 1.
        raw: The same before those were dropped.
        trace: Every rule that was tried, in order.
    """

    spec: PartitionSpec
    raw: PartitionSpec
    trace: tuple[Tried, ...]


def with_user_rules(user: Rules, default: Rules = DEFAULT_RULES) -> Rules:
    """The default rules, with those of each logical axis that a user names replaced in their place.

    A logical axis without a default goes to the front, where nothing is before it.
    """
    named = {logical for logical, _ in user}
    known = {logical for logical, _ in default}
    rules: list[tuple[str, Target]] = [rule for rule in user if rule[0] not in known]
    placed: set[str] = set()
    for logical, target in default:
        if logical not in named:
            rules.append((logical, target))
        elif logical not in placed:
            rules += [rule for rule in user if rule[0] == logical]
            placed.add(logical)
    return tuple(rules)


def resolve(axes: Axes, rules: Rules, mesh: Mapping[str, int]) -> Resolved:
    """Resolve logical axes to mesh axes.

    Args:
        axes: A logical name, or None, for each dimension.
        rules: Pairs of a logical name and a mesh axis, several, or None; earlier ones go first.
        mesh: Size of each mesh axis; an axis that is absent counts as one of size 1.

    Returns:
        The spec, and how it came about.

    Raises:
        ValueError: a logical name stands twice in `axes`.
    """
    names = [axis for axis in axes if axis is not None]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"axes {axes} name {', '.join(map(repr, twice))} twice")
    taken: dict[int, Target] = {}
    used: dict[str, int] = {}
    trace: list[Tried] = []
    for number, (logical, target) in enumerate(rules):
        if logical not in axes:
            continue
        dimension = axes.index(logical)
        wanted = _names(target)
        busy = [axis for axis in wanted if axis in used]
        if dimension in taken:
            outcome = "not reached: the dimension is placed already"
        elif busy:
            outcome = f"skipped: {', '.join(f'{axis} is used by dimension {used[axis]}' for axis in busy)}"
        else:
            taken[dimension] = target
            used |= dict.fromkeys(wanted, dimension)
            idle = [axis for axis in wanted if mesh.get(axis, 1) == 1]
            outcome = "taken" + (f"; of size 1, so dropped: {', '.join(idle)}" if idle else "")
            outcome = outcome if wanted else "taken: replicated"
        trace.append(Tried(dimension, number, target, outcome))
    raw = [taken.get(dimension) or None for dimension in range(len(axes))]
    return Resolved(PartitionSpec(*(_drop(target, mesh) for target in raw)), PartitionSpec(*raw), tuple(trace))


def _drop(target: Target, mesh: Mapping[str, int]) -> Target:
    kept = tuple(axis for axis in _names(target) if mesh.get(axis, 1) > 1)
    if len(kept) > 1:
        return kept
    return kept[0] if kept else None


@attrs.frozen
class Placed:
    """One array and where it lives.

    Attributes:
        path: Dotted path.
        part: What it is for: "frozen", "trainable", "reference", "optimizer".
        shape: Global shape.
        dtype: Its dtype's name.
        axes: Logical names of its dimensions.
        resolved: Where they lie.
        shards: In how many pieces each dimension is cut.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    resolved: Resolved
    shards: tuple[int, ...]

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of the piece on one device."""
        return tuple(-(-size // shards) for size, shards in zip(self.shape, self.shards, strict=True))

    @property
    def device_bytes(self) -> int:
        """Bytes on one device; four-bit values count as half a byte."""
        return math.prod(self.device_shape) * bits(self.dtype) // 8


def bits(dtype: str) -> int:
    """Bits of one element."""
    return 4 if dtype in ("int4", "uint4") else jnp.dtype(dtype).itemsize * 8


class Layout:
    """Every array of a program and where it lives on a mesh that need not be there."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh
        self.rules = with_user_rules(mesh.rules)
        self.arrays: dict[str, dict[str, Placed]] = {}

    def add(self, part: str, path: str, shape: Sequence[int], dtype: DTypeLike, axes: Axes) -> None:
        """Place one array."""
        resolved = resolve(axes, self.rules, self.mesh.sizes)
        shards = tuple(self._shards(target) for target in resolved.spec)
        placed = Placed(path, part, tuple(shape), jnp.dtype(dtype).name, axes, resolved, shards)
        self.arrays.setdefault(part, {})[path] = placed

    def problems(self) -> list[Problem]:
        """Every dimension that does not divide over its mesh axes, and every rule of a user that nothing matches.

        The blocks of a period are named once, with a star for their number.
        """
        found: list[Problem] = []
        # The optimizer's arrays lie as their parameters do, so they have no problems of their own.
        for placed in (
            placed for part, leaves in self.arrays.items() if part != "optimizer" for placed in leaves.values()
        ):
            for dimension, (size, shards) in enumerate(zip(placed.shape, placed.shards, strict=True)):
                if size % shards:
                    over = self._sizes(placed.resolved.spec[dimension])
                    message = f"axis {dimension} has {size} rows, not divisible by {over}"
                    found.append(Problem(starred(placed.path), message))
        known = {axis for placed in self for axis in placed.axes} | {"batch"}
        found += [
            Problem(f"mesh.rules.{index}", f"no array has an axis '{logical}'")
            for index, (logical, _) in enumerate(self.mesh.rules)
            if logical not in known
        ]
        return list(dict.fromkeys(found))

    def batch_problems(self, rows: int) -> list[Problem]:
        """Rows of a micro-batch that cannot be split as the rules ask."""
        (target,) = self.batch_spec()
        if rows % self.batch_shards == 0:
            return []
        return [Problem("microbatch_size", f"{rows} rows at a time cannot be split over {self._sizes(target)}")]

    def sharding(self, part: str, path: str, mesh: jax.sharding.Mesh) -> NamedSharding:
        """The sharding of one array on real or abstract devices."""
        return NamedSharding(mesh, self.arrays[part][path].resolved.spec)

    def shardings(self, part: str, mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
        """The shardings of all arrays of a part, by path."""
        return {path: self.sharding(part, path, mesh) for path in self.arrays.get(part, {})}

    def batch_spec(self) -> PartitionSpec:
        """How the first dimension of every batch array is cut."""
        return resolve(("batch",), self.rules, self.mesh.sizes).spec

    @property
    def batch_shards(self) -> int:
        """In how many parts the rows of a batch are cut."""
        (target,) = self.batch_spec()
        return self._shards(target)

    def device_bytes(self) -> dict[str, int]:
        """Bytes on one device, by part."""
        return {part: sum(p.device_bytes for p in placed.values()) for part, placed in self.arrays.items()}

    def dump(self) -> str:
        """One line an array: `path shape dtype spec bytes/device`; the text of goldens and of `layout diff`s."""
        lines: list[str] = []
        for p in self:
            shape = "x".join(map(str, p.shape)) or "scalar"
            lines.append(f"{p.part} {p.path} {shape} {p.dtype} {tuple(p.resolved.spec)} {p.device_bytes}")
        return "\n".join(lines) + "\n"

    def __iter__(self) -> Iterator[Placed]:
        return (placed for part in self.arrays.values() for placed in part.values())

    def _shards(self, target: Target) -> int:
        return math.prod(self.mesh.sizes[name] for name in _names(target))

    def _sizes(self, target: Target) -> str:
        return " x ".join(f"{axis}={self.mesh.sizes[axis]}" for axis in _names(target))


def starred(path: str) -> str:
    """A path with a star for the number of its block: the blocks of a period are alike."""
    return re.sub(r"\bblocks\.\d+\.", "blocks.*.", path)


def _names(target: Target) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else tuple(target or ())
