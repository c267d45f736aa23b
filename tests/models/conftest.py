"""A decoder that compiles quickly, with everything in it: two periods, a tail, groups of heads, a short window."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig, local_then_global
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.decoder import Decoder


@pytest.fixture(scope="session")
def config() -> DecoderConfig:
    return DecoderConfig(
        vocab_size=50,
        embed_dim=32,
        mlp_dim=64,
        num_layers=7,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        window=4,
        pattern=local_then_global(3),
        rope_global=Rope(theta=1_000_000.0, factor=2.0),
        query_scale=12**-0.5,
        max_length=64,
    )


@pytest.fixture(scope="session")
def template(config: DecoderConfig) -> params.AbstractModel:
    return params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="session")
def leaves(template: params.AbstractModel) -> dict[str, jax.Array]:
    """Values for `template`; norm scales are not zero, so that a norm in the wrong place shows."""
    rng = np.random.default_rng(0)
    values = {}
    for path, leaf in template.variables.items():
        spread = 0.3 if path.endswith("scale") else leaf.shape[-2] ** -0.5
        values[path] = jnp.asarray(rng.normal(size=leaf.shape) * spread, leaf.dtype)
    return values


@pytest.fixture(scope="session")
def forward(template: params.AbstractModel) -> Callable[..., jax.Array]:
    """The jitted hidden states of `template`, from (leaves, tokens, places)."""
    return jax.jit(lambda leaves, tokens, places: template.merge(leaves)(tokens, places, dtype=jnp.float32)[0])
