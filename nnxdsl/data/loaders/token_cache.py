"""Tokenized rows on disk: written once for each key of everything they depend on, and mapped by later starts."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from nnxdsl.config.core.run_id import identity
from nnxdsl.config.data import Data
from nnxdsl.data.loaders.convert import Conversion
from nnxdsl.data.loaders.sources import Source
from nnxdsl.data.loaders.store import Arrays, ArrayStore, mapped
from nnxdsl.data.loaders.tally import Tally
from nnxdsl.data.sources.digests import DIGEST_CACHE, LARGE, Digests
from nnxdsl.errors import DataError, RunError
from nnxdsl.storage.atomic_dir import atomic_directory
from nnxdsl.storage.file_mutex import file_lock
from nnxdsl.terminal.display import Display

TOKENS = ".tokens"
"""Directory of tokenized rows, in the home of all runs; a run never lists it."""
META = "meta.json"
LIBRARIES = ("jinja2", "sentencepiece", "tokenizers")
NOT_IN_KEY = ("path", "order", "bad_rows")
"""Fields of a data spec that do not change the ids of a row: the content of the files is in the key."""
CHECKED = 2**27
"""Bytes of an array that are read to find damage: all of a smaller one, evenly spaced blocks of a larger one."""
BLOCK = 2**20


@attrs.frozen
class TokenCache:
    """A directory of tokenized rows, one below it for each key. It may be deleted at any time.

    Attributes:
        directory: Usually `TOKENS` in the home of all runs.
        display: Shows the progress of tokenizing.
        workers: Processes that tokenize; None for one per core.
        min_bytes: Smaller sources are tokenized at every start, which takes a second or two, and leave no files.
    """

    directory: Path
    display: Display = attrs.field(factory=lambda: Display(quiet=True))
    workers: int | None = None
    min_bytes: int = 4 * 2**20

    @property
    def digests(self) -> Digests:
        """Digests of the files of sources, cached for those that would take long to read."""
        return Digests(self.directory / DIGEST_CACHE, min(LARGE, self.min_bytes))

    def load_or_build(
        self, key: str, source: Source, build: Callable[[ArrayStore], tuple[Tally, str]]
    ) -> tuple[Tally, Arrays, str]:
        """The counts, the arrays and the digest of all ids of a source.

        Damaged arrays are rebuilt, with a warning. While another process builds the same key, this one waits.

        Args:
            key: See `key_of`.
            source: The source.
            build: Writes the arrays; returns the counts and the digest.

        Raises:
            DataError: The rows cannot be written; nothing is left then.
        """
        target = self.directory / key
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = self.directory / f"{key}.lock"
            message = f"another run tokenizes {source.name}; waiting"
            with file_lock(lock, lambda: self.display.stage(message), lambda: False):
                if (stored := self._read(target, source)) is not None:
                    return stored
                if any(self.directory.glob(f"{key.partition('-')[0]}-*/{META}")):
                    what = f"the tokens of {source.name} were written by another version of nnxdsl or its libraries"
                    self.display.say(f"{what}; tokenizing again")
                with atomic_directory(target) as directory, ArrayStore(directory) as store:
                    tally, digest = build(store)
                    meta = {"tally": attrs.asdict(tally), "ids_digest": digest, "arrays": store.shapes()}
                    meta["checksums"] = checksums(store.arrays())
                    (directory / META).write_text(json.dumps(meta))
                return tally, mapped(target, meta["arrays"]), digest
        except (OSError, RunError) as error:
            raise DataError(f"{source.name}: its tokens cannot be stored: {error}") from error

    def _read(self, target: Path, source: Source) -> tuple[Tally, Arrays, str] | None:
        if not target.exists():
            return None
        try:
            meta = json.loads((target / META).read_text())
            arrays, expected = mapped(target, meta["arrays"]), meta["checksums"]
            for name, checksum in checksums(arrays).items():
                if checksum != expected[name]:
                    raise ValueError(f"{target / name}: its content has changed")
            return Tally(**meta["tally"]), arrays, meta["ids_digest"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.display.say(f"warning: the tokens of {source.name} are damaged; tokenizing again: {error}")
            shutil.rmtree(target)
            return None


def key_of(data: Data, source: Source, conversion: Conversion, rules: Any) -> str:
    """Name of the tokens of a source: a digest of its content and settings, and one of the versions of all code.

    The settings are the tokenizer with its chat template, the data spec without `NOT_IN_KEY` and the rules of the
    loader; the code is that of the libraries, of this package and of the conversion.
    """
    assert conversion.tokenizer is not None
    spec = identity(data)
    assert isinstance(spec, dict)
    parts = {
        "content": source.digest,
        "data": {name: value for name, value in spec.items() if name not in NOT_IN_KEY},
        "rules": rules,
        "vocabulary": conversion.vocabulary,
        "tokenizer": conversion.tokenizer.fingerprint,
    }
    versions = {
        "code": [_package_code(), _file_code(inspect.getsourcefile(conversion.convert))],
        "libraries": {name: _version(name) for name in LIBRARIES},
    }
    return f"{_digest(parts)[:32]}-{_digest(versions)[:16]}"


def _digest(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def checksums(arrays: Arrays) -> dict[str, int]:
    """A checksum of each array, which takes a fraction of a second however large it is."""
    sums: dict[str, int] = {}
    for name, array in arrays.items():
        content, checksum = array.view(np.uint8), 0
        for begin in range(0, len(content), BLOCK * max(1, -(-len(content) // CHECKED))):
            checksum = zlib.crc32(content[begin : begin + BLOCK].data, checksum)
        sums[name] = checksum
    return sums


@functools.cache
def _package_code() -> str:
    package = Path(__file__).parents[1]
    return "".join(_file_code(str(file)) for file in sorted(package.rglob("*.py")))


def _file_code(file: str | None) -> str:
    return "" if file is None or not Path(file).is_file() else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
