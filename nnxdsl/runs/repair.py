"""Rows of a run that is resumed: those of later, repeated or unreadable lines go, and missing steps are named.

A run that trains a step again must not have it twice, and a file that was edited, merged or damaged must not be
believed: what can be told from the rows themselves is mended, the rest is said.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import attrs

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import JsonLines, Row

_SHOWN = 8  # ranges or lines spelt out in one message


@attrs.frozen
class Key:
    """What a row is about; two rows with equal keys are one too many.

    Attributes:
        step: Its step.
        order: Place among the rows of one step.
        name: What tells it from other rows of its step.
        times: How many such rows there may be.
    """

    step: int
    order: int
    name: str = ""
    times: int = attrs.field(default=1, eq=False)


@attrs.frozen
class _Place:
    """Where a row stands in its file, and what says whether it is the right one of several."""

    key: Key
    number: int
    offset: int
    length: int
    attempt: int
    is_in_order: bool


@attrs.frozen
class Repaired:
    """What became of a file.

    Attributes:
        dropped: How many rows went because they are of the step at which the run is resumed, or of later ones.
        problems: What else was wrong, in words.
        rows: Of all rows that stayed, in their order: step, and place among the rows of that step.
    """

    dropped: int
    problems: list[str]
    rows: list[tuple[int, int]]


def repair(lines: JsonLines, key: Callable[[Row], Key], start: int, starts: Sequence[int]) -> Repaired:
    """Rewrites a file atomically, if it must be, so that its rows are those of the steps before `start`, each once.

    Of several rows of one key, the one stays that the attempt wrote which trained its step; then the one that follows
    the row of the step before; then the first.

    Args:
        lines: The file, which has been checked (`JsonLines.require_plain`).
        key: What a row is about.
        start: The step at which the run is resumed.
        starts: The steps at which its attempts began, the first one first.

    Raises:
        RunError: The file cannot be read or written.
    """
    places: list[_Place] = []
    unreadable: list[int] = []
    dropped, before = 0, -1
    for number, offset, line in lines.lines():
        try:
            row = lines.decode(line, number)
        except RunError:
            unreadable.append(number)
            continue
        found = key(row)
        if found.step >= start:
            dropped += 1
            continue
        is_in_order = found.step in (before, before + 1)
        places.append(_Place(found, number, offset, len(line), row.get("attempt", 0), is_in_order))
        before = found.step
    rows = sorted(_chosen(places, starts), key=lambda place: (place.key.step, place.key.order, place.number))
    repeated = sorted({place.number for place in places} - {place.number for place in rows})
    is_moved = any(one.number > two.number for one, two in itertools.pairwise(rows))
    if dropped or unreadable or repeated or is_moved:
        lines.rewrite((place.offset, place.length) for place in rows)
    name, problems = lines.path.name, list[str]()
    if unreadable:
        problems.append(f"{name}: {_lines(unreadable)} could not be read and {_went(unreadable)}")
    if repeated:
        problems.append(f"{name}: {_lines(repeated)} repeated rows of other lines and {_went(repeated)}")
    if is_moved:
        problems.append(f"{name}: rows did not stand in the order of their steps; they do now")
    return Repaired(dropped, problems, [(place.key.step, place.key.order) for place in rows])


def _chosen(places: Iterable[_Place], starts: Sequence[int]) -> list[_Place]:
    groups: defaultdict[Key, list[_Place]] = defaultdict(list)
    for place in places:
        groups[place.key].append(place)

    def likelihood(place: _Place) -> tuple[bool, bool, int]:
        writer = max((number for number, start in enumerate(starts, 1) if start <= place.key.step), default=0)
        return place.attempt == writer, place.is_in_order, -place.number

    chosen: list[_Place] = []
    for key, group in groups.items():
        if len(group) > key.times:
            group = sorted(group, key=likelihood, reverse=True)[: key.times]
        chosen += group
    return chosen


def missing(steps: Iterable[int], start: int) -> str:
    """The steps below `start` that are not among `steps`, as "steps 3, 5-7"; empty where there are none."""
    gaps: list[tuple[int, int]] = []
    expected = 0
    for step in [*sorted(set(steps)), start]:
        if step > expected:
            gaps.append((expected, step - 1))
        expected = step + 1
    if not gaps:
        return ""
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in gaps[:_SHOWN]]
    more = f" and {len(gaps) - _SHOWN} more gaps" if len(gaps) > _SHOWN else ""
    is_one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
    return f"step{'' if is_one else 's'} {', '.join(shown)}{more}"


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"line{'' if len(numbers) == 1 else 's'} {shown}{more}"


def _went(numbers: Sequence[int]) -> str:
    return "was dropped" if len(numbers) == 1 else "were dropped"
