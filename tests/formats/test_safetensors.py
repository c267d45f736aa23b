"""The file format itself: what is written is read again, in one file or many, and damaged headers are said to be."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors as library
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.errors import WeightsError
from nnxdsl.formats import safetensors
from nnxdsl.formats.files import read_json


def write(file: Path, header: Any, data: bytes = b"\0" * 32) -> Path:
    """A file with any header."""
    encoded = json.dumps(header).encode() if not isinstance(header, bytes) else header
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return file


def entry(**changed: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **changed}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": None},
        {"a": {}},
        {"a": entry(dtype=["F32"])},
        {"a": entry(dtype=None)},
        {"a": entry(shape="24")},
        {"a": entry(shape=[-2, -4])},
        {"a": entry(shape=[2, 4.0])},
        {"a": entry(shape=[2, True])},
        {"a": entry(data_offsets=[-8, 24])},  # would be a view of the header
        {"a": entry(data_offsets=[0])},
        {"a": entry(data_offsets=[0, "32"])},
        b"[" * 5000,
        b"\xff\xfe",
    ],
)
def test_a_header_that_cannot_be(header: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "x.safetensors", header)
    with pytest.raises(WeightsError) as caught:
        safetensors.index(file)
    assert str(caught.value).startswith(f"{file}: damaged: ")


HALF = {"a": entry(shape=[4], data_offsets=[0, 16])}
DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "size": (
        {"a": entry(shape=[3, 4])},
        b"\0" * 32,
        "a of shape (3, 4) and dtype F32 should take 48 bytes, the header says 32",
    ),
    "overlap": (
        {**HALF, "b": entry(shape=[4], data_offsets=[8, 24])},
        b"\0" * 24,
        "b should start at byte 148, where a ends, but the header says 140: overlaps with a",
    ),
    "hole": (
        {**HALF, "b": entry(shape=[2], data_offsets=[24, 32])},
        b"\0" * 32,
        "b should start at byte 149, where a ends, but the header says 157: 8 bytes before it belong to no tensor",
    ),
    "rest": (HALF, b"\0" * 20, "a ends at byte 86, but the file has 90 bytes"),
    "cut": (HALF, b"\0" * 12, "a should end at byte 86, the file has 82 bytes; download the file again"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_said_of_tensors_that_do_not_cover_the_file_once(kind: str, tmp_path: Path) -> None:
    header, data, said = DAMAGED[kind]
    file = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(WeightsError) as caught:
        safetensors.index(file)
    assert str(caught.value) == f"{file}: damaged: {said}"


DTYPES = ("F32", "F16", "BF16", "F64", "U8", "BOOL", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "C64", "F4", "F6_E2M3")
ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2.0, 2**62, 2**64, 10**30, float("nan"), "F32", "f32", "", [], [1], {}, "\ud800"]
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of the format, or one with something wrong in its header or behind it."""
    entries: list[tuple[str, Any]] = []
    position = 0
    for number in range(draw(st.integers(0, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=3))
        stop = position + math.prod(shape) * safetensors._BITS[dtype] // 8
        entries.append((f"t{number}", {"dtype": dtype, "shape": shape, "data_offsets": [position, stop]}))
        position = stop
    if draw(st.booleans()):
        entries = draw(st.permutations(entries))
    if draw(st.booleans()):
        fields = draw(st.sampled_from([{"format": "pt"}, {}, None, {"a": 1}, {"a": None}, ["a"], "a", 3]))
        entries.append(("__metadata__", fields))
    size = position
    for _ in range(draw(st.integers(0, 2))):
        tensors = [index for index, (name, _) in enumerate(entries) if name != "__metadata__"]
        which = draw(st.sampled_from(tensors)) if tensors else None
        name, entry = entries[which] if which is not None else ("none", {})
        entry = dict(entry) if isinstance(entry, dict) else entry
        kind = draw(st.sampled_from(["shift", "twice", "bytes", "field", "drop", "whole", "list", "more", "rename"]))
        if kind == "bytes":
            size = max(0, size + draw(st.integers(-9, 9)))
        elif which is None or not isinstance(entry, dict) or "data_offsets" not in entry:
            continue
        elif kind == "shift":
            by = [draw(st.integers(-8, 8)), draw(st.integers(-8, 8))]
            if isinstance(entry["data_offsets"], list) and all(isinstance(n, int) for n in entry["data_offsets"]):
                entry["data_offsets"] = [n + d for n, d in zip(entry["data_offsets"], by, strict=False)]
            entries[which] = name, entry
        elif kind == "twice":
            entries.insert(draw(st.integers(0, len(entries))), (name, draw(st.sampled_from([entry, {}, None]))))
        elif kind == "field":
            field = draw(st.sampled_from(list(entry)))
            odd = st.one_of(ODD, st.lists(ODD, max_size=3), st.sampled_from(DTYPES).map(lambda word: {word: None}))
            entries[which] = name, entry | {field: draw(odd)}
        elif kind == "drop":
            del entry[draw(st.sampled_from(list(entry)))]
            entries[which] = name, entry
        elif kind == "whole":
            entries[which] = name, draw(ODD)
        elif kind == "list":
            entries[which] = name, list(entry.values())
        elif kind == "more":
            entries[which] = name, entry | {"more": draw(ODD)}
        else:
            entries[which] = draw(st.sampled_from(["__metadata__", "", "t0"])), entry
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in entries) + "}"
    text = (
        draw(st.sampled_from(["", "", "", " ", "\n\t", "\ufeff", "["]))
        + text
        + draw(st.sampled_from(["", "", "  ", "\0", "}"]))
    )
    header = text.encode()
    length = len(header) + draw(st.sampled_from([0] * 12 + [-1, 1, 8, 100_000_001, 2**64 - 1 - len(header)]))
    return length.to_bytes(8, "little") + header + b"\0" * size


@settings(max_examples=400, deadline=None)
@given(files())
def test_a_file_is_refused_where_the_library_refuses_it(content: bytes) -> None:
    try:
        theirs = dict(library.deserialize(content))
    except library.SafetensorError:
        theirs = None
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "x.safetensors"
        file.write_bytes(content)
        if theirs is None:
            with pytest.raises(WeightsError, match=r"x\.safetensors: damaged: "):
                safetensors.index(file)
            return
        actual = safetensors.index(file)
    assert actual.keys() == theirs.keys()
    start = 8 + int.from_bytes(content[:8], "little")
    for tensor in actual.values():  # they cover the data once, in their order
        assert tensor.start == start
        start = tensor.stop
    assert start == len(content)
    for name, tensor in actual.items():
        assert tensor.shape == tuple(theirs[name]["shape"])
        assert tensor.stop - tensor.start == len(theirs[name]["data"])


@pytest.mark.parametrize("length", [100_000_000, 100_000_001])
def test_the_longest_header(length: int, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * (length - 2))
    if length == safetensors.MAX_HEADER_BYTES:
        assert safetensors.index(file) == {}
        return
    with pytest.raises(WeightsError, match=r"the header should take 100000001 bytes, the format allows 100000000$"):
        safetensors.index(file)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "x.safetensors"
    os.mkfifo(pipe)
    for file, kind in ((pipe, "a pipe"), (tmp_path, "a directory"), (Path("/dev/zero"), "a device")):
        for read in (safetensors.index, read_json):
            with pytest.raises(WeightsError) as caught:
                read(file)
            assert str(caught.value) == f"{file}: expected a regular file, it is {kind}"


def test_all_that_is_written_is_read(tmp_path: Path) -> None:
    arrays = {
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((0, 4), np.float16),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "short": np.arange(5).astype(ml_dtypes.bfloat16),
    }
    file = tmp_path / "x.safetensors"
    safetensors.write(file, {name: (a.shape, a.dtype) for name, a in arrays.items()}, arrays.__getitem__)
    actual = safetensors.index(file)
    assert list(actual) == list(arrays)
    for name, array in arrays.items():
        assert (actual[name].numpy, actual[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(actual[name].read(), array)


def test_shards() -> None:
    tensors = {name: ((size,), np.dtype(np.float32)) for name, size in zip("abcdef", (1, 2, 1, 9, 1, 2), strict=True)}
    assert safetensors.shards(tensors, None) == [list("abcdef")]
    assert safetensors.shards(tensors, 16) == [["a", "b", "c"], ["d"], ["e", "f"]]
    assert safetensors.shards(tensors, 1) == [[name] for name in "abcdef"]
    assert safetensors.shards({}, 16) == [[]]
