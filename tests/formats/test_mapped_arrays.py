"""Arrays in pieces are what numpy makes of the same pieces, whatever part of them is read."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.formats import mapped_arrays
from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.program.init import place

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def parts(*arrays: np.ndarray) -> tuple[Callable[[], np.ndarray], ...]:
    return tuple(functools.partial(np.asarray, array) for array in arrays)


def stack(
    leading: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype = BFLOAT16
) -> tuple[MappedArray, np.ndarray]:
    """Matrices turned over, as the Hub has them, and the array that they make."""
    draw = np.random.default_rng(0)
    count = int(np.prod(leading))
    matrices = [draw.normal(size=shape[::-1]).astype(dtype) for _ in range(count)]
    whole = np.stack([matrix.T for matrix in matrices]).reshape(*leading, *shape)
    return MappedArray((*leading, *shape), dtype, parts(*(matrix.T for matrix in matrices)), len(leading)), whole


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_is_numpys(data: st.DataObject) -> None:
    leading = tuple(data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)))
    shape = (data.draw(st.integers(1, 600)), data.draw(st.integers(1, 300)))
    actual, whole = stack(leading, shape)
    index = tuple(
        slice(first, data.draw(st.integers(first, length)))
        for length in whole.shape
        for first in [data.draw(st.integers(0, length))]
    )
    dtype = data.draw(st.sampled_from([BFLOAT16, np.dtype(np.float32), np.dtype(np.float16)]))
    read = actual.read(index, dtype)
    assert read.flags.c_contiguous
    assert read.dtype == dtype
    assert read.tobytes() == whole[index].astype(dtype).tobytes()


def test_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_arrays, "BAND_BYTES", 1000)
    for leading in ((), (5,), (2, 3)):
        actual, whole = stack(leading, (70, 90))
        assert np.array_equal(np.asarray(actual), whole)
    flat = np.arange(5000, dtype=np.float32)
    assert np.array_equal(MappedArray((5000,), flat.dtype, parts(flat), 0).read(), flat)


def test_an_error_of_a_piece_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def torn() -> np.ndarray:
        raise OSError("torn")

    monkeypatch.setattr(mapped_arrays, "BAND_BYTES", 1)
    good, _ = stack((1,), (4, 4))
    with pytest.raises(OSError, match="torn"):
        MappedArray((3, 4, 4), BFLOAT16, (*good.parts, torn, *good.parts), 1).read()


def test_layers() -> None:
    actual, whole = stack((4, 3), (5, 6))
    assert np.array_equal(actual.layers(1, 3).read(), whole[1:3])


def test_what_a_program_writes_over_is_the_devices_own() -> None:
    """An array that lies in the host's memory cannot be written over: the result would be a second one."""
    actual, whole = stack((2,), (300, 200), np.dtype(np.float32))
    add = jax.jit(lambda array: array + 1, donate_argnums=0)
    for is_donated in (True, False):
        placed = place(actual, jnp.float32, jnp.zeros(()).sharding, is_donated=is_donated)
        where = placed.unsafe_buffer_pointer()
        after = add(placed)
        assert np.array_equal(after, whole + 1)
        assert (after.unsafe_buffer_pointer() == where) == is_donated


def test_a_piece_of_another_shape_is_refused() -> None:
    actual, _ = stack((2,), (4, 6))
    wide = parts(np.zeros((4, 6), BFLOAT16), np.zeros((1, 6), BFLOAT16))  # which numpy would repeat
    with pytest.raises(ValueError, match=r"a part has shape \(1, 6\), expected \(4, 6\)"):
        MappedArray(actual.shape, BFLOAT16, wide, 1).read()
