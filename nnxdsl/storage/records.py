"""Schemas of the JSON records in a run's files, checked wherever a record is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

LARGEST = 2**63
"""Integers in records are smaller, so that they fit an int64."""


@attrs.frozen
class Kind:
    """The type of a field.

    Attributes:
        description: For messages: "an integer >= 0".
        accepts: Whether a value has the type.
    """

    description: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """This type, or null."""
        return Kind(f"{self.description} or null", lambda value: value is None or self.accepts(value))


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer that fits 64 bits; a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def is_number(value: object) -> bool:
    """Whether a JSON value is an integer that fits 64 bits, or a float, which may be NaN or infinite."""
    return is_integer(value) or isinstance(value, float)


def is_line(value: object) -> bool:
    """Whether a JSON value is a string that can be printed on one line."""
    return isinstance(value, str) and value.isprintable()


def _is_text(value: object) -> bool:
    """Whether a value is a string that terminals and the operating system accept: no NUL, no lone surrogates."""
    return isinstance(value, str) and "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


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
    """One of some strings."""
    return Kind(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def record(fields: Mapping[str, Kind]) -> Kind:
    """An object whose fields, as far as present, are of these kinds."""
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
"""Fields of `status.json` other than its state."""

HOLDER: Mapping[str, Kind] = {"pid": ORDINAL, "pid_started": COUNT.or_null(), "host": TEXT, "since": TEXT}
"""Fields of `lock`, while a process writes the run."""

METRICS: Mapping[str, Kind] = {"step": COUNT, "attempt": COUNT, "kind": STRING}
"""Fields of a row of `metrics.jsonl`; metrics themselves may have any name."""

SAMPLE: Mapping[str, Kind] = {
    "step": COUNT,
    "attempt": COUNT,
    "prompt": STRING,
    "policy": STRING,
    "reference": STRING.or_null(),
}
"""Fields of a row of `samples.jsonl`."""

COMPLETION: Mapping[str, Kind] = {
    "text": STRING,
    "reward": FINITE.or_null(),
    "rewards": Kind(
        "an object of finite numbers or null",
        lambda value: isinstance(value, dict) and all(one is None or _is_finite(one) for one in value.values()),
    ),
    "advantage": FINITE.or_null(),
    "length": COUNT,
    "truncated": Kind("true or false", lambda value: isinstance(value, bool)),
}
"""Fields of a completion in a row of `rollouts.jsonl`; a reward is null where it does not apply, an advantage where
the objective has none."""
EXTRA: Mapping[str, Kind] = {
    "turns": Kind(
        "a list of messages",
        lambda value: isinstance(value, list) and all(isinstance(one, dict) and _is_message(one) for one in value),
    ),
    "extra": Kind(
        "an object of text, numbers, true, false and null",
        lambda value: isinstance(value, dict) and not any(isinstance(one, list | dict) for one in value.values()),
    ),
}
"""Fields that it has if there is an environment, and if reward functions record something."""


def _is_message(value: dict[str, Any]) -> bool:
    """Whether an object has a role and text, and tool calls in the format of OpenAI if there are any."""
    texts = {name: text for name, text in value.items() if name != "tool_calls"}
    calls = value.get("tool_calls", [])
    return (
        {"role", "content"} <= texts.keys()
        and all(isinstance(text, str) for text in texts.values())
        and isinstance(calls, list)
        and all(isinstance(call, dict) and _is_function(call.get("function")) for call in calls)
    )


def _is_function(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict)


def _is_completion_list(value: Any) -> bool:
    """Whether a JSON value is a list of completions with all of their fields."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and problem_in(one, {**COMPLETION, **EXTRA}, required=tuple(COMPLETION)) is None
        for one in value
    )


ROLLOUT: Mapping[str, Kind] = {
    "step": COUNT,
    "attempt": COUNT,
    "group": COUNT,
    "row": STRING,
    "prompt": STRING,
    "completions": Kind("a list of completions", _is_completion_list),
}
"""Fields of a row of `rollouts.jsonl`: a prompt of a step with its group of completions."""

EVENT: Mapping[str, Kind] = {"time": STRING, "event": STRING}
"""Fields of a row of `events.jsonl`."""

ATTEMPT: Mapping[str, Kind] = {
    "attempt": ORDINAL,
    "start": COUNT,
    "time": STRING,
    "argv": LIST,
    "cwd": STRING,
    "host": STRING,
    "experiment": OBJECT,
}
"""Fields of a row of `attempts.jsonl`."""


def problem_in(fields: Mapping[str, Any], kinds: Mapping[str, Kind], *, required: tuple[str, ...] = ()) -> str | None:
    """A message for the first missing or invalid field: "step: expected an integer >= 0, got 'x'"; else None.

    Fields that `kinds` does not name may have any value.
    """
    for name in required:
        if name not in fields:
            return f"{name}: missing, expected {kinds[name].description}"
    for name, kind in kinds.items():
        if name in fields and not kind.accepts(fields[name]):
            return f"{name}: expected {kind.description}, got {_shown(fields[name])}"
    return None


def changes(descriptions: Mapping[str, str], saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Messages for the values of `current` that differ from those in a checkpoint.

    Args:
        descriptions: What a message says about a change, by name: "the seed has changed".
        saved: The values in the checkpoint.
        current: The values of this run; others are not compared.
    """
    return [
        f"{descriptions[name]}: the checkpoint has {_abbreviated(saved.get(name))}, this run {_abbreviated(value)}"
        for name, value in current.items()
        if name in descriptions and saved.get(name) != value
    ]


def _abbreviated(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 16 else str(value)


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return type(value).__name__
    if isinstance(value, int) and abs(value) >= LARGEST:
        return "an integer of more than 64 bits"
    return ascii(value)[:60]
