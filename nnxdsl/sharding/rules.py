"""Logical axes to mesh axes by rules, with the reason for each choice.

Resolution is that of Flax Linen's `logical_to_mesh_axes`: rules are tried in order, a rule applies to its dimension
only if none of its mesh axes is in use, and a rule of None claims its dimension as replicated.
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
    ("per_layer_embed", ("fsdp", "context", "expert", "tensor")),
    ("activation_per_layer", ("fsdp", "context", "expert")),
    ("per_layer_vocab", None),
    ("per_layer", None),
)
"""Rows over the axes that shard parameters, tokens over `context`, width over `tensor`, experts over `expert`, the
stack of layers over `stage`; the table of per-layer embeddings is cut by its columns, so that a device looks up its own
for all tokens. `embed` shards each matrix further over the devices that would otherwise hold copies. The
second rule of `embed` is for the weights of experts, whose `expert` axis is in use already. `head_batch` are the rows
of the output head, which belongs to no stage: all stages share them where there are enough rows."""

Outcome = Literal["taken", "used", "indivisible", "shadowed", "not reached"]


@attrs.frozen
class Tried:
    """The outcome of one rule for one dimension.

    Attributes:
        dimension: Index of the dimension.
        logical: Its logical axis.
        rule: Index of the rule; None for a choice that `Layout` made without a rule.
        axes: The mesh axes of the rule.
        outcome: "taken"; "used": one of its axes serves another dimension; "indivisible": its axes do not divide the
            dimension; "shadowed": an earlier rule of None claims the dimension as replicated; "not reached": an earlier
            rule was taken.
        why: The outcome as a text with names and sizes.
    """

    dimension: int
    logical: str
    rule: int | None
    axes: Target
    outcome: Outcome
    why: str


@attrs.frozen
class Resolved:
    """The partition of one array.

    Attributes:
        spec: The partition spec, without mesh axes that are absent or of size 1.
        raw: The partition spec with them.
        trace: Every rule for one of the array's axes, in order, with its outcome.
    """

    spec: PartitionSpec
    raw: PartitionSpec
    trace: tuple[Tried, ...]


def with_user_rules(user: Rules, default: Rules = DEFAULT_RULES) -> Rules:
    """The default rules, in which a user's rules for a logical axis replace the default ones at their position.

    Rules for a logical axis without a default come first.
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
        rules: Pairs of a logical name and a mesh axis, several, or None; in order of precedence.
        mesh: Size of each mesh axis; an absent axis counts as one of size 1.
        shape: If given, a rule whose mesh axes do not divide its dimension is skipped, which Linen does not do.

    Raises:
        ValueError: `axes` has a logical name twice.
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
            earlier, axes_taken = taken[dimension]
            outcome = "not reached" if axes_taken else "shadowed"
            why = f"rule {earlier} " + ("was taken" if axes_taken else "claims the dimension as replicated")
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
    """The mesh axes of a rule, or of one entry of a partition spec."""
    if isinstance(target, str):
        return (target,)
    return tuple(target) if isinstance(target, tuple) else ()


def pieces(target: Any, mesh: Mapping[str, int]) -> int:
    """Number of shards of a dimension under a rule, or under one entry of a partition spec."""
    return math.prod(mesh.get(axis, 1) for axis in mesh_axes(target))


def sizes(target: Any, mesh: Mapping[str, int]) -> str:
    """Mesh axes with their sizes, `fsdp=4 x tensor=2`, without those of size 1."""
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
