"""Nested trees as Flax Linen has them: the names that Linen itself gives, and our leaves back bit for bit."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nnxdsl.errors import WeightsError
from nnxdsl.formats import linen
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(4, use_bias=False, name="up")(nn.RMSNorm(name="norm")(x))


class Period(nn.Module):
    def setup(self) -> None:
        self.blocks = [Block() for _ in range(2)]

    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        for block in self.blocks:
            x = block(x)
        return x, None


class Network(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(6, 4, name="embed")(tokens)
        stack = nn.scan(Period, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return Period(name="tail")(stack(name="layers")(x, None)[0], None)[0]


def test_names_and_axes_are_those_of_linen() -> None:
    tree: Any = Network().init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    leaves = linen.from_tree(tree)
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        "embed.embedding": (6, 4),
        **{f"layers.blocks.{block}.norm.scale": (3, 4) for block in range(2)},
        **{f"layers.blocks.{block}.up.kernel": (3, 4, 4) for block in range(2)},
        **{f"tail.blocks.{block}.norm.scale": (4,) for block in range(2)},
        **{f"tail.blocks.{block}.up.kernel": (4, 4) for block in range(2)},
    }
    again = linen.to_tree(leaves)
    assert jax.tree.structure(again) == jax.tree.structure(flax.serialization.to_state_dict(tree))
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


def test_layers_by_themselves_have_their_published_numbers(config: DecoderConfig, template: AbstractModel) -> None:
    rng = np.random.default_rng(0)
    leaves = {
        path: rng.normal(size=leaf.shape).astype(ml_dtypes.bfloat16 if "mlp" in path else np.float32)
        for path, leaf in template.variables.items()
    }
    tree = linen.to_tree(leaves, unrolled=True)["params"]
    assert set(tree) == {"embed", "norm", *(f"layers_{layer}" for layer in range(config.layers.num_layers))}
    third = tree["layers_4"]["mlp"]["up"]["kernel"]  # of periods of three: the second of the second
    assert np.array_equal(third, leaves["layers.blocks.1.mlp.up.kernel"][1])
    assert tree["layers_6"]["mlp"]["up"]["kernel"] is leaves["tail.blocks.0.mlp.up.kernel"]
    for unrolled in (False, True):
        again = linen.from_tree(linen.to_tree(leaves, unrolled=unrolled), config.layers.period)
        assert again.keys() == leaves.keys()
        for path, leaf in leaves.items():
            assert again[path].dtype == leaf.dtype
            assert np.array_equal(again[path].view(np.uint8), leaf.view(np.uint8))


def test_what_cannot_be_mapped(config: DecoderConfig, template: AbstractModel) -> None:
    with pytest.raises(WeightsError, match=r"^a\.w_1: a name that ends in a number is ambiguous"):
        linen.to_tree({"a.w_1": np.zeros(1)})
    tree = linen.to_tree({path: np.zeros(leaf.shape) for path, leaf in template.variables.items()}, unrolled=True)
    with pytest.raises(WeightsError, match=r"stacking them needs the model.s config.json"):
        linen.from_tree(tree)
    del tree["params"]["layers_4"]["mlp"]["up"]
    with pytest.raises(WeightsError) as caught:
        linen.from_tree(tree, config.layers.period)
    assert str(caught.value) == "arrays of a stack are missing:\n  layers_4: has no mlp.up.kernel"
