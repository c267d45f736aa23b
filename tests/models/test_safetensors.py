"""The file format itself: what is written is read again, in one file or many, and damaged headers are said to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nnxdsl.models import safetensors
from nnxdsl.spec.errors import WeightsError


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
        {"a": entry(data_offsets=[32, 0])},
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
    assert str(caught.value) == f"{file}: damaged: its header is not that of a safetensors file"


def test_a_size_that_is_not_that_of_the_shape(tmp_path: Path) -> None:
    file = write(tmp_path / "x.safetensors", {"a": entry(shape=[3, 4])})
    with pytest.raises(
        WeightsError, match=r"a of shape \(3, 4\) and dtype F32 should take 48 bytes, the header says 32$"
    ):
        safetensors.index(file)


def test_all_that_is_written_is_read(tmp_path: Path) -> None:
    arrays = {
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((0, 4), np.float16),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "short": np.arange(5).astype(ml_dtypes.bfloat16),
    }
    file = tmp_path / "x.safetensors"
    safetensors.write(file, {name: (a.shape, a.dtype) for name, a in arrays.items()}, arrays.__getitem__)
    found = safetensors.index(file)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].numpy, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name].read(), array)


def test_shards() -> None:
    tensors = {name: ((size,), np.dtype(np.float32)) for name, size in zip("abcdef", (1, 2, 1, 9, 1, 2), strict=True)}
    assert safetensors.shards(tensors, None) == [list("abcdef")]
    assert safetensors.shards(tensors, 16) == [["a", "b", "c"], ["d"], ["e", "f"]]
    assert safetensors.shards(tensors, 1) == [[name] for name in "abcdef"]
    assert safetensors.shards({}, 16) == [[]]
