"""Warnings about a layout: replicated arrays, rules and mesh axes without effect, uneven batches, idle stages."""

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
"""Largest share of the parameters' bytes that may be replicated along a mesh axis without a warning."""

IDLE_AT_MOST = 0.3
"""Largest share of idle time of pipeline stages without a warning."""

_SHOWN = 3
_ROWS = ("batch", "head_batch")
_REPLICATED_ROWS = "every device computes all of them"


@attrs.frozen
class Warning:
    """A setting that works, and is probably not what was meant.

    Attributes:
        kind: "replicated", "rule", "axis", "batch", "indivisible", "heads", "workers", "stage" or "memory".
        path: A field of the experiment, or a mesh axis.
        message: The finding, and what could be done.
    """

    kind: str
    path: str
    message: str


def warnings(layout: Layout, rows: int, length: int, heads: tuple[int, int]) -> list[Warning]:
    """All warnings about a layout.

    Args:
        layout: The layout.
        rows: Rows of a micro-batch.
        length: Tokens of a row that go through the layers.
        heads: Numbers of query heads and key/value heads of an attention layer.
    """
    traces = _traces(layout, rows, length)
    return [
        *_replicated(layout),
        *_idle_axes(layout, traces),
        *_idle_rules(layout, traces),
        *_unsharded_batch(layout, rows),
        *_indivisible(layout),
        *_sharded_heads(layout, heads),
        *_mixed_workers(layout),
        *_idle_stages(layout, rows),
    ]


def _replicated(layout: Layout) -> Iterator[Warning]:
    """Parameters replicated along an axis other than `data`."""
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
            f"{share:.0%} of the parameters' bytes are replicated along {axis}={size}; the largest: {', '.join(named)}"
        )
        yield Warning("replicated", f"mesh.{axis}", message)


def _could(placed: Placed, axis: str, size: int) -> str:
    able = [
        f"'{name}'"
        for name, length, shards in zip(placed.axes, placed.shape, placed.shards, strict=True)
        if isinstance(name, str) and length % (shards * size) == 0
    ]
    return f"{' or '.join(able)} could be sharded over {axis}" if able else f"no dimension divides by {axis}={size}"


def _idle_axes(layout: Layout, traces: Sequence[_Trace]) -> Iterator[Warning]:
    used = {
        axis for trace in traces for rule in trace.tried if rule.outcome == "taken" for axis in mesh_axes(rule.axes)
    }
    for axis, size in layout.mesh.sizes.items():
        if size > 1 and axis not in used:
            yield Warning(
                "axis", f"mesh.{axis}", f"nothing is sharded over {axis}={size}: its devices do the same work"
            )


@attrs.frozen
class _Trace:
    """The rules tried for one array or activation; the first ones are its `array_rules`, by (pattern, rule) index."""

    tried: tuple[Tried, ...]
    rules: Rules
    array_rules: tuple[tuple[int, int], ...] = ()

    def reason(self, rule: Tried) -> str:
        """Why a rule was not taken; names other rules in full, since their numbers are not those of the user's list."""
        return re.sub(r"^rule (\d+)", lambda match: "({!r}, {!r})".format(*self.rules[int(match[1])]), rule.why)


def _traces(layout: Layout, rows: int, length: int) -> list[_Trace]:
    """Traces of all parameters and activations."""
    traces: list[_Trace] = []
    for placed in layout.parameters():
        array_rules = [
            (index, number)
            for index, (pattern, rules) in enumerate(layout.mesh.array_rules)
            if fnmatch.fnmatchcase(placed.path, pattern)
            for number in range(len(rules))
        ]
        traces.append(_Trace(placed.resolved.trace, placed.rules, tuple(array_rules)))
    # Rows are padded to a length that `context` divides; widths are not checked here: 0 is divisible by everything.
    padded = length + -length % layout.length_shards
    for width in (axis for axis in ACTIVATION_AXES if axis not in (*_ROWS, "length")):
        for first in _ROWS:
            traces.append(_Trace(layout.resolve((first, "length", width), (rows, padded, 0)).trace, layout.rules))
    return traces


def _idle_rules(layout: Layout, traces: Sequence[_Trace]) -> Iterator[Warning]:
    """The user's rules that are never taken, with the most frequent reason."""
    first = {rule: index for index, rule in reversed(list(enumerate(layout.rules)))}
    outcomes: dict[int, list[tuple[str, str]]] = {}
    array_outcomes: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for trace in traces:
        for tried in trace.tried:
            number = (-1 if tried.rule is None else tried.rule) - len(trace.array_rules)
            outcome = tried.outcome, trace.reason(tried)
            if tried.rule is not None and number < 0:
                array_outcomes.setdefault(trace.array_rules[tried.rule], []).append(outcome)
            elif tried.rule is not None:
                outcomes.setdefault(number, []).append(outcome)
    for index, rule in enumerate(layout.mesh.rules):
        is_duplicate = rule in layout.mesh.rules[:index]
        tried = [("used", "duplicate rule")] if is_duplicate else outcomes.get(first[rule], [])
        yield from _without_effect(f"mesh.rules.{index}", rule, tried)
    for index, (_, rules) in enumerate(layout.mesh.array_rules):
        for number, rule in enumerate(rules):
            tried = array_outcomes.get((index, number), [])
            yield from _without_effect(f"mesh.array_rules.{index}.1.{number}", rule, tried)


def _without_effect(path: str, rule: tuple[str, Target], tried: Sequence[tuple[str, str]]) -> Iterator[Warning]:
    if any(outcome == "taken" for outcome, _ in tried):
        return
    reasons = [why for _, why in tried] or [f"no array of this experiment has an axis '{rule[0]}'"]
    why = max(reasons, key=reasons.count)
    yield Warning("rule", path, f"({rule[0]!r}, {rule[1]!r}) has no effect: {why}")


def _unsharded_batch(layout: Layout, rows: int) -> Iterator[Warning]:
    (axes,) = layout.resolve(("batch",)).spec
    (taken,) = layout.batch_spec(rows)
    if taken != axes:
        over = sizes(axes, layout.mesh.sizes)
        instead = f"they are sharded over {sizes(taken, layout.mesh.sizes)} alone" if taken else _REPLICATED_ROWS
        yield Warning("batch", "microbatch_size", f"{rows} rows do not divide by {over}: {instead}")


def _indivisible(layout: Layout) -> Iterator[Warning]:
    reasons: dict[str, str] = {}
    for placed in layout.parameters():
        why = [f"axis {rule.dimension}: {rule.why}" for rule in placed.resolved.trace if rule.outcome == "indivisible"]
        if why:
            reasons.setdefault(starred(placed.path), "; ".join(dict.fromkeys(why)))
    if reasons:
        shown = ", ".join(f"{path} ({why})" for path, why in list(reasons.items())[:_SHOWN])
        rest = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        yield Warning("indivisible", "mesh.indivisible", f"not sharded where rules do not divide: {shown}{rest}")


def _sharded_heads(layout: Layout, heads: tuple[int, int]) -> Iterator[Warning]:
    for name, count in zip(("heads", "kv_heads"), heads, strict=True):
        (target,) = layout.resolve((name,)).spec
        shards = pieces(target, layout.mesh.sizes)
        is_sharded = any(p.shards[p.axes.index(name)] > 1 for p in layout.parameters() if name in p.axes)
        if is_sharded and count % shards:
            over = sizes(target, layout.mesh.sizes)
            message = f"{count} {name} do not divide over {over}: they are sharded within a head, and gathered for use"
            yield Warning("heads", f"mesh.{mesh_axes(target)[0]}", message)


def _mixed_workers(layout: Layout) -> Iterator[Warning]:
    data = layout.mesh.data
    if layout.workers > 1 and data > 1 and layout.workers_per_device == layout.workers:
        message = (
            f"{layout.workers} workers do not divide over data={data}, so gradients are reduced over it every step"
        )
        yield Warning("workers", "outer.workers", f"{message}; use a multiple of {data}")


def _idle_stages(layout: Layout, rows: int) -> Iterator[Warning]:
    stages, device_rows = layout.stages, rows // layout.batch_shards(rows)
    parts = parts_in_stages(stages, device_rows)
    share = idle_share(stages, parts)
    if share > IDLE_AT_MOST:
        message = f"pipeline stages are idle {share:.0%} of the time: {device_rows} rows pass in {parts} micro-batches"
        yield Warning("stage", "mesh.stage", f"{message}; a larger microbatch_size makes it less")


def nearest_meshes(layout: Layout, rows: int, problems: Sequence[Problem]) -> list[Problem]:
    """For indivisible dimensions: the nearest meshes of as many devices on which all dimensions divide."""
    if not any("divisible" in problem.message or "cannot be split" in problem.message for problem in problems):
        return []
    replicate = "or indivisible='replicate', which replicates what does not divide"
    suitable: list[str] = []
    for mesh in candidates(layout.mesh):
        candidate = layout.on(mesh)
        if not (_is_indivisible(candidate) or candidate.batch_problems(rows)):
            suitable.append(sizes(tuple(mesh.sizes), mesh.sizes))
        if len(suitable) == _SHOWN:
            break
    devices = layout.mesh.device_count
    if not suitable:
        return [Problem("mesh", f"no mesh of {devices} devices divides everything; use fewer, {replicate}")]
    return [Problem("mesh", f"meshes of {devices} devices that divide everything: {'; '.join(suitable)}; {replicate}")]


def _is_indivisible(layout: Layout) -> bool:
    return any(size % shards for p in layout.parameters() for size, shards in zip(p.shape, p.shards, strict=True))
