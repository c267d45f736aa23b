"""Repairs JSON-lines files before a resume: drops later, repeated and unreadable rows, and reports missing steps.

A step that is trained again must have one row, and files may have been edited, merged or damaged in the meantime.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import attrs

from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import JsonLines, Row

_MAX_LISTED = 8  # ranges or lines in one message


@attrs.frozen
class Key:
    """Identifies a row; two rows with equal keys are duplicates.

    Attributes:
        step: The step of the row.
        order: Position among the rows of one step.
        name: Distinguishes it from other rows of its step.
        times: How many rows with this key are allowed.
    """

    step: int
    order: int
    name: str = ""
    times: int = attrs.field(default=1, eq=False)


@attrs.frozen
class _RowPosition:
    """The position of a row in its file, and what decides between duplicates."""

    key: Key
    number: int
    offset: int
    length: int
    attempt: int
    is_in_order: bool


@attrs.frozen
class RepairResult:
    """The result of `repair`.

    Attributes:
        dropped: Number of rows of the resumed step and later ones, which were dropped.
        problems: A message for each other problem.
        rows: Step and order of all remaining rows, sorted.
    """

    dropped: int
    problems: list[str]
    rows: list[tuple[int, int]]


def repair(lines: JsonLines, key: Callable[[Row], Key], start: int, starts: Sequence[int]) -> RepairResult:
    """Rewrites a file atomically, if needed, so that it has one row per key of the steps before `start`, sorted.

    Of duplicates it prefers the row of the attempt that trained the step, then a row that directly follows the row of
    the previous step, then the first.

    Args:
        lines: The file, which has been checked (`JsonLines.require_plain`).
        key: Gives the key of a row.
        start: The step at which the run is resumed.
        starts: The steps at which its attempts started, in order.

    Raises:
        RunError: The file cannot be read or written.
    """
    places: list[_RowPosition] = []
    unreadable: list[int] = []
    dropped, previous_step = 0, -1
    for number, offset, line in lines.lines():
        try:
            row = lines.decode(line, number)
        except RunError:
            unreadable.append(number)
            continue
        row_key = key(row)
        if row_key.step >= start:
            dropped += 1
            continue
        is_in_order = row_key.step in (previous_step, previous_step + 1)
        places.append(_RowPosition(row_key, number, offset, len(line), row.get("attempt", 0), is_in_order))
        previous_step = row_key.step
    rows = sorted(_deduplicate(places, starts), key=lambda place: (place.key.step, place.key.order, place.number))
    repeated = sorted({place.number for place in places} - {place.number for place in rows})
    is_moved = any(one.number > two.number for one, two in itertools.pairwise(rows))
    if dropped or unreadable or repeated or is_moved:
        lines.rewrite((place.offset, place.length) for place in rows)
    name, problems = lines.path.name, list[str]()
    if unreadable:
        problems.append(f"{name}: {_lines(unreadable)} could not be read and {_were_dropped(unreadable)}")
    if repeated:
        problems.append(f"{name}: {_lines(repeated)} repeated rows of other lines and {_were_dropped(repeated)}")
    if is_moved:
        problems.append(f"{name}: rows were not sorted by step; they are now")
    return RepairResult(dropped, problems, [(place.key.step, place.key.order) for place in rows])


def _deduplicate(places: Iterable[_RowPosition], starts: Sequence[int]) -> list[_RowPosition]:
    groups: defaultdict[Key, list[_RowPosition]] = defaultdict(list)
    for place in places:
        groups[place.key].append(place)

    def likelihood(place: _RowPosition) -> tuple[bool, bool, int]:
        writer = max((number for number, start in enumerate(starts, 1) if start <= place.key.step), default=0)
        return place.attempt == writer, place.is_in_order, -place.number

    chosen: list[_RowPosition] = []
    for key, group in groups.items():
        if len(group) > key.times:
            group = sorted(group, key=likelihood, reverse=True)[: key.times]
        chosen += group
    return chosen


def missing_steps(steps: Iterable[int], start: int) -> str:
    """Names the steps below `start` that are not in `steps`, as "steps 3, 5-7"; empty if there are none."""
    gaps: list[tuple[int, int]] = []
    expected = 0
    for step in [*sorted(set(steps)), start]:
        if step > expected:
            gaps.append((expected, step - 1))
        expected = step + 1
    if not gaps:
        return ""
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in gaps[:_MAX_LISTED]]
    more = f" and {len(gaps) - _MAX_LISTED} more gaps" if len(gaps) > _MAX_LISTED else ""
    is_one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
    return f"step{'' if is_one else 's'} {', '.join(shown)}{more}"


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_LISTED]))
    more = f" and {len(numbers) - _MAX_LISTED} more" if len(numbers) > _MAX_LISTED else ""
    return f"line{'' if len(numbers) == 1 else 's'} {shown}{more}"


def _were_dropped(numbers: Sequence[int]) -> str:
    return "was dropped" if len(numbers) == 1 else "were dropped"
