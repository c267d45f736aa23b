"""JSONL: one object on each line, parsed where the rows are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nnxdsl.data.loaders import files
from nnxdsl.data.loaders.files import CHUNK_BYTES, Chunk, LineChunk
from nnxdsl.data.sources.compression import open_bytes


def line_chunks(path: str, file: Path) -> Iterator[Chunk]:
    """The lines of a file, which may be compressed; `path` is its name in places and messages."""
    first, lines, size, position = 1, [], 0, 0
    with open_bytes(path, file) as (handle, read):
        for line in _lines(handle):
            lines.append(line)
            size += len(line or b"")
            position = read()
            if size >= CHUNK_BYTES:
                yield LineChunk(f"{path}:", first, lines, position)
                first, lines, size = first + len(lines), [], 0
    if lines:
        yield LineChunk(f"{path}:", first, lines, position)


def _lines(handle: BinaryIO) -> Iterator[bytes | None]:
    """Lines as bytes; None for one over the limit, which is skipped without being read into memory."""
    while line := handle.readline(files.MAX_LINE + 1):
        if len(line) <= files.MAX_LINE:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = handle.readline(files.MAX_LINE)
        yield None
