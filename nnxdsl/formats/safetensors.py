"""The safetensors file format, read memory-mapped and written in one pass; no idea of what the tensors are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import attrs
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from nnxdsl.errors import WeightsError
from nnxdsl.formats.files import file_size

# The safetensors format: 8 bytes of header length (little endian), a JSON header, then the data.
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Bits of every dtype of the format; tensors of those that we do not read may stand beside those that we do.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""


@attrs.frozen
class Tensor:
    """One tensor of a file: its name, where it lies, and what it is.

    Attributes:
        file: the safetensors file.
        dtype: the format's name of it, such as "BF16".
        shape: its shape.
        start: first byte, counted from the beginning of the file.
        stop: one past the last byte.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def readable(self) -> bool:
        """Whether its dtype is one that `read` understands."""
        return self.dtype in _DTYPES

    @property
    def numpy(self) -> np.dtype:
        """Its dtype as numpy knows it; a KeyError where that is not `readable`."""
        return _DTYPES[self.dtype]

    @property
    def is_mapped(self) -> bool:
        """Always: see `read`."""
        return True

    def read(self) -> np.ndarray:
        """The values as stored, read-only and memory-mapped: nothing is read until it is used."""
        if self.start == self.stop:  # nothing can be mapped
            return np.empty(self.shape, _DTYPES[self.dtype])
        return self._mapped().view(_DTYPES[self.dtype]).reshape(self.shape)

    def raw(self) -> np.ndarray:
        """The bytes of a tensor whose elements take one each, whatever they stand for, in its shape."""
        return self._mapped().reshape(self.shape)

    def _mapped(self) -> np.ndarray:
        try:
            return np.memmap(self.file, np.uint8, "r", self.start, (self.stop - self.start,))
        except (OSError, ValueError) as error:  # it was there, and as long, when its header was read
            raise WeightsError(f"{self.file}: cannot be read any more: {error}; was it changed?") from None


def index(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name in the order of their bytes; reads the header only.

    The `safetensors` library judges the header. It accepts only files whose tensors cover all bytes behind the header
    once, so that where a tensor lies follows from the sizes of those before it.

    Args:
        file: a safetensors file.

    Returns:
        Name to Tensor.

    Raises:
        WeightsError: the file is missing, no regular file, cut short or not of the format.
    """
    total = file_size(file)
    try:
        with file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
        tensors = {}
        with safe_open(file, framework="numpy") as header:
            for name in header.offset_keys():
                entry = header.get_slice(name)
                dtype, shape = entry.get_dtype(), tuple(entry.get_shape())
                if dtype not in _BITS:
                    raise WeightsError(
                        f"{file}: {name}: dtype {dtype} is not supported; expected one of {', '.join(_BITS)}"
                    )
                stop = start + math.prod(shape) * _BITS[dtype] // 8
                tensors[name] = Tensor(file, dtype, shape, start, stop)
                start = stop
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        words = str(error).removeprefix("Error while deserializing header: ")
        otherwise = f"its header is not that of a safetensors file: {words}"
        raise WeightsError(f"{file}: damaged: {_reason(file, total) or otherwise}") from None
    return tensors


def _reason(file: Path, total: int) -> str | None:
    """What is wrong with a file that the library refused, with names and bytes; None where its own words must do."""
    if total < 8:
        return f"the file has {total} bytes, too few for a safetensors file"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            return f"the header should take {length} bytes, the format allows {MAX_HEADER_BYTES}"
        if length > total - 8:
            return f"the header should take {length} bytes, the file has {total}"
        header, data = stream.read(length), 8 + length
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        placed = sorted(
            (*entry["data_offsets"], name, entry["dtype"], entry["shape"]) for name, entry in entries.items()
        )
        at, before = 0, "the header"
        for start, stop, name, dtype, shape in placed:
            if start != at:
                what = f"overlaps with {before}" if start < at else f"{start - at} bytes before it belong to no tensor"
                begins = f"the header says {data + start}, behind {before} comes {data + at}"
                return f"{name} should begin where the one before it ends: {begins}; {what}"
            wanted = math.prod(shape) * _BITS[dtype] / 8
            if stop - start != wanted:
                takes = f"{name} of shape {tuple(shape)} and dtype {dtype} should take {wanted:.15g} bytes"
                return f"{takes}, the header says {stop - start}"
            at, before = stop, name
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    end = data + at
    if end > total:
        return f"{before} should end at byte {end}, the file has {total} bytes; get the file again"
    return None if end == total else f"{before} ends at byte {end}, the file has {total} bytes: the rest is no tensor's"


def size(shape: Iterable[int], dtype: np.dtype) -> int:
    """The bytes that an array takes."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def shards(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], limit: int | None) -> list[list[str]]:
    """The names of tensors for each file, in their order, so that no file holds more than `limit` bytes.

    A tensor that is larger alone has a file of its own. Without a limit, or without tensors, there is one file.
    """
    found: list[list[str]] = [[]]
    total = 0
    for name, (shape, dtype) in tensors.items():
        taken = size(shape, dtype)
        if limit is not None and found[-1] and total + taken > limit:
            found.append([])
            total = 0
        found[-1].append(name)
        total += taken
    return found


def write(
    file: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    value: Callable[[str], np.ndarray],
    metadata: Iterable[tuple[str, str]] = (("format", "pt"),),
) -> None:
    """Writes a file, holding one tensor in memory at a time; the file appears whole or not at all.

    Args:
        file: where to write.
        tensors: name to (shape, dtype), in the order to write.
        value: gives the values of a tensor by name.
        metadata: strings for the header; transformers wants a "format".

    Raises:
        WeightsError: a dtype that the format, as read here, does not have.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (shape, dtype) in tensors.items():
        if np.dtype(dtype) not in _NAMES:
            raise WeightsError(
                f"{name}: dtype {np.dtype(dtype)} cannot be written; there are: {', '.join(map(str, _NAMES))}"
            )
        stop = offset + size(shape, dtype)
        header[name] = {"dtype": _NAMES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data to 8 bytes
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little"))
        stream.write(encoded)
        for name, (shape, dtype) in tensors.items():
            array = np.asarray(value(name), order="C")
            if array.shape != tuple(shape) or array.dtype != dtype:
                raise ValueError(f"{name}: announced as {shape} {dtype}, given as {array.shape} {array.dtype}")
            stream.write(array.view(np.uint8).data if array.ndim else array.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
