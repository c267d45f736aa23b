"""Experiments as the app meets them, stored by runs or pasted by visitors; imports nothing that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nnxdsl.run.jsonl import read_json
from nnxdsl.spec.errors import NnxdslError, Problem, SpecError, join
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.tree import from_dict

from .read_python import read_python

LONGEST = 200_000
"""Characters of a text that is read."""

DEEPEST = 40
FOREIGN = "is a class of another package, which the app does not import; run the file with `nnxdsl run` instead"


def from_text(text: str) -> Experiment:
    """The experiment of a pasted text, Python or JSON; nothing in it is executed.

    Raises:
        SpecError: what is wrong, and where.
    """
    if len(text) > LONGEST:
        raise SpecError([Problem("", f"{len(text):,} characters; at most {LONGEST:,} are read")])
    if not text.strip():
        raise SpecError([Problem("", "paste the Python that `nnxdsl show --python` prints, or JSON")])
    if not text.lstrip().startswith("{"):
        return read_python(text)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError([Problem("", f"not JSON: {error}")]) from error
    return from_tree(tree)


def from_tree(tree: Any) -> Experiment:
    """The experiment of a JSON value.

    Raises:
        SpecError: it names classes that are not nnxdsl's own, or is no experiment.
    """
    if not isinstance(tree, dict):
        raise SpecError([Problem("", f"expected a JSON object, got {type(tree).__name__}")])
    foreign = list(_foreign(tree, "", 0))
    if foreign:
        raise SpecError(foreign)
    return from_dict(tree, Experiment)


def stored(path: Path) -> Experiment | None:
    """The experiment of a file that a run wrote; None where it names classes of others, or is damaged."""
    try:
        return from_tree(read_json(path))
    except NnxdslError:
        return None


def facts_of(tree: Any) -> dict[str, str]:
    """What a list of runs says of an experiment, from its JSON alone: objective, model, mesh."""
    if not isinstance(tree, dict):
        return {}
    found = {name: str(part.get("type")) for name in ("objective", "model") if isinstance(part := tree.get(name), dict)}
    model, mesh = tree.get("model"), tree.get("mesh")
    if isinstance(model, dict) and isinstance(model.get("size"), str):
        found["model"] += f" {model['size']}"
    if isinstance(mesh, dict):
        names = ("stage", "data", "fsdp", "expert", "context", "tensor")
        sizes = [f"{name} {mesh[name]}" for name in names if isinstance(mesh.get(name), int) and mesh[name] > 1]
        found["mesh"] = " x ".join(sizes) or "1 device"
    found["adapter"] = str(tree["adapter"].get("type")) if isinstance(tree.get("adapter"), dict) else "all weights"
    return found


def _foreign(value: Any, path: str, depth: int) -> Iterator[Problem]:
    if depth > DEEPEST:
        yield Problem(path, "is nested too deeply")
    elif isinstance(value, Mapping):
        kind = value.get("type")
        if isinstance(kind, str) and ":" in kind:
            yield Problem(join(path, "type"), f"{kind!r} {FOREIGN}")
        for name, child in value.items():
            yield from _foreign(child, join(path, str(name)), depth + 1)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _foreign(child, join(path, str(index)), depth + 1)
