"""Opens the source of a data spec: its files, their digest, and chunks of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs

from nnxdsl.config.data import HUB, Data, FileData, Mixture
from nnxdsl.data.loaders.files import Chunk, Row, RowError
from nnxdsl.data.loaders.layouts import find_reading
from nnxdsl.data.sources.digests import Digests, combined_digest
from nnxdsl.data.sources.formats import file_chunks, place_of
from nnxdsl.data.sources.hub import HubRows, open_hub
from nnxdsl.data.sources.paths import DataFile, existing_file, files_of
from nnxdsl.errors import DataError


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


def open_source(data: FileData, digests: Digests | None = None) -> Source:
    """The source of a spec.

    Args:
        data: The spec.
        digests: Remembers those of large files; None reads every file.

    Raises:
        DataError: A file is missing or cannot be read.
    """
    if data.paths[0].startswith(HUB):
        rows = _hub_rows(data)
        return Source(rows.name, rows.digest(digests or Digests()), (rows.size,), (rows.place,), rows.chunks)
    return _of_files(data.name, files_of(data.paths, data.split), digests or Digests())


def _hub_rows(data: FileData) -> HubRows:
    return open_hub(data.paths[0].removeprefix(HUB), data.config, data.split, data.revision)


def _of_files(name: str, files: Sequence[DataFile], digests: Digests) -> Source:
    each = [digests.of_file(*file) for file in files]
    return Source(
        name,
        each[0] if len(each) == 1 else combined_digest(each),
        tuple(file.path.stat().st_size for file in files),
        tuple(place_of(*file) for file in files),
        lambda: itertools.chain.from_iterable(file_chunks(*file) for file in files),
    )


def content_digest(data: Data, digests: Digests | None = None) -> str | None:
    """sha256 hex of the content of a spec's files, as its dataset has it; None where there are no such files."""
    if isinstance(data, Mixture):
        each = [content_digest(part, digests) for part in data.parts]
        return None if None in each else combined_digest(map(str, each))
    if not isinstance(data, FileData):
        return None
    try:
        return open_source(data, digests).digest
    except DataError:  # moved or deleted
        return None


def source_chunks(data: FileData) -> Iterator[Chunk]:
    """The rows of a spec as they are, without a digest of their content.

    Raises:
        DataError: There is no such source, or it cannot be read.
    """
    if data.paths[0].startswith(HUB):
        return _hub_rows(data).chunks()
    return itertools.chain.from_iterable(file_chunks(*file) for file in files_of(data.paths, data.split))


def source_rows(data: FileData) -> Iterator[Row]:
    """The rows of a spec, one at a time, in the loaders' columns; a row that cannot be read is a `RowError`.

    Raises:
        DataError: There is no such source, or it cannot be read.
    """
    reading = find_reading(data, source_chunks(data))
    for chunk in source_chunks(data):
        for number, value in chunk.rows():
            try:
                row = value if isinstance(value, RowError) else dict(reading(value))
            except RowError as error:
                row = error
            yield Row(f"{chunk.place}{number}", row)


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a file as they are, one at a time, without null fields.

    A row that cannot be read is a `RowError`, and the rows after it are still read.

    Raises:
        DataError: The file is missing, a directory, or not readable as the format that its name says.
    """
    chunks = file_chunks(path, existing_file(path))
    return (Row(f"{chunk.place}{number}", value) for chunk in chunks for number, value in chunk.rows())


def file_digest(path: str) -> str:
    """sha256 hex of a file; raises DataError if it is missing or cannot be read."""
    return Digests().of_file(path, existing_file(path))
