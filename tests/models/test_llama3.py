"""Llama 3 against transformers' stored figures: logits, padding, branches, greedy answers, and its Hub directories."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import attrs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf, safetensors
from nnxdsl.models import params
from nnxdsl.models.attention.context import context
from nnxdsl.models.attention.kv_cache import append, init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.parts import EmbeddingConfig
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.layers.norm import RMSNorm

REFERENCE = Path(__file__).parent.parent / "reference" / "llama3"
TOLERANCE = 1e-5  # of the largest logit, which is about 4; 2.4e-6 was seen
NAMES = ("tied", "untied")


class Loaded(NamedTuple):
    """A checkpoint of the reference, and what transformers makes of it."""

    config: DecoderConfig
    template: params.AbstractModel
    leaves: dict[str, jax.Array]
    expected: dict[str, np.ndarray]
    logits: Callable[..., jax.Array]


def template_of(config: DecoderConfig) -> params.AbstractModel:
    return params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def logits_of(template: params.AbstractModel) -> Callable[..., jax.Array]:
    @jax.jit
    def logits(leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder = template.merge(leaves)
        return decoder(tokens, places, dtype=jnp.float32)[0] @ decoder.head().T

    return logits


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    reader = hf.HubReader(REFERENCE / request.param)
    template = template_of(reader.config)
    assert reader.check(template) == []
    leaves = {path: jnp.asarray(reader.leaf(path)) for path in template.variables}
    expected = dict(np.load(REFERENCE / request.param / "expected.npz"))
    return Loaded(reader.config, template, leaves, expected, logits_of(template))


def close(got: jax.Array | np.ndarray, wanted: jax.Array | np.ndarray) -> None:
    largest = float(np.abs(wanted).max())
    assert largest > 2  # worth comparing
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE * largest, rtol=0)


def test_logits_equal_those_of_transformers_with_padding_on_either_side(loaded: Loaded) -> None:
    tokens, lengths, wanted = (loaded.expected[name] for name in ("tokens", "lengths", "logits"))
    size = tokens.shape[1]
    right = loaded.logits(loaded.leaves, tokens, positions_right_padded(jnp.asarray(lengths), size))
    shifted = np.stack([np.roll(row, size - n) for row, n in zip(tokens, lengths, strict=True)])
    left = loaded.logits(loaded.leaves, shifted, positions_left_padded(jnp.asarray(lengths), size))
    for b, n in enumerate(lengths):
        close(right[b, :n], wanted[b, :n])
        close(left[b, size - n :], wanted[b, :n])


def test_the_reference_knows_scaled_frequencies_from_others() -> None:
    reader = hf.HubReader(REFERENCE / "tied")
    expected = np.load(REFERENCE / "tied" / "expected.npz")
    leaves = {path: jnp.asarray(reader.leaf(path)) for path in template_of(reader.config).variables}
    places = positions_right_padded(jnp.asarray(expected["lengths"]), expected["tokens"].shape[1])
    rope = reader.config.rope_global
    for change in (attrs.evolve(rope, scaling=None), Rope(theta=rope.theta)):
        other = logits_of(template_of(attrs.evolve(reader.config, rope_global=change)))(
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


@pytest.mark.default_variants(1)
def test_greedy_answers_through_the_cache_equal_transformers_and_the_whole_forward(loaded: Loaded) -> None:
    prompt, wanted = int(loaded.expected["prompt"]), loaded.expected["greedy"]
    rows, new = wanted.shape
    tokens = jnp.asarray(loaded.expected["tokens"][:, :prompt])

    @jax.jit
    def step(leaves, tokens, places, cache):
        decoder = loaded.template.merge(leaves)
        hidden, new, *_ = decoder(tokens, places, cache=cache, return_kv=True, dtype=jnp.float32)
        return hidden @ decoder.head().T, append(cache, new)

    places = positions_right_padded(jnp.full(rows, prompt + new), prompt + new)
    cache = init_cache(loaded.config, rows, prompt + new, jnp.float32)
    assert [len(kept) for kept in cache.layers] == [2, 2, 2]  # keys and values of each layer
    part, seen, all_tokens = slice(0, prompt), [], tokens
    for _ in range(new):
        logits, cache = step(loaded.leaves, all_tokens[:, part], TokenPositions(*(x[:, part] for x in places)), cache)
        seen.append(logits[:, -1])
        all_tokens = jnp.concatenate([all_tokens, jnp.argmax(logits[:, -1:], -1)], axis=1)
        part = slice(all_tokens.shape[1] - 1, all_tokens.shape[1])
    assert all_tokens[:, prompt:].tolist() == wanted.tolist()
    whole = loaded.logits(loaded.leaves, all_tokens, places)
    close(jnp.stack(seen, axis=1), whole[:, prompt - 1 : -1])


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
    wanted = {f"layers.blocks.0.{name}": ((3, *shape), ("layers", *axes)) for name, (shape, axes) in block.items()}
    wanted |= {"embed.embedding": ((96, 24), ("vocab", "embed")), "norm.scale": ((24,), ("norm",))}
    if not config.tied_head:
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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_written_and_read_again_bit_for_bit(loaded: Loaded, dtype: type, tmp_path: Path) -> None:
    leaves = {path: leaf.astype(dtype) for path, leaf in loaded.leaves.items()}
    hf.write(tmp_path, loaded.config, leaves)
    again = hf.HubReader(tmp_path)
    assert again.config == loaded.config
    assert again.check(loaded.template) == []
    assert all(np.array_equal(again.leaf(path), leaf) for path, leaf in leaves.items())
    if dtype is np.float32:  # the very tensors that transformers wrote
        mine = safetensors.index(tmp_path / "model.safetensors")
        theirs = safetensors.index(REFERENCE / ("tied" if loaded.config.tied_head else "untied") / "model.safetensors")
        assert mine.keys() == theirs.keys()
        assert ("lm_head.weight" in mine) == (not loaded.config.tied_head)
        assert all(np.array_equal(mine[key].read(), tensor.read()) for key, tensor in theirs.items())


def edit(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> list[str]:
    """Rewrites a directory's tensors with a change, and returns what is wrong with it then."""
    file = directory / "model.safetensors"
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}
    change(arrays)
    safetensors.write(file, {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__)
    reader = hf.HubReader(directory)
    return [str(problem) for problem in reader.check(template_of(reader.config))]


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
        f"model.layers.1.self_attn.q_proj.bias: {file}: no tensor of a text decoder of 3 layers",
    ]


def test_a_decoder_of_no_family_is_not_written(loaded: Loaded, tmp_path: Path) -> None:
    odd = attrs.evolve(loaded.config, query_scale=0.125, embedding=EmbeddingConfig(scaled=True))
    with pytest.raises(WeightsError) as caught:
        hf.write(tmp_path / "out", odd, loaded.leaves)
    usual = loaded.config.head_dim**-0.5
    lines = str(caught.value).splitlines()
    assert lines[0] == "no family of the Hub has a decoder like this:"
    embedding = f"{loaded.config.embedding} (not {odd.embedding})"
    assert f"  Llama 3 has embedding={embedding}, query_scale={usual!r} (not 0.125)" in lines
    gemma = "  Gemma 3 has norms='sandwich' (not 'pre'), norm_scale='zero_centred' (not 'plain')"
    assert any(line.startswith(gemma) for line in lines)
    assert not (tmp_path / "out").exists()
