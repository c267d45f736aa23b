"""Rotary positions in a Hub `config.json`, in the spellings of transformers 4 and 5; knows no family, no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from nnxdsl.models.config.rope import DynamicNTK, Llama3RopeScaling, LongRope, Rope, Yarn
from nnxdsl.models.families.hf_config import KINDS, ConfigFile

NAMES = ("rope_theta", "rope_scaling", "rope_parameters")

_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LONG = ("short_factor", "long_factor")
_LONG_NAMES = ("longrope", "su", "yarn")  # the older names that Phi-3 files have
_PHI3_SHORT_LENGTH = 4096  # transformers' default of Phi-3
_YARN = ("beta_slow", "beta_fast", "original_max_position_embeddings")
# By rope_type: fields that an entry must have, and fields that it may have, with their defaults.
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "dynamic": (("factor",), {}),
    "llama3": (("factor", *_LLAMA3), {}),
    "longrope": (("original_max_position_embeddings",), {"factor": None, "attention_factor": None}),
    "proportional": ((), {"factor": 1.0, "partial_rotary_factor": 1.0}),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": None, "mscale": None, "mscale_all_dim": None},
    ),
}

UNREAD = Rope(theta=1.0)
"""In place of rotary positions that could not be read; the problem is noted."""


def read_entry(file: ConfigFile, entry: Any, theta: Any, field: str, *, has_long: bool = False) -> Rope:
    """Reads one entry of RoPE in either spelling.

    Args:
        file: notes the problems.
        entry: such as `{"rope_type": "linear", "factor": 8.0}`, in transformers 5 with its `rope_theta`; or None.
        theta: the `rope_theta` of an entry without one.
        field: the field that the entry comes from, for messages.
        has_long: whether the family has LongRoPE.

    Returns:
        The positions; `UNREAD` if there is a problem.
    """
    if not isinstance(entry, Mapping | None):
        file.problems.append(f"{field}: expected an object, got {entry!r}")
        return UNREAD
    rest: dict[str, Any] = {name: value for name, value in (entry or {}).items() if value is not None}
    kind = rest.pop("rope_type", None) or rest.get("type") or "default"
    rest.pop("type", None)  # older files have both names
    kinds = [kind for kind in _ROPE_TYPES if has_long or kind != "longrope"]
    if kind not in kinds:
        *names, last = map(repr, kinds)
        implemented = f"{', '.join(names)} and {last}"
        file.problems.append(f"{field}: only rope_type {implemented} are implemented, got {kind!r}")
        return UNREAD
    required, optional = _ROPE_TYPES[kind]
    numbers: dict[str, Any] = {"rope_theta": rest.pop("rope_theta", theta)}
    numbers |= {name: rest.pop(name, None) for name in required}
    numbers |= {name: rest.pop(name) for name in optional if name in rest}
    truncate = rest.pop("truncate", True) if kind == "yarn" else True
    factors = {name: rest.pop(name, None) for name in _LONG} if kind == "longrope" else {}
    rest.pop("factor", None)  # with rope_type "default" transformers ignores it, and so does this
    if kind == "yarn" and numbers["original_max_position_embeddings"] is None:
        numbers["original_max_position_embeddings"] = file.fields.get("max_position_embeddings")
    for name, values in factors.items():
        if not isinstance(values, Sequence) or not all(type(value) in (int, float) for value in values):
            file.problems.append(f"{field}: {name}: expected a list of numbers, got {values!r}")
            return UNREAD
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            file.problems.append(f"{field}: {name}: expected a number above 0, got {value!r}")
            return UNREAD
    if rest or not isinstance(truncate, bool):
        file.problems.append(f"{field}: not understood: {rest or {'truncate': truncate}!r}")
    theta, factor = float(numbers["rope_theta"]), float(numbers.get("factor", 1.0))
    numbers = optional | numbers
    try:
        scaling = None
        if kind == "llama3":
            scaling = Llama3RopeScaling(**{name: numbers[name] for name in _LLAMA3})
        elif kind == "yarn":
            attention = _attention_factor(
                factor, *(numbers[name] for name in ("attention_factor", "mscale", "mscale_all_dim"))
            )
            values = {name: numbers[name] for name in _YARN}
            scaling = Yarn(**values, attention_factor=attention, truncate=bool(truncate))
        elif kind == "dynamic":
            scaling = DynamicNTK(original_max_position_embeddings=file.numbers["max_position_embeddings"])
        elif kind == "longrope":
            original, factor = numbers["original_max_position_embeddings"], 1.0
            extension = numbers["factor"] or file.numbers["max_position_embeddings"] / original
            scaling = LongRope(
                **{name: tuple(map(float, values)) for name, values in factors.items()},
                original_max_position_embeddings=original,
                attention_factor=float(numbers["attention_factor"] or _long_attention_factor(extension, original)),
            )
        partial: dict[str, Any] = {}
        if kind == "proportional":
            partial = {"partial_rotary_factor": float(numbers["partial_rotary_factor"]), "partial": "proportional"}
        return Rope(theta=theta, factor=factor, scaling=scaling, **partial)
    except ValueError as error:
        file.problems.append(f"{field}: {error}")
        return UNREAD


def read_rope(
    file: ConfigFile,
    theta: float = 10_000.0,
    partial_rotary_factor: float | None = None,
    ignored: Sequence[str] = (),
    has_long: bool = False,
) -> Rope:
    """Rotary positions that all layers share: `rope_theta` and `rope_scaling`, or `rope_parameters`.

    Args:
        file: the file.
        theta: transformers' default.
        partial_rotary_factor: transformers' default; None in families without that field, where it is not understood.
        ignored: entries without effect on text.
        has_long: whether the family has LongRoPE, whose short length is a field beside the entry, as in Phi-3.
    """
    name = "rope_parameters" if file.fields.get("rope_parameters") is not None else "rope_scaling"
    entry = file.fields.get(name)
    if isinstance(entry, Mapping):
        entry = {key: value for key, value in entry.items() if key not in ignored}
        if has_long and (entry.get("rope_type") or entry.get("type")) in _LONG_NAMES:
            short = file.fields.get("original_max_position_embeddings", _PHI3_SHORT_LENGTH)
            entry |= {"rope_type": "longrope", "original_max_position_embeddings": short}
    if partial_rotary_factor is None:
        return read_entry(file, entry, file.fields.get("rope_theta", theta), name, has_long=has_long)
    partial = file.fields.get("partial_rotary_factor", partial_rotary_factor)
    if isinstance(entry, Mapping) and "partial_rotary_factor" in entry:
        partial = entry["partial_rotary_factor"]
        entry = {key: value for key, value in entry.items() if key != "partial_rotary_factor"}
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        file.problems.append(f"partial_rotary_factor: expected a number above 0 and at most 1, got {partial!r}")
        partial = 1.0
    rope = read_entry(file, entry, file.fields.get("rope_theta", theta), name, has_long=has_long)
    return attrs.evolve(rope, partial_rotary_factor=float(partial))


def read_ropes(file: ConfigFile, thetas: tuple[float, float]) -> tuple[Rope, Rope]:
    """Rotary positions of the local and of the global layers, from `rope_parameters` of both kinds.

    Args:
        file: the file.
        thetas: transformers' defaults, local and global.
    """
    entries = file.fields.get("rope_parameters")
    if not isinstance(entries, Mapping) or not set(entries) <= set(KINDS):
        *others, last = map(repr, KINDS)
        file.problems.append(f"rope_parameters: expected entries {', '.join(others)} and {last}, got {entries!r}")
        return UNREAD, UNREAD
    local, everywhere = (
        read_entry(file, entries.get(kind), theta, f"rope_parameters.{kind}")
        for kind, theta in zip(KINDS, thetas, strict=True)
    )
    return local, everywhere


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """Rotary positions in the spelling that transformers 4 and 5 read."""
    scaling: dict[str, Any] | None = None
    match rope.scaling:
        case Llama3RopeScaling():
            scaling = {"rope_type": "llama3", "factor": rope.factor, **attrs.asdict(rope.scaling)}
        case Yarn():
            scaling = {"rope_type": "yarn", "factor": rope.factor, **attrs.asdict(rope.scaling)}
        case LongRope():
            lists = {name: list(getattr(rope.scaling, name)) for name in _LONG}
            scaling = {"rope_type": "longrope", **attrs.asdict(rope.scaling), **lists}
        case DynamicNTK():
            scaling = {"rope_type": "dynamic", "factor": rope.factor}
        case None if rope.partial == "proportional":
            part = {"partial_rotary_factor": rope.partial_rotary_factor}
            scaling = {"rope_type": "proportional", "factor": rope.factor, **part}
        case None if rope.factor != 1.0:
            scaling = {"rope_type": "linear", "factor": rope.factor}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _long_attention_factor(extension: float, original: int) -> float:
    """The factor of sines and cosines under LongRoPE, by transformers' formula (arXiv:2402.13753, section 3.2)."""
    return 1.0 if extension <= 1 or original <= 1 else math.sqrt(1 + math.log(extension) / math.log(original))


def _attention_factor(
    factor: float, configured: float | None, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """The factor of sines and cosines under YaRN, by transformers' formula."""

    def by(part: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * part * math.log(factor) + 1.0

    if configured is not None:
        return float(configured)
    return by(mscale) / by(mscale_all_dim) if mscale and mscale_all_dim else by(1.0)
