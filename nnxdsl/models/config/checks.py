"""Checks of configs' fields; no jax."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs


def require_above_zero(config: attrs.AttrsInstance, prefix: str, *names: str) -> None:
    """Checks that these fields are above 0, or None where that is their default.

    Raises:
        ValueError: with the first that is not; `prefix` stands before its name.
    """
    fields = attrs.fields_dict(type(config))
    for name in names:
        value = getattr(config, name)
        if fields[name].default is None and value is None:
            continue
        if not value > 0:
            raise ValueError(f"{prefix}{name} must be above 0, got {value}")


def require_choices(config: attrs.AttrsInstance, prefix: str, choices: Mapping[str, Collection[object]]) -> None:
    """Checks that fields have one of their values.

    Raises:
        ValueError: with the first that has not; `prefix` stands before its name.
    """
    for name, values in choices.items():
        if getattr(config, name) not in values:
            raise ValueError(f"{prefix}{name}: expected one of {values}, got {getattr(config, name)!r}")
