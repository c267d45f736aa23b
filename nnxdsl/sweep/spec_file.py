"""Reads and writes `sweep.json`, from which a sweep or search is resumed without its Python file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from nnxdsl.config.core.codegen import parse_value, render
from nnxdsl.config.core.imports import require_allowed
from nnxdsl.config.core.serialization import from_dict, to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.search import Axis, Pruner, Range, Search, axis_to_json
from nnxdsl.config.sweep import Sweep
from nnxdsl.errors import RunError, SpecError
from nnxdsl.storage.jsonl import read_json

FILE = "sweep.json"


def spec_to_json(spec: Sweep | Search) -> dict[str, Any]:
    """Returns a sweep or search as JSON values; changed values are Python source."""
    common: dict[str, Any] = {
        "digest": spec.digest,
        "base": to_dict(spec.base),
        "metric": spec.metric,
        "direction": spec.direction,
    }
    if isinstance(spec, Search):
        space = {path: axis_to_json(axis) for path, axis in spec.space.items()}
        sampling = {"sampler": spec.sampler, "seed": spec.seed, "pruner": spec.pruner and to_dict(spec.pruner)}
        return {"kind": "search", **common, "space": space, "trials": spec.trials, **sampling}
    points = [
        {"run": one.id, "changes": {path: render(value) for path, value in point.items()}}
        for one, point in zip(spec.experiments, spec.points, strict=True)
    ]
    return {"kind": "sweep", **common, "points": points}


def recorded_digest(content: object) -> str | None:
    """Returns the digest in the contents of a `sweep.json`; None without one."""
    digest = cast("dict[str, Any]", content).get("digest") if isinstance(content, dict) else None
    return digest if isinstance(digest, str) else None


def read_spec(directory: Path) -> Sweep | Search:
    """Returns the sweep or search of a directory, read as data: it imports nothing that is not allowed.

    Raises:
        RunError: There is none, it is damaged, or it was written by another version.
        SpecError: It names code that is not allowed, or is no longer valid.
    """
    file = directory / FILE
    content = read_json(file)
    try:
        spec = _read(content)
    except SpecError as error:
        raise SpecError(error.problems, str(file)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file}: is damaged ({type(error).__name__}: {error}); run its Python file again") from error
    for one in (spec.base, *(spec.experiments if isinstance(spec, Sweep) else ())):
        require_allowed(one)
    if spec.digest != content["digest"]:
        raise RunError(f"{file}: its digest does not match its content; run its Python file again")
    return spec


def _read(content: Any) -> Sweep | Search:
    base = from_dict(content["base"], Experiment)
    if content["kind"] == "sweep":
        points = [_changes(point["changes"]) for point in content["points"]]
        return Sweep(base, points, metric=content["metric"], direction=content["direction"])
    pruner = content["pruner"]
    return Search(
        base,
        {path: _axis(axis) for path, axis in content["space"].items()},
        trials=content["trials"],
        metric=content["metric"],
        direction=content["direction"],
        sampler=content["sampler"],
        pruner=None if pruner is None else from_dict(pruner, Pruner),
        seed=content["seed"],
    )


def _changes(sources: Mapping[str, str]) -> dict[str, object]:
    return {path: parse_value(source) for path, source in sources.items()}


def _axis(content: Any) -> Axis:
    if isinstance(content, list):
        return tuple(parse_value(source) for source in cast("list[str]", content))
    return from_dict(content, Range)
