"""What a case gives, and how it is compared with what was recorded.

A result is a dict with some of these parts; each is compared in its own way:

- `series`: name -> numbers. Compared within a bound relative to the largest of the series (`Bounds`).
- `sums`: name -> sums of magnitudes of arrays, ascending. Compared each relative to itself.
- `exact`: name -> JSON value. Equal on every machine.
- `here`: name -> JSON value. Equal on the machine and with the versions that recorded it; elsewhere not compared.
- `bits`: name -> digest of arrays that were computed, in any order and without their names. A difference within the
  bound of `series` shows here and nowhere else: it is reported, and a failure only where that is asked for.
- `names`: name -> digest of names (paths of arrays, JSON keys, messages), apart from all values.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import numpy as np

Result = dict[str, dict[str, Any]]

RENAMED: dict[str, str] = {}
"""Name in the recorded files -> name now, of series whose name alone has changed. `--update` makes it unnecessary."""

SAME, ELSEWHERE = 1e-7, 1e-5
"""Bounds: on the machine and with the versions that recorded a result, and on others."""

ROUGH, ROUNDING = (
    1e-2,
    ("training-", "grpo", "mesh-grpo", "resumed", "compute-bfloat16", "adamw-bfloat16", "guard-spikes"),
)
"""The bound on other machines of cases whose names begin so.

They round to few bits, draw tokens, or have a loss that is a sum of advantages of mean zero: they make much of what
sums in another order do to last bits. Compiled for SSE4.2 alone, `training-int8` differs by 2e-3 and `grpo` by 1e-4; of
16 other cases that were tried so, none by more than 3e-6.
"""

CHAOTIC = {"discopop-int4-dora": 4, "family-qwen3-next-mtp": 4}
"""Cases of which only the first steps are compared on other machines, within `ROUGH`, and no trained arrays.

Each step multiplies a difference of last bits. DiscoPOP weighs its two losses by a sigmoid of the margin over 0.05, and
its forward KL has exponentials of log-ratios; gradients of Qwen3-Next with random weights have a norm of 39, and differ
by 1e-5 before the first update. One commit compiled for SSE4.2 alone instead of AVX2 differs in `grad_norm` of the
latter by 4e-4 at the third step, by 9e-4 at the fourth and by 0.6 at the ninth; the commit that recorded the former
differs from its own record by 5e-5 at the fourth step and by 0.07 at the ninth where the processor lacks AVX-512.
"""


@attrs.frozen
class Difference:
    """What was found for one case.

    Attributes:
        worst: The largest relative difference of a number.
        where: The series that has it.
        failures: What is not as recorded, in words.
        notes: What differs and is no failure.
    """

    worst: float
    where: str
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def environment() -> dict[str, Any]:
    """Everything outside this package that bits of float32 results depend on."""
    return {
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cpu() -> str:
    """Name of the processor, and a digest of the instruction sets that it has."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    sets = " ".join(sorted(fields.get("flags", fields.get("Features", "")).split()))
    return f"{fields.get('model name', platform.processor())}, {platform.machine()}, {sha(sets)[:8]}"


def sha(value: Any) -> str:
    """16 hex digits of sha256 over a JSON value, text, or bytes."""
    if not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(value).hexdigest()[:16]


def of_array(array: Any) -> str:
    """Digest of an array's dtype, shape and bits."""
    ours = np.asarray(array)
    return sha(f"{ours.dtype} {ours.shape} ".encode() + np.ascontiguousarray(ours).tobytes())


def of_arrays(arrays: Iterable[Any]) -> str:
    """Digest of a multiset of arrays: neither order nor names count."""
    return sha(sorted(map(of_array, arrays)))


def magnitudes(arrays: Iterable[Any]) -> list[float]:
    """Sums of magnitudes of arrays, in float64, ascending: what is left to compare where bits cannot be."""
    return sorted(shortened(np.abs(np.asarray(array).astype(np.float64)).sum()) for array in arrays)


def shortened(value: Any) -> float:
    """A float32 as the shortest decimal number that gives it back; other numbers with nine digits."""
    number = float(value)
    if not math.isfinite(number):
        return number
    narrow = np.float32(number)
    return float(str(narrow)) if float(narrow) == number else float(f"{number:.9g}")


def bound(case: str, *, is_same: bool) -> float:
    """The largest relative difference that is none."""
    return SAME if is_same else ROUGH if case.startswith(ROUNDING) or case in CHAOTIC else ELSEWHERE


def first_steps(result: Result, count: int) -> Result:
    """A result with so many steps of each series, and without sums of the arrays that were trained."""
    return {**result, "series": {name: values[:count] for name, values in result["series"].items()}, "sums": {}}


def compare(actual: Result, recorded: Result, *, is_same: bool, case: str = "", exact: bool = False) -> Difference:
    """Compares two results of one case.

    Args:
        actual: Now.
        recorded: Before.
        is_same: Whether both were computed on equal machines, with equal versions.
        case: Its name, by which some have another bound.
        exact: Whether other bits are a failure as well.
    """
    if not is_same and case in CHAOTIC:
        actual, recorded = (first_steps(result, CHAOTIC[case]) for result in (actual, recorded))
    failures: list[str] = []
    notes: list[str] = []
    worst, where = 0.0, ""
    for part in ("series", "sums"):
        before = {RENAMED.get(name, name): values for name, values in recorded.get(part, {}).items()}
        now = actual.get(part, {})
        if before.keys() != now.keys():
            gone, new = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
            failures.append(f"{part}: gone {gone}, new {new}")
        for name in sorted(before.keys() & now.keys()):
            ours = (
                apart(name, now, before, is_same=is_same) if part == "series" else each_apart(now[name], before[name])
            )
            if ours > worst:
                worst, where = ours, name
    most = bound(case, is_same=is_same)
    if worst > most:
        failures.append(f"{where} differs by {worst:.1e}, more than {most:.0e}")
    for part in ("exact", "here", "bits", "names"):
        if not is_same and part in ("here", "bits"):
            continue
        for name in sorted(_changed(actual.get(part, {}), recorded.get(part, {}))):
            line = f"{part}: {name}"
            (notes if part == "bits" and not exact else failures).append(line)
    return Difference(worst, where, tuple(failures), tuple(notes))


def _changed(result: Mapping[str, Any], recorded: Mapping[str, Any]) -> set[str]:
    missing = object()
    return {name for name in {*result, *recorded} if result.get(name, missing) != recorded.get(name, missing)}


def apart(name: str, result: Mapping[str, Any], recorded: Mapping[str, Any], *, is_same: bool) -> float:
    """The largest difference of a series relative to its largest value; infinite where only one has a number.

    On another machine, rewards and KL estimates are judged by the largest log-probability of the case: they are
    differences of log-probabilities, which are rounded as the larger numbers that they are. Accuracies are not judged
    there: they count which of two numbers is larger, and these may be equal but for rounding.
    """
    if not is_same and "accurac" in name:
        return 0.0
    ours, theirs = (np.asarray(each[name], np.float64) for each in (result, recorded))
    if ours.shape != theirs.shape:
        return math.inf
    finite = np.isfinite(theirs)
    if not np.array_equal(np.nan_to_num(ours[~finite], nan=0.125), np.nan_to_num(theirs[~finite], nan=0.125)):
        return math.inf
    if not np.isfinite(ours[finite]).all():
        return math.inf
    away = np.abs(ours - theirs)[finite].max(initial=0.0)
    scale = np.abs(theirs[finite]).max(initial=0.0)
    if not is_same and ("rewards/" in name or name.endswith("kl")):
        sums = [np.abs(values).max() for key, values in recorded.items() if "logps/" in key]
        scale = max([scale, *sums])
    if away == 0:
        return 0.0
    return math.inf if scale == 0 else float(away / scale)


def each_apart(result: list[float], recorded: list[float]) -> float:
    """The largest difference of two numbers at one place, relative to the recorded one."""
    if len(result) != len(recorded) or not np.isfinite([*result, *recorded]).all():
        return 0.0 if result == recorded else math.inf
    pairs = zip(result, recorded, strict=True)
    return max(
        (abs(one - other) / abs(other) if other else math.inf for one, other in pairs if one != other), default=0.0
    )
