"""The layer that predicts the token after the next one, against stored figures; its tensors in the Hub's layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf, safetensors
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded

FAMILIES = Path(__file__).parent.parent / "reference" / "families"
FIGURES = Path(__file__).parent.parent / "reference" / "mtp"
NAMES = sorted(path.name for path in FIGURES.iterdir())
TOLERANCE = 1e-5
"""Of the largest logit."""


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
    reader = hf.HubReader(directory)
    template = abstract_decoder(attrs.evolve(reader.config, mtp_layers=0))
    assert reader.check(template) == []
    edit(file, lambda arrays: arrays.update({beyond: arrays.pop(name)}))
    assert [str(problem) for problem in hf.HubReader(directory).check(template)] == [
        f"{beyond}: {file}: no tensor of a text decoder of {reader.config.layers.num_layers} layers"
    ]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_logits_equal_those_of_the_reference_in_rows_and_packed(name: str) -> None:
    reader = hf.HubReader(FIGURES / name)
    template = abstract_decoder(reader.config)
    assert reader.config.mtp_layers == 1
    assert reader.check(template) == []
    leaves = {path: jnp.asarray(reader.leaf(path)) for path in template.variables}
    expected = dict(np.load(FIGURES / name / "expected.npz"))
    tokens, lengths, wanted = (expected[key] for key in ("tokens", "lengths", "logits"))

    @jax.jit
    def logits(leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder: Any = template.merge(leaves)
        hidden = decoder(tokens, places, dtype=jnp.float32).hidden
        return decoder.logits(decoder.mtp_hidden(hidden, tokens, places, dtype=jnp.float32)[0])

    got = logits(leaves, tokens, positions_right_padded(jnp.asarray(lengths), tokens.shape[1]))
    packed = TokenPositions(
        *(
            jnp.asarray(np.concatenate(part)[None], jnp.int32)
            for part in (
                [np.arange(n) for n in lengths],
                [np.full(n, segment + 1) for segment, n in enumerate(lengths)],
                [np.zeros(n) for n in lengths],
            )
        )
    )
    side_by_side = logits(
        leaves, np.concatenate([row[:n] for row, n in zip(tokens, lengths, strict=True)])[None], packed
    )
    starts = np.cumsum([0, *lengths])
    for row, n in enumerate(lengths):
        for actual in (got[row, : n - 1], side_by_side[0, starts[row] : starts[row] + n - 1]):
            np.testing.assert_allclose(actual, wanted[row, : n - 1], atol=TOLERANCE * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    reader = hf.HubReader(FIGURES / name)
    leaves = {path: np.array(reader.leaf(path)) for path in abstract_decoder(reader.config).variables}
    hf.write(tmp_path, reader.config, leaves)
    before, after = (safetensors.index(path / "model.safetensors") for path in (FIGURES / name, tmp_path))
    assert after.keys() == before.keys()
    assert all(np.array_equal(tensor.read(), after[key].read()) for key, tensor in before.items())
    assert hf.HubReader(tmp_path).config == reader.config
    without = attrs.evolve(reader.config, mtp_layers=0)
    plain = {path: leaf for path, leaf in leaves.items() if not path.startswith("mtp.")}
    hf.write(tmp_path, without, plain)
    assert hf.HubReader(tmp_path).config == without


def test_a_layer_that_does_not_fit_says_so(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FIGURES / "deepseek_v3", tmp_path / "deepseek_v3"))
    file, config = directory / "model.safetensors", directory / "config.json"
    template = abstract_decoder(hf.HubReader(directory).config)

    def damage(arrays: dict[str, np.ndarray]) -> None:
        del arrays["model.layers.3.enorm.weight"]
        arrays["model.layers.3.shared_head.head.weight"] += 1

    edit(file, damage)
    assert [str(problem) for problem in hf.HubReader(directory).check(template)] == [
        f"mtp.token_norm.scale: {file}: expected a tensor model.layers.3.enorm.weight of shape (24,), there is none",
        f"model.layers.3.shared_head.head.weight: {file}: differs from lm_head.weight, which the "
        "multi-token-prediction (MTP) layer shares",
    ]

    def take_out(arrays: dict[str, np.ndarray]) -> None:
        for name in [name for name in arrays if "layers.3." in name]:
            del arrays[name]

    edit(file, take_out)
    config.write_text(config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0'))
    assert [str(problem) for problem in hf.HubReader(directory).check(template)] == [
        f"mtp.join.kernel: {config}: num_nextn_predict_layers has no multi-token-prediction (MTP) layer"
    ]
