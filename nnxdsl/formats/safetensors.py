"""The safetensors file format: read memory-mapped, written in one pass."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

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
# Those of the values, scales and shapes of quantized tensors.
_QUANTIZED = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_NAMES = {dtype: name for name, dtype in (_DTYPES | _QUANTIZED).items()}
# Bits of every dtype of the format; files may hold tensors of dtypes that `read` does not support.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""


@attrs.frozen
class Tensor:
    """One tensor of a file: dtype, shape and position.

    Attributes:
        file: The safetensors file.
        dtype: The dtype by its name in the format, such as "BF16".
        shape: The shape.
        start: Offset of the first byte in the file.
        stop: Offset after the last byte.
        is_mapped: Whether `read` returns a view of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    is_mapped: ClassVar[bool] = True

    @property
    def readable(self) -> bool:
        """Whether `read` supports the dtype."""
        return self.dtype in _DTYPES

    @property
    def numpy(self) -> np.dtype:
        """The dtype in numpy; a KeyError if the tensor is not `readable`."""
        return _DTYPES[self.dtype]

    def read(self) -> np.ndarray:
        """The values as stored, read-only and memory-mapped: nothing is read before it is used."""
        if self.start == self.stop:  # an empty range cannot be mapped
            return np.empty(self.shape, _DTYPES[self.dtype])
        return self._mapped().view(_DTYPES[self.dtype]).reshape(self.shape)

    def raw(self) -> np.ndarray:
        """The values of a part of a quantized tensor, of a dtype that `read` does not support; mapped likewise."""
        return self._mapped().view(_QUANTIZED[self.dtype]).reshape(self.shape)

    def _mapped(self) -> np.ndarray:
        try:
            return np.memmap(self.file, np.uint8, "r", self.start, (self.stop - self.start,))
        except (OSError, ValueError) as error:  # it existed with this length when its header was read
            raise WeightsError(f"{self.file}: cannot be read any more: {error}; it may have been replaced") from None


def index(file: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name in the order of their bytes; reads the header only.

    The `safetensors` library validates the header. It accepts only files whose tensors cover all bytes after the header
    exactly once, so that the offset of a tensor follows from the sizes of those before it.

    Args:
        file: A safetensors file.

    Returns:
        The tensors by name.

    Raises:
        WeightsError: The file is missing, not regular, truncated or not of the format.
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
        default = str(error).removeprefix("Error while deserializing header: ")
        reason = _reason(file, total) or f"its header is not that of a safetensors file: {default}"
        raise WeightsError(f"{file}: damaged: {reason}") from None
    return tensors


def _reason(file: Path, total: int) -> str | None:
    """Why the library refused a file, with tensor names and bytes; None if only its own message is available."""
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
        end, previous = 0, "the header"
        for start, stop, name, dtype, shape in placed:
            if start != end:
                is_overlap = start < end
                gap = (
                    f"overlaps with {previous}" if is_overlap else f"{start - end} bytes before it belong to no tensor"
                )
                starts = f"{name} should start at byte {data + end}, where {previous} ends"
                return f"{starts}, but the header says {data + start}: {gap}"
            expected = math.prod(shape) * _BITS[dtype] / 8
            if stop - start != expected:
                takes = f"{name} of shape {tuple(shape)} and dtype {dtype} should take {expected:.15g} bytes"
                return f"{takes}, the header says {stop - start}"
            end, previous = stop, name
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    end += data
    if end > total:
        return f"{previous} should end at byte {end}, the file has {total} bytes; download the file again"
    return None if end == total else f"{previous} ends at byte {end}, but the file has {total} bytes"


def size(shape: Iterable[int], dtype: np.dtype) -> int:
    """The size of an array in bytes."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def shards(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], limit: int | None) -> list[list[str]]:
    """Distributes tensors in order over files of at most `limit` bytes: the names for each file.

    A larger tensor has a file of its own. Without a limit, or without tensors, there is one file.
    """
    files: list[list[str]] = [[]]
    total = 0
    for name, (shape, dtype) in tensors.items():
        taken = size(shape, dtype)
        if limit is not None and files[-1] and total + taken > limit:
            files.append([])
            total = 0
        files[-1].append(name)
        total += taken
    return files


def write(
    file: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    value: Callable[[str], np.ndarray],
    metadata: Iterable[tuple[str, str]] = (("format", "pt"),),
) -> None:
    """Writes a file atomically, with one tensor in memory at a time.

    Args:
        file: The path to write.
        tensors: Shape and dtype by name, in the order to write.
        value: Returns the values of a tensor by name.
        metadata: Strings for the header; transformers requires a "format".

    Raises:
        WeightsError: A dtype that is not supported.
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
