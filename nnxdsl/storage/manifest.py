"""Manifests: sizes and SHA-256 digests of the files in a directory, to detect damage."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from nnxdsl.errors import RunError
from nnxdsl.storage.failpoints import hit_failpoint
from nnxdsl.storage.jsonl import open_plain, replace, sync_directory
from nnxdsl.storage.records import COUNT, STRING, Kind, problem_in

NAME = "manifest.json"
FORMAT = 1

_FILE = {"size": COUNT, "sha256": STRING}
MANIFEST = {
    "format": COUNT,
    "files": Kind(
        "an object of files with size and sha256",
        lambda value: isinstance(value, dict) and all(_is_file_entry(entry) for entry in value.values()),
    ),
}


class DamageError(Exception):
    """A directory does not match its manifest; the message is one line."""


def write(place: Path, fields: dict[str, Any]) -> None:
    """Syncs every file below `place` to disk, then writes the manifest: `fields` and the digests of the files."""
    paths = sorted(path for path in place.rglob("*") if path.is_file())
    with _workers() as pool:
        digests = list(pool.map(_synced_sha256, paths))
    files = {
        path.relative_to(place).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    hit_failpoint("manifest-digested")
    body = {"format": FORMAT, **fields, "files": files}
    replace(place / NAME, json.dumps({"sha256": _digest_of(body), "body": body}).encode())
    hit_failpoint("manifest-written")
    for directory, _, _ in os.walk(place):
        sync_directory(Path(directory))


def read(place: Path) -> dict[str, Any]:
    """The fields and "files" of the manifest, after a check of its own digest.

    Raises:
        DamageError: It is missing, damaged, or of another format.
    """
    try:
        with open(open_plain(place / NAME), "rb") as file:
            value = json.loads(file.read())
        body, digest = value["body"], value["sha256"]
    except FileNotFoundError as error:
        raise DamageError(f"{NAME} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RunError) as error:
        raise DamageError(f"{NAME} cannot be read") from error
    if not isinstance(body, dict) or digest != _digest_of(body):
        raise DamageError(f"{NAME} has changed since it was written (sha256 differs)")
    fields = cast(dict[str, Any], body)
    if fields.get("format") != FORMAT:
        raise DamageError(f"{NAME} has format {fields.get('format')!r}, this nnxdsl reads format {FORMAT}")
    if (problem := problem_in(fields, MANIFEST, required=tuple(MANIFEST))) is not None:
        raise DamageError(f"{NAME} has been edited: {problem}")
    return fields


class Verifier:
    """Compares files with a manifest; a file that has not changed since its last check is not read again."""

    def __init__(self) -> None:
        """Starts without checked files."""
        self._checked: dict[Path, tuple[int, ...]] = {}

    def check(self, place: Path, body: dict[str, Any], selects: Callable[[str], bool]) -> None:
        """Checks the files of the manifest for whose path below `place` the function `selects` is true.

        Raises:
            DamageError: Names the first file that differs, and the number of others.
        """
        items = [(place / name, entry) for name, entry in body["files"].items() if selects(name)]
        with _workers() as pool:
            results = pool.map(lambda item: self._problem(*item), items)
            problems = [
                f"{path.relative_to(place).as_posix()} {problem}"
                for (path, _), problem in zip(items, results, strict=True)
                if problem
            ]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise DamageError(f"{problems[0]}{more}")

    def _problem(self, path: Path, entry: dict[str, Any]) -> str | None:
        try:
            stat = path.stat()
            mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            if self._checked.get(path) == mark:
                return None
            if not path.is_file():
                return "is no regular file"
            if stat.st_size != entry["size"]:
                return f"has {stat.st_size} bytes, {entry['size']} were written"
            if _sha256(path) != entry["sha256"]:
                return "has changed since it was written (sha256 differs)"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read: {error}"
        self._checked[path] = mark
        return None


def _is_file_entry(entry: object) -> bool:
    return isinstance(entry, dict) and problem_in(cast(dict[str, Any], entry), _FILE, required=tuple(_FILE)) is None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _synced_sha256(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _workers() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        yield pool
