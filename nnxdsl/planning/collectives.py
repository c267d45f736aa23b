"""Collectives of a compiled program, read from its HLO text. Loads no jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import attrs

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.$-]+) = (.*)")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")  # the first match: types have no lower-case word before a parenthesis
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_OPERANDS = re.compile(r"%([\w.$-]+)")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+[0-9][a-z0-9]*|pred|token)\[([^\]]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")


@attrs.frozen
class Traffic:
    """Collectives of one kind, group size and context.

    Attributes:
        kind: Such as "all-gather".
        group: Devices of a replica group; 0 if the text does not name them (all of them, or pairs).
        in_loop: Whether they are in a loop.
        conditional: Whether they are in a branch, so that `count` is an upper bound.
        count: Number of executions.
        bytes: Of all results, on one device.
    """

    kind: str
    group: int
    in_loop: bool
    conditional: bool
    count: int
    bytes: int


_Key = tuple[str, int, bool, bool]
_Sums = dict[_Key, tuple[int, int]]


@attrs.frozen
class _Collective:
    """A collective instruction."""

    kind: str
    group: int
    bytes: int
    channel: str | None


@attrs.frozen
class _Loop:
    """A while instruction: the names of its computations and its operand, and its trip count if it is known."""

    body: str
    condition: str
    operand: str
    trips: int | None


@attrs.define
class _Computation:
    collectives: list[_Collective] = attrs.field(factory=list)
    calls: list[str] = attrs.field(factory=list)
    fusions: list[str] = attrs.field(factory=list)
    loops: list[_Loop] = attrs.field(factory=list)
    branches: list[tuple[str, ...]] = attrs.field(factory=list)
    scalars: dict[str, tuple[str, str]] = attrs.field(
        factory=dict
    )  # opcode and operands, from which trip counts follow
    root: str = ""


def collectives(text: str) -> list[Traffic]:
    """The collectives of a compiled program, summed by kind, most bytes first.

    `text` is `compiled.as_text()`, the program of one device. Collectives of a loop are multiplied by its trip count (1
    if unknown); of a conditional's branches the largest counts.
    """
    computations, entry = _read(text)
    totals: dict[str, _Sums] = {}

    def sums(name: str) -> _Sums:
        if name not in totals:
            totals[name] = {}
            computation = computations.get(name, _Computation())
            total: _Sums = {}
            for one in [*computation.collectives, *_fused(computation, computations)]:
                _add(total, {(one.kind, one.group, False, False): (1, one.bytes)})
            for callee in computation.calls:
                _add(total, sums(callee))
            for loop in computation.loops:
                times = loop.trips or _trips(loop, computation, computations.get(loop.condition, _Computation()))
                for callee in (loop.body, loop.condition):
                    _add(total, sums(callee), times, is_loop=True)
            for branches in computation.branches:
                _add(total, _larger(map(sums, branches)), conditional=True)
            totals[name] = total
        return totals[name]

    traffic = [Traffic(*key, count, size) for key, (count, size) in sums(entry).items()]
    return sorted(traffic, key=lambda one: (-one.bytes, one.kind, one.group))


def _add(total: _Sums, more: _Sums, times: int = 1, *, is_loop: bool = False, conditional: bool = False) -> None:
    for (kind, group, looped, branched), (count, size) in more.items():
        key = (kind, group, looped or is_loop, branched or conditional)
        before = total.get(key, (0, 0))
        total[key] = (before[0] + times * count, before[1] + times * size)


def _larger(branches: Iterable[_Sums]) -> _Sums:
    largest: _Sums = {}
    for branch in branches:
        for key, (count, size) in branch.items():
            before = largest.get(key, (0, 0))
            largest[key] = (max(before[0], count), max(before[1], size))
    return largest


def _fused(caller: _Computation, computations: dict[str, _Computation]) -> list[_Collective]:
    """Collectives in the fusions of a computation.

    XLA:TPU fuses start, update and done of one collective with other work, each with an instruction of the same
    channel; and a reduce-scatter is an all-reduce in a fusion named "all-reduce-scatter".
    """
    collectives: list[_Collective] = []
    for name in caller.fusions:
        fused = computations.get(name, _Computation())
        for one in [*fused.collectives, *_fused(fused, computations)]:
            if name.startswith("all-reduce-scatter") and one.kind == "all-reduce" and one.group:
                one = attrs.evolve(one, kind="reduce-scatter", bytes=one.bytes // one.group)
            if one.channel is None or all((one.kind, one.channel) != (c.kind, c.channel) for c in collectives):
                collectives.append(one)
    return collectives


def _trips(loop: _Loop, caller: _Computation, condition: _Computation) -> int:
    """The trip count of a loop that counts by ones to a constant, else 1; XLA:TPU does not annotate it."""
    opcode, operands = condition.scalars.get(condition.root, ("", ""))
    names = _OPERANDS.findall(operands.partition(")")[0])
    if opcode != "compare" or "direction=LT" not in operands or len(names) != 2:
        return 1
    end = _constant(names[1], condition)
    _, counter = condition.scalars.get(names[0], ("", ""))
    index = _INDEX.search(counter)
    _, operand = caller.scalars.get(loop.operand, ("", ""))
    state = _OPERANDS.findall(operand.partition(")")[0])
    if end is None or index is None or int(index[1]) >= len(state):
        return 1
    return max(1, end - (_constant(state[int(index[1])], caller) or 0))


def _constant(name: str, computation: _Computation) -> int | None:
    """The value of an integer, through copies."""
    opcode, operands = computation.scalars.get(name, ("", ""))
    while opcode in ("copy", "bitcast"):
        opcode, operands = computation.scalars.get(_OPERANDS.findall(operands)[0], ("", ""))
    inside = operands[1:].partition(")")[0]
    return int(inside) if opcode == "constant" and inside.lstrip("-").isdecimal() else None


def _read(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head[2]] = _Computation()
            entry = head[2] if head[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            if instruction[1]:
                current.root = instruction[2]
            _add_instruction(current, instruction[2], instruction[3])
    return computations, entry


def _add_instruction(computation: _Computation, name: str, definition: str) -> None:
    match = _OPCODE.search(definition)
    if match is None:
        return
    opcode, result, rest = match[1], definition[: match.start()], definition[match.end() - 1 :]
    if opcode in ("constant", "copy", "bitcast", "get-tuple-element", "tuple", "compare"):
        computation.scalars[name] = (opcode, rest)
        return
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
        # The result of most "-start" forms is (operands, results, contexts); that of all-reduce-start is the results.
        parts = _elements(result) if opcode != kind and kind != "all-reduce" else []
        size = _bytes(parts[1] if len(parts) > 1 else result)
        channel = _CHANNEL.search(rest)
        computation.collectives.append(_Collective(kind, _group(rest), size, channel[1] if channel else None))
    elif opcode in ("async-update", "async-done"):
        return  # they call the same computation as their async-start
    roles = dict(_CALLED.findall(rest))
    if opcode == "while":
        trips, operand = _TRIPS.search(rest), _OPERANDS.search(rest)
        count = int(trips[1]) if trips else None
        computation.loops.append(_Loop(roles["body"], roles["condition"], operand[1] if operand else "", count))
    elif opcode == "conditional":
        listed = _BRANCHES.search(rest)
        branches = listed[1].split(",") if listed else [roles["true_computation"], roles["false_computation"]]
        computation.branches.append(tuple(branch.strip().removeprefix("%") for branch in branches))
    elif opcode == "fusion":
        computation.fusions += roles.values()
    else:
        computation.calls += roles.values()


def _elements(result: str) -> list[str]:
    """The outermost elements of a tuple type; none for other types."""
    return list(_split_commas(result[1:-1])) if result.startswith("(") else []


def _split_commas(inside: str) -> Iterator[str]:
    depth = start = 0
    for index, character in enumerate(inside):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield inside[start:index]
            start = index + 1
    yield inside[start:]


def _bytes(result: str) -> int:
    """Bytes of all arrays of a type."""
    return sum(_array_bytes(dtype, shape) for dtype, shape in _ARRAY.findall(result))


def _array_bytes(dtype: str, shape: str) -> int:
    if dtype == "token":
        return 0
    width = re.search(r"\d+", dtype)  # "bf16", "s4", "f8e4m3fn": the first number is the bits; "pred" has a byte
    size = math.prod(int(axis.strip().removeprefix("<=")) for axis in shape.split(",") if axis.strip())
    return math.ceil(size * (int(width[0]) if width else 8) / 8)


def _group(attributes: str) -> int:
    """Devices of one replica group, in each of the three notations."""
    if listed := _LISTED.search(attributes):
        return len(listed[1].split(","))
    if iota := _IOTA.search(attributes):
        return int(iota[1])
    if mesh := _MESH.search(attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        # A part of an axis is written 'axis':(before)size.
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in axes)
    return 0
