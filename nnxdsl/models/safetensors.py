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

from nnxdsl.spec.errors import WeightsError

# The safetensors format: 8 bytes of header length (little endian), a JSON header, then the data.
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ONE_BYTE = dict.fromkeys(("U8", "F8_E4M3", "F8_E5M2"), np.dtype(np.uint8))
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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
    """The tensors of a file, by name; reads the header only.

    Args:
        file: a safetensors file.

    Returns:
        Name to Tensor.

    Raises:
        WeightsError: the file is missing, cut short or not of the format.
    """
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if total < 8:
                raise WeightsError(f"{file}: damaged: the file has {total} bytes, too few for a safetensors file")
            if length > total - 8:
                raise WeightsError(f"{file}: damaged: the header should take {length} bytes, the file has {total}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            if not _is_plausible(entry["dtype"], entry["shape"], start, stop):
                raise ValueError(name)
            tensors[name] = Tensor(file, entry["dtype"], tuple(entry["shape"]), 8 + length + start, 8 + length + stop)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WeightsError(f"{file}: damaged: its header is not that of a safetensors file") from None
    last, end = max(
        ((name, tensor.stop) for name, tensor in tensors.items()), key=lambda item: item[1], default=("", 0)
    )
    if end > total:
        raise WeightsError(
            f"{file}: damaged: {last} should end at byte {end}, the file has {total} bytes; get the file again"
        )
    for name, tensor in tensors.items():
        each = _DTYPES.get(tensor.dtype, _ONE_BYTE.get(tensor.dtype))
        wanted = None if each is None else size(tensor.shape, each)
        if wanted is not None and tensor.stop - tensor.start != wanted:
            raise WeightsError(
                f"{file}: damaged: {name} of shape {tensor.shape} and dtype {tensor.dtype} should take {wanted} bytes, "
                f"the header says {tensor.stop - tensor.start}"
            )
    return tensors


def _is_plausible(dtype: object, shape: object, start: object, stop: object) -> bool:
    """Whether an entry of a header can be one; a damaged one must not be taken for a view of other bytes."""
    numbers = [start, stop, *shape] if isinstance(shape, list) else [None]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        return False
    return isinstance(dtype, str) and isinstance(start, int) and isinstance(stop, int) and start <= stop


def size(shape: Iterable[int], dtype: np.dtype) -> int:
    """The bytes that an array takes."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def shards(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], limit: int | None) -> list[list[str]]:
    """The names of tensors for each file, in their order, so that no file holds more than `limit` bytes.

    A tensor that is larger alone has a file of its own. Without a limit, or without tensors, there is one file.
    """
    found: list[list[str]] = [[]]
    held = 0
    for name, (shape, dtype) in tensors.items():
        taken = size(shape, dtype)
        if limit is not None and found[-1] and held + taken > limit:
            found.append([])
            held = 0
        found[-1].append(name)
        held += taken
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
