"""Resolves the paths of a data spec: files, globs, folders, and datasets that `save_to_disk` wrote."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nnxdsl.data.sources.formats import named_format
from nnxdsl.errors import DataError, nearest

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets.save_to_disk` writes for a dataset, and for several splits."""
_SPLIT_NAMES = ("train", "training", "test", "testing", "eval", "validation", "valid", "val", "dev", "held_out")


class DataFile(NamedTuple):
    """A file of rows.

    Attributes:
        name: Its name in places and messages: as in the experiment, or below the folder of the experiment.
        path: Where it is.
    """

    name: str
    path: Path


def files_of(paths: Sequence[str], split: str | None = None) -> list[DataFile]:
    """The files of some paths, in their order; those of a glob or a folder by name.

    Args:
        paths: Files, globs, folders of files of one format, or folders that `save_to_disk` wrote.
        split: One of the splits that `save_to_disk` wrote.

    Raises:
        DataError: There is no such file, or a file is named twice; or it is open which files are meant.
    """
    files = [file for path in paths for file in _files(path, split)]
    seen: dict[Path, str] = {}
    for name, path in files:
        first = seen.setdefault(path.resolve(), name)
        if first is not name:
            also = "" if first == name else f", as {first}"
            raise DataError(f"{name}: the same file is listed twice{also}; its rows would count twice")
    return files


def existing_file(path: str) -> Path:
    """The existing file at `path`; raises DataError if there is none."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise DataError(f"{path}: is a directory; give a file")
    base = "" if file.is_absolute() else f" (looked in the current directory, {os.getcwd()})"
    others = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
    raise DataError(f"{path}: no such file{base}{nearest(file.name, others)}")


def _files(path: str, split: str | None) -> list[DataFile]:
    place = Path(path).expanduser()
    if place.is_dir():
        saved = (place / STATE).is_file() or (place / SPLITS).is_file()
        if not saved:
            _refuse_split(path, split)
        return _saved(path, place, split) if saved else _in_folder(path, place)
    _refuse_split(path, split)
    if glob.has_magic(path) and not place.is_file():
        return _matching(path, place)
    return [DataFile(path, existing_file(path))]


def _refuse_split(path: str, split: str | None) -> None:
    if split is not None:
        raise DataError(
            f"data.split: {path} has no splits, so split={split!r} has no effect; datasets of the Hub (hf://...) and "
            f"folders that save_to_disk wrote have some"
        )


def _matching(path: str, place: Path) -> list[DataFile]:
    """The files that match a glob; folders that do are not meant."""
    files = [name for name in sorted(glob.glob(_with_literal_start(place), recursive=True)) if os.path.isfile(name)]
    if not files:
        base = "" if place.is_absolute() else f" (looked in the current directory, {os.getcwd()})"
        raise DataError(f"{path}: no file matches{base}")
    return [DataFile(name, Path(name)) for name in files]


def _with_literal_start(place: Path) -> str:
    """A glob whose first folders, as long as there are folders of these very names, stand for themselves."""
    start = next(folder for folder in place.parents if folder.is_dir())
    return str(Path(glob.escape(str(start)), place.relative_to(start)))


def _in_folder(path: str, place: Path) -> list[DataFile]:
    """The files of rows right below a folder: of one format, and of no more than one split by their names."""
    entries = sorted(entry for entry in place.iterdir() if entry.is_file() and not entry.name.startswith("."))
    formats = {entry: file_format for entry in entries if (file_format := named_format(entry.name)) is not None}
    base = path.rstrip("/")
    if not formats:
        has = ", ".join(sorted(entry.name for entry in place.iterdir())[:5]) or "nothing"
        raise DataError(f"{path}: the folder has no rows (.jsonl, .json, .csv, .parquet, .arrow); it has: {has}")
    _require_one(
        path, "formats", {file: (file_format.name, f"*{file.suffix}") for file, file_format in formats.items()}
    )
    splits = {file: split for file in formats if (split := _split_name(file.name))}
    _require_one(path, "splits", {file: (split, f"{split}*") for file, split in splits.items()})
    return [DataFile(f"{base}/{file.name}", file) for file in formats]


def _require_one(path: str, what: str, values: dict[Path, tuple[str, str]]) -> None:
    """Refuses files that differ; `values` are what each file has, and the glob for the files that have it."""
    files = {value: (file.name, pattern) for file, (value, pattern) in reversed(values.items())}
    if len(files) > 1:
        examples = ", ".join(f"{value} ({file})" for value, (file, _) in sorted(files.items()))
        globs = " or ".join(f"{path.rstrip('/')}/{pattern}" for _, (_, pattern) in sorted(files.items()))
        raise DataError(f"{path}: the folder has files of several {what}: {examples}; write {globs}")


def _split_name(file: str) -> str:
    return next((name for name in _SPLIT_NAMES if re.match(rf"{name}(?![a-z])", file.lower())), "")


def _saved(path: str, place: Path, split: str | None) -> list[DataFile]:
    """The Arrow files that `save_to_disk` wrote for a dataset, or for the split of several."""
    base = path.rstrip("/")
    if (place / SPLITS).is_file():
        names = _read(f"{base}/{SPLITS}", place / SPLITS, "splits")
        chosen = chosen_split(path, split, names)
        return _saved(f"{base}/{chosen}", place / chosen, None)
    if split is not None:
        saved_split = _read(f"{base}/{STATE}", place / STATE, "_split") or "no split"
        if split != saved_split:
            raise DataError(f"data.split: {path} has {saved_split!r} alone, not {split!r}")
    files = [entry["filename"] for entry in _read(f"{base}/{STATE}", place / STATE, "_data_files")]
    if not files:
        raise DataError(f"{path}: has no rows")
    return [DataFile(f"{base}/{file}", existing_file(f"{place}/{file}")) for file in files]


def _read(name: str, file: Path, field: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))[field]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{name}: is not as save_to_disk writes it: {type(error).__name__}: {error}") from error


def chosen_split(path: str, split: str | None, names: Sequence[str]) -> str:
    """One of the splits `names` of the dataset at `path`.

    Raises:
        DataError: None is chosen and there are several, or there is no such split.
    """
    if split is None and len(names) == 1:
        return names[0]
    if split not in names or split is None:
        what = "several splits" if split is None else f"no split {split!r}"
        hint = "; write split=..." if split is None else nearest(split, list(names))
        raise DataError(f"data.split: {path} has {what}; there are: {', '.join(names)}{hint}")
    return split
