"""What devices send each other in one call of a compiled program, read from XLA's text of it; knows no jax."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import attrs

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.$-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.$-]+ = (.*)")
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")  # the first one: a type has no lower-case word before a parenthesis
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.$-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+[0-9][a-z0-9]*|pred|token)\[([^\]]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")


@attrs.frozen
class Traffic:
    """Collectives of one kind.

    Attributes:
        kind: Such as "all-gather".
        group: Devices that take part in each; 0 where the text does not say (all of them, or pairs).
        in_loop: Whether they stand in a loop.
        conditional: Whether they stand in a branch, so that they are done at most so often.
        count: How often one is done.
        bytes: Of all their results, on one device.
    """

    kind: str
    group: int
    in_loop: bool
    conditional: bool
    count: int
    bytes: int


_Key = tuple[str, int, bool, bool]
_Sums = dict[_Key, tuple[int, int]]


@attrs.define
class _Computation:
    own: _Sums = attrs.field(factory=dict)
    calls: list[tuple[str, int, bool]] = attrs.field(factory=list)  # callee, times, whether a loop
    branches: list[tuple[str, ...]] = attrs.field(factory=list)


def collectives(text: str) -> list[Traffic]:
    """Every collective of a compiled program, summed up by kind, most bytes first.

    A loop's are multiplied by how often it is known to turn (once where XLA does not know); of the branches of a
    conditional the one with more counts, as if it were taken each time.

    Args:
        text: `compiled.as_text()`: the program of one device.
    """
    computations, entry = _read(text)
    known: dict[str, _Sums] = {}

    def sums(name: str) -> _Sums:
        if name not in known:
            known[name] = {}
            computation = computations.get(name, _Computation())
            total = dict(computation.own)
            for callee, times, is_loop in computation.calls:
                _add(total, sums(callee), times, is_loop=is_loop)
            for branches in computation.branches:
                _add(total, _larger(map(sums, branches)), conditional=True)
            known[name] = total
        return known[name]

    found = [Traffic(*key, count, size) for key, (count, size) in sums(entry).items()]
    return sorted(found, key=lambda one: (-one.bytes, one.kind, one.group))


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


def _read(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry, current = "", _Computation()
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head[2]] = _Computation()
            entry = head[2] if head[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            _note(current, instruction[1])
    return computations, entry


def _note(computation: _Computation, words: str) -> None:
    found = _OPCODE.search(words)
    if found is None:
        return
    opcode, result = found[1], words[: found.start()]
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
        # The result of most "-start" forms is (operands, results, contexts); that of all-reduce-start is the results.
        parts = _elements(result) if opcode != kind and kind != "all-reduce" else []
        size = _bytes(parts[1] if len(parts) > 1 else result)
        _add(computation.own, {(kind, _group(words), False, False): (1, size)})
    elif opcode in ("async-update", "async-done"):
        return  # they name the same computation as their async-start
    elif branches := _BRANCHES.search(words):
        computation.branches.append(tuple(name.strip().removeprefix("%") for name in branches[1].split(",")))
        return
    called = [(role, name) for role, name in _CALLED.findall(words)]
    either = tuple(name for role, name in called if role in ("true_computation", "false_computation"))
    if either:
        computation.branches.append(either)
    is_loop = opcode == "while"
    trips = _TRIPS.search(words) if is_loop else None
    times = int(trips[1]) if trips else 1
    computation.calls += [(name, times, is_loop) for _, name in called if name not in either]


def _elements(result: str) -> list[str]:
    """The outermost elements of a tuple type; none if it is no tuple."""
    return list(_cut(result[1:-1])) if result.startswith("(") else []


def _cut(inside: str) -> Iterator[str]:
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
    width = re.search(r"\d+", dtype)  # "bf16", "s4", "f8e4m3fn": the first number is the bits; of "pred", a byte
    size = math.prod(int(axis.strip().removeprefix("<=")) for axis in shape.split(",") if axis.strip())
    return math.ceil(size * (int(width[0]) if width else 8) / 8)


def _group(words: str) -> int:
    """Devices of one replica group, in each of the three spellings."""
    if listed := _LISTED.search(words):
        return len(listed[1].split(","))
    if iota := _IOTA.search(words):
        return int(iota[1])
    if mesh := _MESH.search(words):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        # A part of an axis is written 'axis':(before)size.
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[axis] for axis, part in axes)
    return 0
