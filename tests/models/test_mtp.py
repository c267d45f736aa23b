"""The layer that predicts the token after the next one: its tensors in the Hub's layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from nnxdsl.models import hub, safetensors, tree
from nnxdsl.models.decoder import Decoder

FAMILIES = Path(__file__).parent.parent / "reference" / "families"


def edit(file: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrites a safetensors file with its arrays, by name, changed in place by `change`."""
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}
    change(arrays)
    safetensors.write(file, {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__)


@pytest.mark.parametrize(
    ("family", "name", "beyond"),
    [
        ("deepseek_v3", "model.layers.5.eh_proj.weight", "model.layers.6.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight", "model.mtp.fc.weight"),
    ],
)
def test_tensors_of_further_layers_are_understood(family: str, name: str, beyond: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FAMILIES / family, tmp_path / family))
    file = directory / "model.safetensors"
    edit(file, lambda arrays: arrays.update({name: np.zeros((24, 48), np.float32)}))
    reader = hub.HubReader(directory)
    template = tree.abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    assert reader.check(template) == []
    edit(file, lambda arrays: arrays.update({beyond: arrays.pop(name)}))
    assert [str(problem) for problem in hub.HubReader(directory).check(template)] == [
        f"{beyond}: {file}: no part of a text decoder of {reader.config.num_layers} layers"
    ]
