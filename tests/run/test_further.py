"""The layer that predicts the token after the next one, in weights that are converted, loaded, trained and exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nnxdsl.models import safetensors
from nnxdsl.run.convert import convert
from nnxdsl.run.pretrained import load

FIGURES = Path(__file__).parent.parent / "reference" / "mtp"


def test_it_goes_through_every_format_and_answers_do_without_it(tmp_path: Path) -> None:
    first = FIGURES / "deepseek_v3"
    convert(first, tmp_path / "tree", "linen")
    convert(tmp_path / "tree", tmp_path / "arrays", "checkpoint")
    convert(tmp_path / "arrays", tmp_path / "again", "hub")
    before, after = (safetensors.index(path / "model.safetensors") for path in (first, tmp_path / "again"))
    assert after.keys() == before.keys()
    assert all(np.array_equal(tensor.read(), after[key].read()) for key, tensor in before.items())
    model = load(first)
    assert model.config.mtp_layers == 0
    assert not [path for path in model.leaves if path.startswith("mtp.")]
