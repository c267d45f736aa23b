"""Logical axes to mesh axes by rules, with the reason for each choice; knows names and sizes, no arrays.

Resolution is that of Flax Linen's `logical_to_mesh_axes`: rules are walked in their order, a rule takes its dimension
only if none of its mesh axes is taken already, and a rule of None claims its dimension as replicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from jax.sharding import PartitionSpec

Axes = tuple[Any, ...]
"""A logical name for each dimension; None, or `PartitionSpec.UNCONSTRAINED`, where it has none."""
Target = str | tuple[str, ...] | None
Rules = tuple[tuple[str, Target], ...]

DEFAULT_RULES: Rules = (
    ("batch", ("data", "fsdp", "expert")),
    ("head_batch", ("data", "fsdp", "expert", "stage")),
    ("head_batch", ("data", "fsdp", "expert")),
    ("length", "context"),
    ("experts", "expert"),
    ("layers", "stage"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", ("fsdp", "context", "expert")),
    ("embed", ("fsdp", "context")),
    ("latent", ("fsdp", "context", "expert")),
    ("rank", None),
    ("head_dim", None),
    ("norm", None),
    ("blocks", None),
    ("activation_vocab", "tensor"),
    ("activation_heads", "tensor"),
    ("activation_kv_heads", "tensor"),
    ("activation_mlp", "tensor"),
    ("activation_embed", None),
)
"""Rows over all devices that hold different parameters, tokens over `context`, width over `tensor`, experts over
`expert`, the stack of layers over `stage`; what is left of each matrix goes to all devices that would else hold copies.
The second rule of `embed` serves the weights of experts, whose `expert` axis is used already. `head_batch` are the rows
that the output head sees: it stands in no stage, so all of them share it where there are rows enough."""

Outcome = Literal["taken", "used", "indivisible", "shadowed", "not reached"]


@attrs.frozen
class Tried:
    """One rule that was looked at for one dimension, and what came of it.

    Attributes:
        dimension: Of the array.
        logical: Its name.
        rule: Position of the rule among all rules; None where no rule was asked (see `Layout`).
        axes: The mesh axes that the rule names.
        outcome: "taken"; "used": one of its axes serves another dimension; "indivisible": its axes do not divide the
            dimension; "shadowed": a rule of None before it has claimed the dimension as replicated; "not reached": a
            rule before it was taken.
        why: The same in words, with names and sizes.
    """

    dimension: int
    logical: str
    rule: int | None
    axes: Target
    outcome: Outcome
    why: str


@attrs.frozen
class Resolved:
    """Where the dimensions of one array lie.

    Attributes:
        spec: The partition spec, without mesh axes that are absent or of size 1.
        raw: The same before those were dropped.
        trace: Every rule that names one of the array's axes, in the rules' order, and what came of it.
    """

    spec: PartitionSpec
    raw: PartitionSpec
    trace: tuple[Tried, ...]


def with_user_rules(user: Rules, default: Rules = DEFAULT_RULES) -> Rules:
    """The default rules, with those of each logical axis that a user names replaced in their place.

    A logical axis without a default goes to the front, where nothing is before it.
    """
    named = {logical for logical, _ in user}
    logical_axes = {logical for logical, _ in default}
    rules: list[tuple[str, Target]] = [rule for rule in user if rule[0] not in logical_axes]
    placed: set[str] = set()
    for logical, target in default:
        if logical not in named:
            rules.append((logical, target))
        elif logical not in placed:
            rules += [rule for rule in user if rule[0] == logical]
            placed.add(logical)
    return tuple(rules)


def resolve(
    axes: Sequence[Any],
    rules: Sequence[tuple[str, str | list[str] | tuple[str, ...] | None]],
    mesh: Mapping[str, int],
    *,
    shape: Sequence[int] | None = None,
) -> Resolved:
    """Resolve logical axes to mesh axes.

    Args:
        axes: A logical name, or None, for each dimension; `PartitionSpec.UNCONSTRAINED` is passed through.
        rules: Pairs of a logical name and a mesh axis, several, or None; earlier ones go first.
        mesh: Size of each mesh axis; an axis that is absent counts as one of size 1.
        shape: Where given, a rule whose mesh axes do not divide its dimension is passed over, which Linen does not do.

    Returns:
        The spec, and how it came about.

    Raises:
        ValueError: a logical name stands twice in `axes`.
    """
    names = [axis for axis in axes if isinstance(axis, str)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"axes {tuple(axes)} name {', '.join(map(repr, twice))} twice")
    place = {name: dimension for dimension, name in enumerate(axes) if isinstance(name, str)}
    taken: dict[int, tuple[int, Target]] = {}
    used: dict[str, int] = {}
    trace: list[Tried] = []
    for number, (logical, named) in enumerate(rules):
        if logical not in place:
            continue
        dimension, target = place[logical], _target(named)
        wanted = mesh_axes(target)
        busy = [axis for axis in wanted if axis in used]
        outcome: Outcome = "taken"
        if dimension in taken:
            before, claimed = taken[dimension]
            outcome = "not reached" if claimed else "shadowed"
            why = f"rule {before} " + ("was taken" if claimed else "claims the dimension as replicated")
        elif busy:
            outcome = "used"
            why = ", ".join(f"{_with_size(axis, mesh)} is used by dimension {used[axis]}" for axis in busy)
        elif shape is not None and shape[dimension] % pieces(target, mesh):
            outcome = "indivisible"
            why = f"{shape[dimension]} does not divide by {sizes(target, mesh)}"
        else:
            taken[dimension] = (number, target)
            used |= dict.fromkeys(wanted, dimension)
            why = _dropped(wanted, mesh) if wanted else "left to the compiler" if target else "replicated"
        trace.append(Tried(dimension, logical, number, target, outcome, why))
    raw = [
        taken[dimension][1] if dimension in taken else None if name is None or isinstance(name, str) else name
        for dimension, name in enumerate(axes)
    ]
    return Resolved(PartitionSpec(*(_present(target, mesh) for target in raw)), PartitionSpec(*raw), tuple(trace))


def mesh_axes(target: Any) -> tuple[str, ...]:
    """The mesh axes that a rule, or one entry of a partition spec, names."""
    if isinstance(target, str):
        return (target,)
    return tuple(target) if isinstance(target, tuple) else ()


def pieces(target: Any, mesh: Mapping[str, int]) -> int:
    """In how many pieces a rule, or one entry of a partition spec, cuts a dimension."""
    return math.prod(mesh.get(axis, 1) for axis in mesh_axes(target))


def sizes(target: Any, mesh: Mapping[str, int]) -> str:
    """Mesh axes with their sizes, as `fsdp=4 x tensor=2`; those of size 1 are left out."""
    return " x ".join(f"{axis}={mesh[axis]}" for axis in mesh_axes(target) if mesh.get(axis, 1) > 1)


def _target(named: Any) -> Target:
    return tuple(named) if isinstance(named, list) else named


def _present(target: Any, mesh: Mapping[str, int]) -> Any:
    if target is PartitionSpec.UNCONSTRAINED:
        return target
    axes = tuple(axis for axis in mesh_axes(target) if mesh.get(axis, 1) > 1)
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def _dropped(wanted: Sequence[str], mesh: Mapping[str, int]) -> str:
    absent = [axis for axis in wanted if axis not in mesh]
    single = [axis for axis in wanted if mesh.get(axis) == 1]
    parts = [f"of size 1: {', '.join(single)}"] if single else []
    parts += [f"absent from the mesh: {', '.join(absent)}"] if absent else []
    return f"dropped, since {'; '.join(parts)}" if parts else "its axes were free"


def _with_size(axis: str, mesh: Mapping[str, int]) -> str:
    if axis not in mesh:
        return f"{axis} (absent from the mesh)"
    return f"{axis} (of size 1)" if mesh[axis] == 1 else axis
