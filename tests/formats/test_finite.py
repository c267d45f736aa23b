"""NaN and infinity in weights: found wherever they stand, in any dtype and order, and told by tensor and number."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nnxdsl
from nnxdsl.errors import WeightsError
from nnxdsl.formats import finite, hf, safetensors

FAMILIES = Path(__file__).parent.parent / "reference" / "families"
DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
NAME = "model.layers.3.mlp.up_proj.weight"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 700), min_size=0, max_size=2),
    st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([np.nan, np.inf, -np.inf, -np.nan])), max_size=3),
    st.sampled_from(["as it is", "turned", "a part", "backwards"]),
)
def test_every_value_counts(dtype: type, shape: list[int], bad: list[tuple[int, float]], order: str) -> None:
    whole = np.resize(np.array([0, -0.0, 1, -1, 1e-7, 6e4, -6e4], np.float64), shape).astype(dtype)
    for place, value in bad:
        if whole.size:
            whole.reshape(-1)[place % whole.size] = value
    array = {"as it is": whole, "turned": whole.T, "a part": whole[..., 1::2] if shape else whole, "backwards": whole}[
        order
    ]
    if order == "backwards" and shape:
        array = whole[::-1]
    wanted = int((~np.isfinite(array.astype(np.float64))).sum())
    assert finite.count_non_finite(array) == wanted
    assert finite.all_finite(array) == (wanted == 0)


def test_the_largest_numbers_are_finite() -> None:
    for dtype in DTYPES:
        ends = np.array([ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).min], dtype)
        assert finite.all_finite(ends)
    assert finite.all_finite(np.full(3, 255, np.uint8))


def damaged(directory: Path, values: dict[str, dict[int, float]], dtype: type = np.float32) -> Path:
    """A copy of a checkpoint with other values at some places of some tensors."""
    shutil.copytree(FAMILIES / "llama3", directory)
    file = directory / "model.safetensors"
    arrays = {name: np.array(tensor.read()).astype(dtype) for name, tensor in safetensors.index(file).items()}
    for name, places in values.items():
        for place, value in places.items():
            arrays[name].reshape(-1)[place] = value
    safetensors.write(file, {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__)
    return directory


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_tensor_that_is_read_is_checked(dtype: type, tmp_path: Path) -> None:
    place = damaged(tmp_path / "bad", {NAME: {5: np.nan, 9: -np.inf}, "model.norm.weight": {0: np.inf}}, dtype)
    reader = hf.HubReader(place)
    stack = reader.mapped("layers.blocks.0.mlp.up.kernel")
    with pytest.raises(WeightsError) as caught:
        stack.read()
    assert str(caught.value) == (
        f"{place / 'model.safetensors'}: 2 arrays hold NaN or infinity; a run that starts from them learns nothing; to "
        "load them as they are, set allow_non_finite=True:\n"
        f"  {NAME}: 2 of 768 values are NaN or infinite\n"
        "  model.norm.weight: 1 of 24 values are NaN or infinite"
    )
    # Each process looks at what it reads: other layers, and other rows, are as they were.
    assert np.isfinite(stack.layers(0, 3).read().astype(np.float64)).all()
    with pytest.raises(WeightsError):
        stack.layers(3, 4).read()
    everything = slice(None)
    assert np.isfinite(stack.read((everything, slice(10, 24), everything)).astype(np.float64)).all()
    allowed = hf.HubReader(place, allow_non_finite=True).leaf("layers.blocks.0.mlp.up.kernel").astype(np.float64)
    assert np.isnan(allowed).sum() == 1
    assert np.isinf(allowed).sum() == 1


def test_a_number_that_is_rounded_to_infinity_was_finite(tmp_path: Path) -> None:
    place = damaged(tmp_path / "large", {NAME: {5: 1e30}})
    with np.errstate(over="ignore"):
        rounded = hf.HubReader(place).mapped("layers.blocks.0.mlp.up.kernel").read(dtype=np.float16)
    assert np.isinf(rounded).sum() == 1


def test_load_refuses_them_unless_asked(tmp_path: Path) -> None:
    place = damaged(tmp_path / "bad", {NAME: {5: np.nan}})
    with pytest.raises(WeightsError, match=f"{NAME}: 1 of 768 values are NaN or infinite"):
        nnxdsl.load(place)
    model = nnxdsl.load(place, allow_non_finite=True)
    assert np.isnan(np.asarray(model(np.zeros((1, 4), int)))).all()
