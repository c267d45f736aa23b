"""First values: layers that are read and quantised one at a time are those of the whole stack, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnxdsl import Adapter, Experiment, Memory, Model, Quantization, Weights, compile
from nnxdsl.adapters import weight_only_quant
from nnxdsl.formats.hf import HubReader
from nnxdsl.program import init

FAMILIES = Path(__file__).parent.parent / "reference" / "families"


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(  # one of them with experts, which are stacked, too
    ("family", "memory"), [("mistral_global", Memory(offload=("frozen",))), ("mixtral", Memory())]
)
def test_a_checkpoint_is_quantised_layer_by_layer(
    family: str, memory: Memory, experiment: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(FAMILIES / family)
    quantization = Quantization.NF4(block_size=4, targets=("up", "output"))
    model = Model.HF(path, weights=Weights.HF(path))
    program = compile(experiment(model=model, quantization=quantization, adapter=Adapter.LoRA(rank=2), memory=memory))
    placed: list[tuple[int, ...]] = []
    place = init.place

    def recorded(weight: Any, *args: Any, **named: Any) -> jax.Array:
        placed.append(tuple(weight.shape))
        return place(weight, *args, **named)

    monkeypatch.setattr(init, "place", recorded)
    actual: dict[int, Mapping[str, jax.Array]] = {}
    single: dict[int, int] = {}
    for at_once in (2**28, 1):
        monkeypatch.setattr(init, "AT_ONCE_BYTES", at_once)
        actual[at_once] = program.init().frozen
        single[at_once] = sum(shape[0] == 1 for shape in placed if len(shape) > 2)
        placed.clear()
    small = {
        path.removesuffix(weight_only_quant.QVALUE) for path in actual[1] if path.endswith(weight_only_quant.QVALUE)
    }
    assert small == {path for path in program.blueprint.base if path.endswith(("mlp.up.kernel", "output.kernel"))}
    for name, array in actual[1].items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(actual[2**28][name]), err_msg=name)
        assert array.sharding == actual[2**28][name].sharding
    layers = sum(program.blueprint.base[path].shape[0] for path in small)
    assert single == {2**28: 0, 1: layers}

    reader = HubReader(Path(path))

    class InMemory:
        def leaf(self, path: str) -> np.ndarray:
            return np.asarray(reader.leaf(path))

    held = program.init(InMemory()).frozen
    assert sum(shape[0] == 1 for shape in placed if len(shape) > 2) == layers
    for name, array in actual[1].items():
        np.testing.assert_array_equal(np.asarray(held[name]), np.asarray(array), err_msg=name)


@pytest.mark.extended
def test_parts_that_several_devices_have_are_read_once(on_eight_devices: Callable[..., Any]) -> None:
    assert on_eight_devices("program/on_parts.py") == {"reads": 2, "equal": True}
