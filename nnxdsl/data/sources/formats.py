"""File formats, recognised by file names, and their readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nnxdsl.data.loaders.files import Chunk
from nnxdsl.data.sources.compression import COMPRESSED
from nnxdsl.data.sources.lines import line_chunks
from nnxdsl.data.sources.tables import arrow_chunks, csv_chunks, is_list, list_chunks, parquet_chunks


class Format(NamedTuple):
    """A format of files.

    Attributes:
        name: In messages.
        chunks: The rows of a file, whose name in messages is given first.
        place: What stands between the name of a file and the number of a row.
    """

    name: str
    chunks: Callable[[str, Path], Iterator[Chunk]]
    place: str = ":row "


JSONL = Format("JSONL", line_chunks, ":")
JSON = Format("JSON", list_chunks)
_TEXT = {".jsonl": JSONL, ".ndjson": JSONL, ".json": JSON, **dict.fromkeys((".csv", ".tsv"), Format("CSV", csv_chunks))}
_BINARY = {
    ".parquet": Format("Parquet", parquet_chunks),
    **dict.fromkeys((".arrow", ".feather"), Format("Arrow", arrow_chunks)),
}


def named_format(name: str) -> Format | None:
    """The format of a file by its name; None if the name says none."""
    path = Path(name)
    if path.suffix in COMPRESSED:
        return _TEXT.get(Path(path.stem).suffix)
    return {**_TEXT, **_BINARY}.get(path.suffix)


def format_of(path: str, file: Path) -> Format:
    """The format of a file: JSONL unless its name says another, or it is a `.json` file with a list."""
    file_format = named_format(file.name) or JSONL
    return JSONL if file_format is JSON and not is_list(path, file) else file_format


def file_chunks(path: str, file: Path) -> Iterator[Chunk]:
    """The rows of a file in chunks.

    Raises:
        DataError: It cannot be read, or a library is missing.
    """
    return format_of(path, file).chunks(path, file)


def place_of(path: str, file: Path) -> str:
    """The beginning of the places of a file's rows."""
    return f"{path}{format_of(path, file).place}"
