"""What a layout could do better: copies that need not be, rules and axes without effect, meshes that would fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import attrs

from nnxdsl.program.layout import ACTIVATION_AXES, Layout, Placed, starred
from nnxdsl.program.rules import mesh_axes, sizes
from nnxdsl.spec.errors import Problem, SpecError
from nnxdsl.spec.placement import Mesh

REPLICATED_AT_MOST = 0.02
"""Share of the parameters' bytes that may be copied along a mesh axis without a word."""

_SHOWN = 3
_MESHES_TRIED = 400


@attrs.frozen
class Warning:
    """Something that works, and is probably not what was meant.

    Attributes:
        kind: "replicated", "rule", "axis", "batch", "indivisible" or "heads".
        path: What it is about: a field of the experiment, or a mesh axis.
        message: What is the case, and what could be done.
    """

    kind: str
    path: str
    message: str


def warnings(layout: Layout, rows: int, length: int, heads: tuple[int, int]) -> list[Warning]:
    """Everything that is worth a word.

    Args:
        layout: Where the arrays are.
        rows: Of a micro-batch.
        length: Tokens of a row that go through the layers.
        heads: How many query heads and key/value heads an attention layer has.
    """
    return [
        *_replicated(layout),
        *_idle_axes(layout, rows, length),
        *_idle_rules(layout),
        *_uncut_batch(layout, rows),
        *_indivisible(layout),
        *_cut_heads(layout, heads),
    ]


def _replicated(layout: Layout) -> Iterator[Warning]:
    """Copies along every axis but `data`, whose meaning is copies."""
    arrays = list(layout.parameters())
    total = sum(placed.bytes for placed in arrays)
    for axis, size in layout.mesh.sizes.items():
        copied = [placed for placed in arrays if axis not in placed.used_axes]
        share = sum(placed.bytes for placed in copied) / total
        if size == 1 or axis == "data" or share <= REPLICATED_AT_MOST:
            continue
        largest: dict[str, Placed] = {}
        for placed in sorted(copied, key=lambda placed: -placed.bytes):
            largest.setdefault(starred(placed.path), placed)
        named = [f"{path} ({_could(placed, axis, size)})" for path, placed in list(largest.items())[:_SHOWN]]
        message = (
            f"{share:.0%} of the parameters' bytes are copied along {axis}={size}; the largest: {', '.join(named)}"
        )
        yield Warning("replicated", f"mesh.{axis}", message)


def _could(placed: Placed, axis: str, size: int) -> str:
    able = [
        f"'{name}'"
        for name, whole, shards in zip(placed.axes, placed.shape, placed.shards, strict=True)
        if isinstance(name, str) and whole % (shards * size) == 0
    ]
    return f"{' or '.join(able)} could lie on {axis}" if able else f"no dimension divides by {axis}={size}"


def _idle_axes(layout: Layout, rows: int, length: int) -> Iterator[Warning]:
    shape = (rows, length) if length else None
    used = {axis for target in layout.resolve(("batch", "length"), shape).spec for axis in mesh_axes(target)}
    used |= {axis for placed in layout.parameters() for axis in placed.used_axes}
    for axis, size in layout.mesh.sizes.items():
        if size > 1 and axis not in used:
            yield Warning("axis", f"mesh.{axis}", f"nothing is split over {axis}={size}: its devices do the same work")


def _idle_rules(layout: Layout) -> Iterator[Warning]:
    """A user's rules that no array took, and the reason that most arrays gave."""
    first = {rule: index for index, rule in reversed(list(enumerate(layout.rules)))}
    traces = [placed.resolved.trace for placed in layout if placed.rules == layout.rules]
    traces += [layout.resolve((axis,)).trace for axis in ACTIVATION_AXES]
    for index, rule in enumerate(layout.mesh.rules):
        number = first[rule]
        tried = [one for trace in traces for one in trace if one.rule == number]
        if any(one.outcome == "taken" for one in tried):
            continue
        if rule in layout.mesh.rules[:index]:
            why = "it stands there twice"
        elif not tried:
            why = f"no array of this experiment has an axis '{rule[0]}'"
        else:
            why = max((one.why for one in tried), key=[one.why for one in tried].count)
        yield Warning("rule", f"mesh.rules.{index}", f"({rule[0]!r}, {rule[1]!r}) has no effect: {why}")


def _uncut_batch(layout: Layout, rows: int) -> Iterator[Warning]:
    (asked,) = layout.resolve(("batch",)).spec
    if layout.batch_spec(rows)[0] != asked:
        over = sizes(asked, layout.mesh.sizes)
        yield Warning(
            "batch", "microbatch_size", f"{rows} rows do not divide by {over}: every device computes all of them"
        )


def _indivisible(layout: Layout) -> Iterator[Warning]:
    found: dict[str, str] = {}
    for placed in layout.parameters():
        why = [f"axis {one.dimension}: {one.why}" for one in placed.resolved.trace if one.outcome == "indivisible"]
        if why:
            found.setdefault(starred(placed.path), "; ".join(why))
    if found:
        shown = ", ".join(f"{path} ({why})" for path, why in list(found.items())[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        yield Warning("indivisible", "mesh.indivisible", f"kept whole where rules do not divide: {shown}{more}")


def _cut_heads(layout: Layout, heads: tuple[int, int]) -> Iterator[Warning]:
    for name, count in zip(("heads", "kv_heads"), heads, strict=True):
        (target,) = layout.resolve((name,)).spec
        shards = math.prod(layout.mesh.sizes[axis] for axis in mesh_axes(target))
        if count % shards:
            over = sizes(target, layout.mesh.sizes)
            message = f"{count} {name} are cut over {over} within a head, and gathered before they are used"
            yield Warning("heads", f"mesh.{mesh_axes(target)[0]}", message)


def nearest_meshes(layout: Layout, rows: int, problems: Sequence[Problem]) -> list[Problem]:
    """For dimensions that do not divide: the meshes of as many devices, nearest to the asked one, on which all do."""
    if not any("divisible" in problem.message or "cannot be split" in problem.message for problem in problems):
        return []
    cure = "or indivisible='replicate', which keeps whole copies of what does not divide"
    found: list[str] = []
    for mesh in candidates(layout.mesh):
        other = layout.on(mesh)
        if not (_undivided(other) or other.batch_problems(rows)):
            found.append(sizes(tuple(mesh.sizes), mesh.sizes))
        if len(found) == _SHOWN:
            break
    if not found:
        return [Problem("mesh", f"no mesh of {layout.mesh.device_count} devices divides everything; use fewer, {cure}")]
    return [Problem("mesh", f"of {layout.mesh.device_count} devices, these would do: {'; '.join(found)}; {cure}")]


def _undivided(layout: Layout) -> bool:
    return any(size % shards for p in layout.parameters() for size, shards in zip(p.shape, p.shards, strict=True))


def candidates(mesh: Mesh) -> Iterator[Mesh]:
    """Meshes of as many devices over the axes that are asked for, and those that always make sense; nearest first."""
    axes = [axis for axis, size in mesh.sizes.items() if size > 1 or axis in ("data", "fsdp", "tensor")]
    asked = [mesh.sizes[axis] for axis in axes]

    def distance(split: tuple[int, ...]) -> float:
        return sum(abs(math.log2(one / other)) for one, other in zip(split, asked, strict=True))

    others = [split for split in factorizations(mesh.device_count, len(axes)) if list(split) != asked]
    for split in sorted(others, key=lambda split: (distance(split), split))[:_MESHES_TRIED]:
        with contextlib.suppress(SpecError):  # the slices cannot be cut out of every mesh
            yield attrs.evolve(mesh, **dict(zip(axes, split, strict=True)))


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as an ordered product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in (factor for factor in range(1, number + 1) if number % factor == 0):
        for rest in factorizations(number // factor, parts - 1):
            yield (factor, *rest)
