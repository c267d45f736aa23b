"""Every family in the form that the installed transformers writes, and fields that few files have; there and back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flax import nnx

import nnxdsl
from nnxdsl.formats import hf
from nnxdsl.formats.files import read_json
from nnxdsl.models import params
from nnxdsl.models.decoder import Decoder

REFERENCE = Path(__file__).parent.parent / "reference"
NAMES = sorted(path.name for path in (REFERENCE / "families").iterdir())
TOLERANCE = 2e-5
"""Of the largest logit."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The script of the stored figures, which writes to a directory of its own here."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers").utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(REFERENCE), *sys.path])
        import make_families  # noqa: PLC0415 - needs torch
    make_families.HERE = tmp_path_factory.mktemp("saved")
    return make_families


def apart(logits: np.ndarray, expected: dict[str, np.ndarray]) -> float:
    """The largest difference of logits of tokens that are no padding, of the largest one."""
    rows = zip(logits, expected["logits"], expected["lengths"], strict=True)
    differences = [float(np.abs(got[:length] - wanted[:length]).max()) for got, wanted, length in rows]
    return max(differences) / float(np.abs(expected["logits"]).max())


def check(made: ModuleType, name: str, fields: dict[str, object]) -> None:
    seed = made.SEEDS.get(name.split()[0], list(made.FAMILIES).index(name.split()[0]))
    made.write(name, {**made.FAMILIES[name.split()[0]], **fields}, seed)
    directory = made.HERE / name
    expected = dict(np.load(directory / "expected.npz"))
    mask = np.arange(expected["tokens"].shape[1])[None] < expected["lengths"][:, None]
    logits = nnxdsl.load(directory)(expected["tokens"], mask)
    assert apart(np.asarray(logits), expected) < TOLERANCE, name
    reader = hf.HubReader(directory)
    template = params.abstract(lambda: Decoder(reader.config, rngs=nnx.Rngs(0)))
    kind = read_json(directory / "config.json")["model_type"]
    exported = directory / "exported"
    hf.write(exported, reader.config, {path: reader.leaf(path) for path in template.variables}, like=kind)
    import torch  # noqa: PLC0415 - only here

    with torch.no_grad():
        tokens = torch.tensor(expected["tokens"]).long()
        again = made.forward(made.loaded(exported), tokens, torch.tensor(mask)).numpy()
    assert apart(again, expected) < TOLERANCE, name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves(made: ModuleType, name: str) -> None:
    check(made, name, {})


@pytest.mark.timeout(1200)
def test_fields_that_few_files_have(made: ModuleType) -> None:
    for name, fields in made.VARIANTS.items():
        check(made, name, fields)
