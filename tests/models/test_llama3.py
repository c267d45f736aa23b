"""Llama 3, beside what holds of every family: branches, names and shapes, rounding, and what its files may hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf, safetensors
from nnxdsl.models import params
from nnxdsl.models.attention.context import context
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.layers.norm import RMSNorm
from tests.models.test_families import REFERENCE, Loaded, close, load, logits_of

NAMES = ("llama3_tied", "llama3")


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return load(request.param)


def test_the_reference_knows_scaled_frequencies_from_others() -> None:
    config, leaves, expected, *_ = load("llama3")
    places = positions_right_padded(jnp.asarray(expected["lengths"]), expected["tokens"].shape[1])
    for change in (attrs.evolve(config.rope_global, scaling=None), Rope(theta=config.rope_global.theta)):
        other = logits_of(abstract_decoder(attrs.evolve(config, rope_global=change)))(
            leaves, expected["tokens"], places
        )
        assert float(jnp.abs(other[0] - expected["logits"][0]).max()) > 0.05


def test_branches_of_a_packed_pair_equal_two_rows(loaded: Loaded) -> None:
    tokens = loaded.expected["tokens"]
    prompt, first, second = 10, 14, 9
    row = np.concatenate([tokens[0, : prompt + first], tokens[1, :second]])[None]
    position = np.concatenate([np.arange(prompt + first), prompt + np.arange(second)])[None].astype(np.int32)
    branch = np.repeat([0, 1, 2], [prompt, first, second])[None].astype(np.int32)
    packed = loaded.logits(loaded.leaves, row, TokenPositions(position, np.ones_like(branch), branch))
    rejected = np.concatenate([tokens[0, :prompt], tokens[1, :second]])[None]
    apart = loaded.logits(
        loaded.leaves, rejected, positions_right_padded(jnp.array([prompt + second]), prompt + second)
    )
    close(packed[0, : prompt + first], loaded.expected["logits"][0, : prompt + first])
    close(packed[0, prompt + first :], apart[0, prompt:])


def test_paths_shapes_and_axes(loaded: Loaded) -> None:
    config = loaded.config
    width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block = {
        "attention.key.kernel": ((24, kv), ("embed", "kv_heads")),
        "attention.output.kernel": ((width, 24), ("heads", "embed")),
        "attention.query.kernel": ((24, width), ("embed", "heads")),
        "attention.value.kernel": ((24, kv), ("embed", "kv_heads")),
        "mlp.down.kernel": ((32, 24), ("mlp", "embed")),
        "mlp.gate.kernel": ((24, 32), ("embed", "mlp")),
        "mlp.up.kernel": ((24, 32), ("embed", "mlp")),
        "pre_attention_norm.scale": ((24,), ("norm",)),
        "pre_mlp_norm.scale": ((24,), ("norm",)),
    }
    wanted = {f"layers.blocks.0.{name}": ((5, *shape), ("layers", *axes)) for name, (shape, axes) in block.items()}
    wanted |= {"embed.embedding": ((96, 24), ("vocab", "embed")), "norm.scale": ((24,), ("norm",))}
    if not config.head.tied:
        wanted["lm_head.kernel"] = ((96, 24), ("vocab", "embed"))
    assert {path: (leaf.shape, leaf.axes) for path, leaf in loaded.template.variables.items()} == wanted
    fresh = jax.jit(lambda: params.flatten(Decoder(config, rngs=nnx.Rngs(0))))()
    assert all(bool((value == 1).all()) for path, value in fresh.items() if path.endswith("norm.scale"))


def test_nothing_is_made_for_local_layers_that_are_not_there(loaded: Loaded) -> None:
    places = positions_right_padded(jnp.array([4]), 4)
    assert "local" not in context(loaded.config, places).views


def test_norm_rounds_before_the_scale() -> None:
    norm = RMSNorm(4, axis="norm", eps=1e-5, kind="plain", param_dtype=jnp.float32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)), jnp.bfloat16)
    norm.scale[...] = jnp.asarray([1.1, 0.7, 1.9, 3.3])
    wide = np.asarray(x, np.float32)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    scale = np.asarray(norm.scale[...]).astype(ml_dtypes.bfloat16)
    assert np.array_equal(norm(x), wide.astype(ml_dtypes.bfloat16) * scale)


def test_bfloat16_is_written_and_read_again_bit_for_bit(loaded: Loaded, tmp_path: Path) -> None:
    leaves = {path: leaf.astype(ml_dtypes.bfloat16) for path, leaf in loaded.leaves.items()}
    hf.write(tmp_path, loaded.config, leaves)
    again = hf.HubReader(tmp_path)
    assert again.config == loaded.config
    assert again.check(loaded.template) == []
    assert all(np.array_equal(again.leaf(path), leaf) for path, leaf in leaves.items())
    assert ("lm_head.weight" in safetensors.index(tmp_path / "model.safetensors")) == (not loaded.config.head.tied)


def edit(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> list[str]:
    """Rewrites a directory's tensors with a change, and returns what is wrong with it then."""
    file = directory / "model.safetensors"
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}
    change(arrays)
    safetensors.write(file, {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__)
    reader = hf.HubReader(directory)
    return [str(problem) for problem in reader.check(abstract_decoder(reader.config))]


def test_heads_and_buffers_that_files_may_hold(tmp_path: Path) -> None:
    tied, untied = (Path(shutil.copytree(REFERENCE / name, tmp_path / name)) for name in NAMES)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    assert edit(untied, lambda arrays: arrays.update(old)) == []
    assert edit(tied, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"]})) == []
    assert edit(tied, lambda arrays: arrays.update({"lm_head.weight": arrays["lm_head.weight"] * 2})) == [
        f"lm_head.weight: {tied / 'model.safetensors'}: differs from model.embed_tokens.weight, but config.json says "
        "that the two are tied"
    ]
    file = untied / "model.safetensors"
    assert edit(untied, lambda arrays: arrays.update({"lm_head.weight": np.zeros((95, 24), np.float32)})) == [
        f"lm_head.kernel: {file}: lm_head.weight: expected shape (96, 24), got (95, 24)"
    ]
    bias = {"model.layers.1.self_attn.q_proj.bias": np.zeros(24, np.float32)}
    assert edit(untied, lambda arrays: (arrays.pop("lm_head.weight"), arrays.update(bias))) == [
        f"lm_head.kernel: {file}: expected a tensor lm_head.weight of shape (96, 24), there is none",
        f"model.layers.1.self_attn.q_proj.bias: {file}: no tensor of a text decoder of 5 layers",
    ]


def test_a_decoder_of_no_family_is_not_written(loaded: Loaded, tmp_path: Path) -> None:
    odd = loaded.config.with_fields({"attention.query_scale": 0.125, "embedding.scaled": True})
    with pytest.raises(WeightsError) as caught:
        hf.write(tmp_path / "out", odd, loaded.leaves)
    usual = loaded.config.head_dim**-0.5
    lines = str(caught.value).splitlines()
    assert lines[0] == "no family of the Hub has a decoder like this:"
    assert f"  Llama 3 has embedding.scaled=False (not True), attention.query_scale={usual!r} (not 0.125)" in lines
    gemma = "  Gemma 3 has norm.placement='sandwich' (not 'pre'), norm.scale='zero_centred' (not 'plain')"
    assert any(line.startswith(gemma) for line in lines)
    assert not (tmp_path / "out").exists()
