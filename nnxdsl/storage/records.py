"""What the fields of a run's files may be: each record is checked where it is read; knows JSON and no file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

LARGEST = 2**63
"""Integers in records are below it, so that they fit an int64 and a float."""


@attrs.frozen
class Kind:
    """What a field may hold.

    Attributes:
        words: For people: "an integer >= 0".
        accepts: Whether a value is one.
    """

    words: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """The same, or null."""
        return Kind(f"{self.words} or null", lambda value: value is None or self.accepts(value))


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer that fits 64 bits; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def is_number(value: object) -> bool:
    """Whether a JSON value is an integer that fits 64 bits, or a float, which may be NaN or infinite."""
    return is_integer(value) or isinstance(value, float)


def is_line(value: object) -> bool:
    """Whether a JSON value is text that can be printed on one line."""
    return isinstance(value, str) and value.isprintable()


def _is_text(value: object) -> bool:
    """Whether it can be written to a terminal or named to the operating system: no NUL, no lone surrogates."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= one <= "\udfff" for one in value)


def _is_finite(value: object) -> bool:
    return is_number(value) and math.isfinite(value)  # pyright: ignore[reportArgumentType]


COUNT = Kind("an integer >= 0", lambda value: is_integer(value) and value >= 0)
ORDINAL = Kind("an integer > 0", lambda value: is_integer(value) and value > 0)
INTEGER = Kind("an integer", is_integer)
FINITE = Kind("a finite number", _is_finite)
TEXT = Kind("text", _is_text)
STRING = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))

CLOCK: Mapping[str, Kind] = {"wall": FINITE, "monotonic": FINITE, "boot": TEXT.or_null()}


def one_of(values: tuple[str, ...]) -> Kind:
    """One of some words."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def record(fields: Mapping[str, Kind]) -> Kind:
    """An object whose fields, those that are there, are of these kinds."""
    return Kind("an object", lambda value: isinstance(value, dict) and problem_in(value, fields) is None)


STATUS: Mapping[str, Kind] = {
    "stage": TEXT.or_null(),
    "attempt": COUNT.or_null(),
    "step": COUNT.or_null(),
    "total": COUNT.or_null(),
    "eta_seconds": FINITE.or_null(),
    "checkpoint": COUNT.or_null(),
    "pid": ORDINAL.or_null(),
    "pid_started": COUNT.or_null(),
    "host": TEXT.or_null(),
    "error": TEXT.or_null(),
    "exit_code": INTEGER.or_null(),
    "heartbeat": Kind("an object of wall, monotonic and boot", record(CLOCK).accepts).or_null(),
}
"""Of `status.json`, beside its state."""

HOLDER: Mapping[str, Kind] = {"pid": ORDINAL, "pid_started": COUNT.or_null(), "host": TEXT, "since": TEXT}
"""Of `lock`, while a process writes the run."""

METRICS: Mapping[str, Kind] = {"step": COUNT, "attempt": COUNT, "kind": STRING}
"""Of a row of `metrics.jsonl`."""

SAMPLE: Mapping[str, Kind] = {
    "step": COUNT,
    "attempt": COUNT,
    "prompt": STRING,
    "policy": STRING,
    "reference": STRING.or_null(),
}
"""Of a row of `samples.jsonl`."""

EVENT: Mapping[str, Kind] = {"time": STRING, "event": STRING}
"""Of a row of `events.jsonl`."""

ATTEMPT: Mapping[str, Kind] = {
    "attempt": ORDINAL,
    "start": COUNT,
    "time": STRING,
    "argv": LIST,
    "cwd": STRING,
    "host": STRING,
    "experiment": OBJECT,
}
"""Of a row of `attempts.jsonl`."""


def problem_in(fields: Mapping[str, Any], kinds: Mapping[str, Kind], *, required: tuple[str, ...] = ()) -> str | None:
    """The first field that is missing or of another kind: "step: expected an integer >= 0, got 'x'"; None if all fit.

    Fields that `kinds` does not name may be anything.
    """
    for name in required:
        if name not in fields:
            return f"{name}: missing, expected {kinds[name].words}"
    for name, kind in kinds.items():
        if name in fields and not kind.accepts(fields[name]):
            return f"{name}: expected {kind.words}, got {_shown(fields[name])}"
    return None


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return type(value).__name__
    if isinstance(value, int) and abs(value) >= LARGEST:
        return "an integer of more than 64 bits"
    return ascii(value)[:60]
