"""Per-layer embeddings and shared keys and values, as Gemma 4 E2B and E4B have them."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma4 import GEMMA4

REFERENCE = Path(__file__).parent.parent / "reference" / "families"
WITHOUT = 1e-2
"""Of the largest logit: what leaving an ingredient out changes at least; the tests of families allow 3e-5."""
Leaves = dict[str, jax.Array]


def difference(config: DecoderConfig, leaves: Leaves) -> float:
    """How far logits are from those of transformers for gemma4_e4b, relative to the largest."""
    expected = np.load(REFERENCE / "gemma4_e4b" / "expected.npz")
    tokens, size, wanted = expected["tokens"][:1], expected["tokens"].shape[1], expected["logits"][:1]
    template = abstract_decoder(config)

    @jax.jit
    def logits(leaves: Leaves) -> jax.Array:
        decoder = template.merge(leaves)
        assert isinstance(decoder, Decoder)
        positions = positions_right_padded(jnp.asarray(expected["lengths"][:1]), size)
        return decoder.logits(decoder(jnp.asarray(tokens), positions, dtype=jnp.float32).hidden)

    return float(np.abs(logits(leaves) - wanted).max() / np.abs(wanted).max())


@pytest.fixture(scope="module")
def stored() -> tuple[DecoderConfig, Leaves]:
    reader = hf.HubReader(REFERENCE / "gemma4_e4b")
    return reader.config, {path: jnp.asarray(reader.leaf(path)) for path in abstract_decoder(reader.config).variables}


@pytest.mark.extended
def test_all_ingredients_together(stored: tuple[DecoderConfig, Leaves]) -> None:
    assert difference(*stored) == pytest.approx(0, abs=3e-5)


@pytest.mark.extended
@pytest.mark.parametrize("left_out", ["per_layer.embedding", "per_layer.projection.kernel", "per_layer.output.kernel"])
def test_each_part_of_the_embeddings_counts(stored: tuple[DecoderConfig, Leaves], left_out: str) -> None:
    config, leaves = stored
    zeros = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items() if path.endswith(left_out)}
    assert zeros
    assert difference(config, leaves | zeros) > WITHOUT


def test_layers_have_vectors_of_their_own(stored: tuple[DecoderConfig, Leaves]) -> None:
    config, leaves = stored
    assert config.per_layer_embedding is not None
    table = leaves["per_layer.embedding"].reshape(-1, config.layers.num_layers, config.per_layer_embedding.dim)
    turned = jnp.roll(table, 1, axis=1).reshape(leaves["per_layer.embedding"].shape)
    assert difference(config, {**leaves, "per_layer.embedding": turned}) > WITHOUT


def test_sharing_keys_is_not_sharing_their_weights(stored: tuple[DecoderConfig, Leaves]) -> None:
    """The same weights in a decoder whose last layers make keys and values with the weights of those they share."""
    config, leaves = stored
    other = config.with_fields({"layers.num_kv_shared_layers": 0})
    producer = {"local": 2, "global": 1}  # the last of their kind among the first three

    def of_layer(layer: int, name: str) -> jax.Array | None:
        path, position = config.layers.path(layer)
        leaf = leaves.get(f"{path}.{name}")
        return leaf if leaf is None or position is None else leaf[position]

    actual: Leaves = {}
    for path, spec in abstract_decoder(other).variables.items():
        if path in leaves and ".blocks." not in path:
            actual[path] = leaves[path]
            continue
        block, name = path.split(".blocks.")[1].split(".", 1)
        parts = []
        for layer in range(int(block), config.layers.num_layers, other.layers.period):
            ours = of_layer(layer, name)
            parts.append(of_layer(producer[other.layers.kinds[layer]], name) if ours is None else ours)
        assert all(part is not None for part in parts)
        actual[path] = jnp.stack([part for part in parts if part is not None])
        assert actual[path].shape == spec.shape
    assert difference(other, actual) > WITHOUT


@pytest.mark.parametrize("size", ["tiny-e", "e2b", "e4b"])
def test_only_layers_with_keys_have_a_cache(size: str) -> None:
    config = GEMMA4[size]
    cache = jax.eval_shape(lambda: init_cache(config, 1, 2048, jnp.bfloat16))
    kinds = config.layers.kinds[: config.layers.own_layers]
    widths = {kind: config.of(kind).head_dim for kind in kinds}
    assert [kept.key.shape[-1] for kept in cache.layers] == [widths[kind] for kind in kinds]


def test_files_may_have_keys_that_no_layer_reads(tmp_path: Path) -> None:
    """Published files store keys and values of sharing layers, as transformers ignores them."""
    tensors = load_file(REFERENCE / "gemma4_e4b" / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = np.zeros((16, 24), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    fields = json.loads((REFERENCE / "gemma4_e4b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    reader = hf.HubReader(tmp_path)
    assert reader.check(abstract_decoder(reader.config)) == []
    tensors["model.layers.4.self_attn.other.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (problem,) = hf.HubReader(tmp_path).check(abstract_decoder(reader.config))
    assert "no tensor of a text decoder of 6 layers" in str(problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.num_kv_shared_layers": 8}, "expected less than 8 layers"),
        ({"layers.num_kv_shared_layers": 7}, r"no layer before the sharing ones .* \['global'\]"),
        ({"mtp_layers": 1}, "mtp_layers: not with layers.num_kv_shared_layers or per_layer_embedding"),
    ],
)
def test_what_cannot_be_shared_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GEMMA4["tiny-e"].with_fields(change)
