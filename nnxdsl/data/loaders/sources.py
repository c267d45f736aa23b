"""Where the rows of a spec come from: its files, their digest, and chunks of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

from nnxdsl.config.data import Data, FileData, Mixture
from nnxdsl.data.loaders.files import Chunk, existing_file, file_digest, place_of, read_chunks


@attrs.frozen
class Source:
    """Rows to be tokenized.

    Attributes:
        name: Its name in messages, as in the experiment.
        digest: sha256 hex of its content.
        sizes: Bytes of each file.
        places: Beginning of the places of each file's rows.
        chunks: Reads the rows; every chunk has one of `places`.
    """

    name: str
    digest: str
    sizes: tuple[int, ...]
    places: tuple[str, ...]
    chunks: Callable[[], Iterator[Chunk]]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)


def content_digest(data: Data) -> str | None:
    """sha256 hex of the content of a spec's files, as its dataset has it; None where there are no such files."""
    if isinstance(data, Mixture):
        digests = [content_digest(part) for part in data.parts]
        return None if None in digests else digest_together(map(str, digests))
    if not isinstance(data, FileData) or not Path(data.path).expanduser().is_file():
        return None
    return open_source(data).digest


def digest_together(digests: Iterable[str]) -> str:
    """sha256 hex of several sources together."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def open_source(data: FileData) -> Source:
    """The source of a spec; raises DataError if a file is missing or cannot be read."""
    path = data.path
    size = existing_file(path).stat().st_size
    return Source(path, file_digest(path), (size,), (place_of(path),), lambda: read_chunks(path))
