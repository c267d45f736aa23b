"""Parses experiments that runs have stored or visitors have pasted.

Classes of other packages are imported only if the app was started with `--allow` (`nnxdsl.allow_imports`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nnxdsl.config.core.imports import require_allowed
from nnxdsl.config.core.serialization import from_dict, from_json, to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.errors import NnxdslError, Problem, SpecError
from nnxdsl.storage.jsonl import read_json, write_json

from .read_python import read_python

LONGEST = 200_000
"""Maximum length of a pasted text, in characters."""


def from_text(text: str) -> Experiment:
    """Parses a pasted text, Python or JSON, without executing it; raises a `SpecError` with all problems."""
    if len(text) > LONGEST:
        raise SpecError([Problem("", f"{len(text):,} characters; expected at most {LONGEST:,}")])
    if not text.strip():
        raise SpecError([Problem("", "paste the Python that `nnxdsl show --python` prints, or JSON")])
    if text.lstrip().startswith("{"):
        return from_json(text, Experiment)
    experiment = read_python(text)
    require_allowed(experiment)
    return experiment


def from_tree(tree: Any) -> Experiment:
    """Parses an experiment from a JSON value; raises if it is none, or names code that is not allowed."""
    if not isinstance(tree, dict):
        raise SpecError([Problem("", f"expected a JSON object, got {type(tree).__name__}")])
    return from_dict(tree, Experiment)


def file_of(directory: Path, experiment: Experiment) -> Path:
    """Returns the path of an experiment's file in a directory, which is named after its content."""
    digest = hashlib.sha256(json.dumps(to_dict(experiment), sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"{digest}.json"


def written(directory: Path, experiment: Experiment) -> Path:
    """Returns `file_of` an experiment, which is written unless it exists."""
    file = file_of(directory, experiment)
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(file, to_dict(experiment))
    return file


def stored(path: Path) -> Experiment | None:
    """Loads the experiment file of a run; None if it is damaged or names code that is not allowed."""
    try:
        return from_tree(read_json(path))
    except NnxdslError:
        return None


def facts_of(tree: Any) -> dict[str, str]:
    """Objective, model, mesh and adapter of an experiment's JSON, for the list of runs."""
    if not isinstance(tree, dict):
        return {}
    found = {name: str(part.get("type")) for name in ("objective", "model") if isinstance(part := tree.get(name), dict)}
    model, mesh = tree.get("model"), tree.get("mesh")
    if isinstance(model, dict) and isinstance(model.get("size"), str):
        found["model"] += f" {model['size']}"
    if isinstance(mesh, dict):
        sizes = [f"{name} {mesh[name]}" for name in MESH_AXES if isinstance(mesh.get(name), int) and mesh[name] > 1]
        found["mesh"] = " x ".join(sizes) or "1 device"
    found["adapter"] = str(tree["adapter"].get("type")) if isinstance(tree.get("adapter"), dict) else "all weights"
    return found
