"""Refuses experiments that name files of the app itself, such as the key of its cookies or its audit log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.sources.paths import files_of
from nnxdsl.errors import DataError, RunError

from ..settings import Settings


def require_no_own_files(settings: Settings, experiment: Experiment) -> None:
    """Refuses an experiment that names a file of the app as data, tokenizer, template or weights, by any of its paths.

    The rows of the demo, which lie among them, are data.
    """
    app_directory, demo = settings.app_directory.resolve(), settings.demo.resolve()
    for field, text in _texts(to_dict(experiment)):
        for path in _paths(settings.project, field, text):
            if path.is_relative_to(app_directory) and not path.is_relative_to(demo):
                raise RunError(f"{text[:200]} is a file of the app itself")


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a JSON value, with the name of its field."""
    if isinstance(value, str):
        yield field, value
    for name, item in value.items() if isinstance(value, dict) else ():
        yield from _texts(item, name)
    for item in value if isinstance(value, list) else ():
        yield from _texts(item, field)


def _paths(project: Path, field: str, text: str) -> Iterator[Path]:
    """What a text names where a run looks, links followed; the field `path` of data may be a glob or a folder."""
    with contextlib.suppress(DataError, OSError, ValueError, RuntimeError):  # it names no file
        place = project / Path(text).expanduser()
        yield place.resolve()
        for file in files_of([str(place)]) if field == "path" else ():
            yield file.path.resolve()
