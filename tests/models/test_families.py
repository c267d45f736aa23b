"""Every family against transformers' stored figures: logits, loss, gradient, padding, packing, greedy answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models import params
from nnxdsl.models.attention.kv_cache import append, init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import from_hf, to_hf

REFERENCE = Path(__file__).parent.parent / "reference" / "families"
NAMES = sorted(path.name for path in REFERENCE.iterdir())
# Second members of their families, and one that takes a minute to compile.
LONG = {
    *("deepseek_v3_plain", "llama3_tied", "mistral_global", "qwen2_windows", "qwen3_moe_plain", "qwen3_next"),
    *(
        "gemma4_moe",
        "mistral4",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "deepseek_v2",
        "deepseek_v2_lite",
        "glm4_moe_plain",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "glm_moe_dsa_shared",
    ),
    "qwen3_moe_dense_step",
    *("gemma4_e4b", "llama4_plain", "nemotron_h_dense"),
    *("deepseek_v2_biased", "nemotron_h_biased", "smollm3_windows"),
}
TOLERANCE = 2e-5
"""Of the largest logit, of the loss, of the gradient's length."""


class Loaded(NamedTuple):
    """A checkpoint of the reference, and what transformers makes of it."""

    config: DecoderConfig
    leaves: dict[str, jax.Array]
    expected: dict[str, np.ndarray]
    logits: Callable[..., jax.Array]
    template: params.AbstractModel


def logits_of(template: params.AbstractModel) -> Callable[..., jax.Array]:
    @jax.jit
    def logits(leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder = template.merge(leaves)
        return decoder.logits(decoder(tokens, places, dtype=jnp.float32)[0])

    return logits


def load(name: str) -> Loaded:
    reader = hf.HubReader(REFERENCE / name)
    template = abstract_decoder(reader.config)
    assert reader.check(template) == []
    leaves = {path: jnp.asarray(reader.leaf(path)) for path in template.variables}
    expected = dict(np.load(REFERENCE / name / "expected.npz"))
    return Loaded(reader.config, leaves, expected, logits_of(template), template)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in NAMES]
)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load(request.param)


def close(got: jax.Array, wanted: jax.Array | np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE * float(np.abs(wanted).max()), rtol=0)


@pytest.mark.default_variants(10)
@pytest.mark.gpu
def test_logits_with_padding_on_either_side(loaded: Loaded) -> None:
    tokens, lengths, wanted = (loaded.expected[name] for name in ("tokens", "lengths", "logits"))
    size = tokens.shape[1]
    right = loaded.logits(loaded.leaves, tokens, positions_right_padded(jnp.asarray(lengths), size))
    shifted = np.stack([np.roll(row, size - n) for row, n in zip(tokens, lengths, strict=True)])
    left = loaded.logits(loaded.leaves, shifted, positions_left_padded(jnp.asarray(lengths), size))
    for row, n in enumerate(lengths):
        close(right[row, :n], wanted[row, :n])
        close(left[row, size - n :], wanted[row, :n])


@pytest.mark.gpu
@pytest.mark.default_variants(1)
def test_sequences_packed_side_by_side(loaded: Loaded) -> None:
    tokens, lengths, wanted = (loaded.expected[name] for name in ("tokens", "lengths", "logits"))
    parts = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
    numbers = [np.full(n, segment + 1) for segment, n in enumerate(lengths)]
    places = (np.concatenate(part)[None] for part in ([np.arange(n) for n in lengths], numbers))
    position, segment = (jnp.asarray(part, jnp.int32) for part in places)
    packed = TokenPositions(position, segment, jnp.zeros_like(segment))
    got = loaded.logits(loaded.leaves, np.concatenate(parts)[None], packed)[0]
    close(got, np.concatenate([row[:n] for row, n in zip(wanted, lengths, strict=True)]))


@pytest.mark.gpu
@pytest.mark.slow
def test_loss_and_gradient(loaded: Loaded) -> None:
    tokens, lengths = (jnp.asarray(loaded.expected[name]) for name in ("tokens", "lengths"))
    size = tokens.shape[1]

    @jax.jit
    @jax.value_and_grad
    def loss(leaves: dict[str, jax.Array]) -> jax.Array:
        logps = jax.nn.log_softmax(loaded.logits(leaves, tokens, positions_right_padded(lengths, size))[:, :-1])
        chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
        counted = jnp.arange(1, size) < lengths[:, None]
        return -jnp.sum(chosen * counted) / jnp.sum(counted)

    value, gradient = loss(loaded.leaves)
    assert float(value) == pytest.approx(float(loaded.expected["loss"]), rel=TOLERANCE)
    length = np.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in gradient.values()))
    assert length == pytest.approx(float(loaded.expected["norm"]), rel=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.slow
def test_greedy_answers_through_the_cache(loaded: Loaded) -> None:
    prompt, greedy = int(loaded.expected["prompt"]), loaded.expected["greedy"]
    tokens = jnp.asarray(loaded.expected["tokens"][:, :prompt])
    rows, new = greedy.shape
    cache = init_cache(loaded.config, rows, prompt + new, jnp.float32)

    @jax.jit
    def step(leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions, cache: object) -> tuple:
        hidden, kept, *_ = (decoder := loaded.template.merge(leaves))(
            tokens, places, cache=cache, return_kv=True, dtype=jnp.float32
        )
        return jnp.argmax(decoder.logits(hidden[:, -1:]), axis=-1), append(cache, kept)

    places = positions_right_padded(jnp.full((rows,), prompt, jnp.int32), prompt)
    actual = []
    for number in range(new):
        tokens, cache = step(loaded.leaves, tokens, places, cache)
        actual.append(tokens)
        one = jnp.ones((rows, 1), jnp.int32)
        places = TokenPositions(one * (prompt + number), one, jnp.zeros_like(one))
    np.testing.assert_array_equal(jnp.concatenate(actual, axis=1), greedy)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_written_as_it_is_read(name: str) -> None:
    config = hf.read_config(REFERENCE / name)
    kind = json.loads((REFERENCE / name / "config.json").read_text())["model_type"]
    written = to_hf(config, like=kind)
    assert written["model_type"] == kind
    assert from_hf(written) == config


def written(name: str, target: Path) -> None:
    """Writes a checkpoint of the reference as an export does."""
    reader = hf.HubReader(REFERENCE / name)
    template = abstract_decoder(reader.config)
    kind = json.loads((REFERENCE / name / "config.json").read_text())["model_type"]
    hf.write(target, reader.config, {path: reader.leaf(path) for path in template.variables}, like=kind)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", NAMES)
def test_written_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    written(name, tmp_path)
    ours, theirs = (load_file(place / "model.safetensors") for place in (tmp_path, REFERENCE / name))
    theirs = {key: array for key, array in theirs.items() if not hf._UNUSED.match(key)}  # but for encoders
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_what_is_written(name: str, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    written(name, tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    loaded = getattr(transformers, named).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model = loaded.eval()
    expected = np.load(REFERENCE / name / "expected.npz")
    mask = np.arange(expected["tokens"].shape[1])[None] < expected["lengths"][:, None]
    with torch.no_grad():
        actual = model(torch.tensor(expected["tokens"]).long(), attention_mask=torch.tensor(mask).long()).logits
    wanted = expected["logits"]
    np.testing.assert_allclose(
        actual.numpy() * mask[..., None], wanted, atol=1e-5 * float(np.abs(wanted).max()), rtol=0
    )
