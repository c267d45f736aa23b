"""What a layout could do better: copies that need not be, rules and axes without effect, meshes that would fit."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence

import attrs

from nnxdsl.errors import Problem
from nnxdsl.models.pipeline import idle_share
from nnxdsl.program.forward import parts_in_stages
from nnxdsl.sharding.layout import ACTIVATION_AXES, Layout, Placed, starred
from nnxdsl.sharding.mesh_candidates import candidates
from nnxdsl.sharding.rules import Rules, Target, Tried, mesh_axes, pieces, sizes

REPLICATED_AT_MOST = 0.02
"""Share of the parameters' bytes that may be copied along a mesh axis without a word."""

IDLE_AT_MOST = 0.3
"""Share of its time that a pipeline may wait without a word."""

_SHOWN = 3
_ROWS = ("batch", "head_batch")
_ALL_OF_THEM = "every device computes all of them"


@attrs.frozen
class Warning:
    """Something that works, and is probably not what was meant.

    Attributes:
        kind: "replicated", "rule", "axis", "batch", "indivisible", "heads", "workers" or "stage".
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
    traces = _traces(layout, rows, length)
    return [
        *_replicated(layout),
        *_idle_axes(layout, traces),
        *_idle_rules(layout, traces),
        *_uncut_batch(layout, rows),
        *_indivisible(layout),
        *_cut_heads(layout, heads),
        *_mixed_workers(layout),
        *_idle_stages(layout, rows),
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


def _idle_axes(layout: Layout, traces: Sequence[_Trace]) -> Iterator[Warning]:
    used = {axis for trace in traces for one in trace.tried if one.outcome == "taken" for axis in mesh_axes(one.axes)}
    for axis, size in layout.mesh.sizes.items():
        if size > 1 and axis not in used:
            yield Warning("axis", f"mesh.{axis}", f"nothing is split over {axis}={size}: its devices do the same work")


@attrs.frozen
class _Trace:
    """How one array or activation was resolved; `own` of its rules, the first ones, are those of its path."""

    tried: tuple[Tried, ...]
    rules: Rules
    own: tuple[tuple[int, int], ...] = ()

    def why(self, one: Tried) -> str:
        """Why a rule was not taken, with the rule that was in full: its number is among all rules, not the user's."""
        return re.sub(r"^rule (\d+)", lambda found: "({!r}, {!r})".format(*self.rules[int(found[1])]), one.why)


def _traces(layout: Layout, rows: int, length: int) -> list[_Trace]:
    """Of every parameter, and of every activation as the model names its axes."""
    found: list[_Trace] = []
    for placed in layout.parameters():
        own = [
            (index, number)
            for index, (pattern, rules) in enumerate(layout.mesh.array_rules)
            if fnmatch.fnmatchcase(placed.path, pattern)
            for number in range(len(rules))
        ]
        found.append(_Trace(placed.resolved.trace, placed.rules, tuple(own)))
    # Rows are padded to a length that `context` divides; widths are not checked here, and zero divides.
    filled = length + -length % layout.length_shards
    for width in (axis for axis in ACTIVATION_AXES if axis not in (*_ROWS, "length")):
        for first in _ROWS:
            found.append(_Trace(layout.resolve((first, "length", width), (rows, filled, 0)).trace, layout.rules))
    return found


def _idle_rules(layout: Layout, traces: Sequence[_Trace]) -> Iterator[Warning]:
    """A user's rules that nothing took, and the reason that most gave."""
    first = {rule: index for index, rule in reversed(list(enumerate(layout.rules)))}
    told: dict[int, list[tuple[str, str]]] = {}
    told_own: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for trace in traces:
        for one in trace.tried:
            number = (-1 if one.rule is None else one.rule) - len(trace.own)
            if one.rule is not None and number < 0:
                told_own.setdefault(trace.own[one.rule], []).append((one.outcome, trace.why(one)))
            elif one.rule is not None:
                told.setdefault(number, []).append((one.outcome, trace.why(one)))
    for index, rule in enumerate(layout.mesh.rules):
        tried = told.get(first[rule], [])
        if rule in layout.mesh.rules[:index]:
            tried = [("used", "it stands there twice")]
        yield from _without_effect(f"mesh.rules.{index}", rule, tried)
    for index, (_, rules) in enumerate(layout.mesh.array_rules):
        for number, rule in enumerate(rules):
            yield from _without_effect(f"mesh.array_rules.{index}.1.{number}", rule, told_own.get((index, number), []))


def _without_effect(path: str, rule: tuple[str, Target], tried: Sequence[tuple[str, str]]) -> Iterator[Warning]:
    if any(outcome == "taken" for outcome, _ in tried):
        return
    reasons = [why for _, why in tried] or [f"no array of this experiment has an axis '{rule[0]}'"]
    why = max(reasons, key=reasons.count)
    yield Warning("rule", path, f"({rule[0]!r}, {rule[1]!r}) has no effect: {why}")


def _uncut_batch(layout: Layout, rows: int) -> Iterator[Warning]:
    (axes,) = layout.resolve(("batch",)).spec
    (found,) = layout.batch_spec(rows)
    if found != axes:
        over = sizes(axes, layout.mesh.sizes)
        instead = f"they are split over {sizes(found, layout.mesh.sizes)} alone" if found else _ALL_OF_THEM
        yield Warning("batch", "microbatch_size", f"{rows} rows do not divide by {over}: {instead}")


def _indivisible(layout: Layout) -> Iterator[Warning]:
    found: dict[str, str] = {}
    for placed in layout.parameters():
        why = [f"axis {one.dimension}: {one.why}" for one in placed.resolved.trace if one.outcome == "indivisible"]
        if why:
            found.setdefault(starred(placed.path), "; ".join(dict.fromkeys(why)))
    if found:
        shown = ", ".join(f"{path} ({why})" for path, why in list(found.items())[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        yield Warning("indivisible", "mesh.indivisible", f"kept whole where rules do not divide: {shown}{more}")


def _cut_heads(layout: Layout, heads: tuple[int, int]) -> Iterator[Warning]:
    for name, count in zip(("heads", "kv_heads"), heads, strict=True):
        (target,) = layout.resolve((name,)).spec
        shards = pieces(target, layout.mesh.sizes)
        cut = any(p.shards[p.axes.index(name)] > 1 for p in layout.parameters() if name in p.axes)
        if cut and count % shards:
            over = sizes(target, layout.mesh.sizes)
            message = f"{count} {name} are cut over {over} within a head, and gathered before they are used"
            yield Warning("heads", f"mesh.{mesh_axes(target)[0]}", message)


def _mixed_workers(layout: Layout) -> Iterator[Warning]:
    data = layout.mesh.data
    if layout.workers > 1 and data > 1 and layout.workers_per_device == layout.workers:
        message = f"{layout.workers} workers cannot be cut over data={data}, so gradients go over it at every step"
        yield Warning("workers", "outer.workers", f"{message}; a multiple of {data} would have devices of their own")


def _idle_stages(layout: Layout, rows: int) -> Iterator[Warning]:
    stages, here = layout.stages, rows // layout.batch_shards(rows)
    parts = parts_in_stages(stages, here)
    share = idle_share(stages, parts)
    if share > IDLE_AT_MOST:
        message = (
            f"its stages wait {share:.0%} of the time: each has {here} rows at a time, which pass in {parts} parts"
        )
        yield Warning("stage", "mesh.stage", f"{message}; more rows at a time (microbatch_size) make it less")


def nearest_meshes(layout: Layout, rows: int, problems: Sequence[Problem]) -> list[Problem]:
    """For dimensions that do not divide: the meshes of as many devices, nearest to the given one, on which all do."""
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
