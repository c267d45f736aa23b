"""A token mixer of another package: a config and a module, and no edit of the decoder, its cache or the checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models import params
from nnxdsl.models.attention.kv_cache import append, init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.tensors import TensorSource, linears
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.nemotron_h import NEMOTRON_H
from nnxdsl.models.families.olmo_hybrid import OLMO_HYBRID
from nnxdsl.models.layers.linear import Linear


@attrs.frozen
class MeanConfig(MixerConfig):
    """The mean of a projection of all tokens so far."""

    module: ClassVar[str] = f"{__name__}:Mean"
    is_attention: ClassVar[bool] = False

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        return linears({"attention.value": "mean.value"})


class MeanState(NamedTuple):
    total: jax.Array  # [B, D]
    count: jax.Array  # [B]


class Mean(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.value = Linear(width, width, axes=("embed", "heads"), rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Mean:
        return cls(config.embed_dim, rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def init_cache(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> MeanState:
        return MeanState(jnp.zeros((batch, config.embed_dim), jnp.float32), jnp.zeros((batch,), jnp.float32))

    def __call__(self, x: jax.Array, view: View, past: Any) -> tuple[jax.Array, MeanState]:
        real = (view.positions.segment_ids > 0).astype(jnp.float32)  # [B, T]
        before = MeanState(jnp.zeros(x.shape[::2]), jnp.zeros(len(x))) if past is None else past
        total = before.total[:, None] + jnp.cumsum(self.value(x) * real[..., None], axis=1)
        count = before.count[:, None] + jnp.cumsum(real, axis=1)
        return total / jnp.maximum(count, 1)[..., None], MeanState(total[:, -1], count[:, -1])


CONFIG = LLAMA3["tiny"].with_fields(
    {
        "layers.num_layers": 5,
        "layers.pattern": ("linear", "global"),
        "linear_attention": MeanConfig(),
        "vocab_size": 32,
    }
)


@pytest.mark.extended
def test_it_runs_in_the_stack_and_with_a_cache() -> None:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 6)))
    positions = positions_right_padded(jnp.full((2,), 6), 6)
    template = abstract_decoder(CONFIG)
    leaves = jax.jit(lambda: params.flatten(Decoder(CONFIG, rngs=nnx.Rngs(0))))()
    whole = jax.jit(lambda leaves: template.merge(leaves)(tokens, positions, dtype=jnp.float32).hidden)(leaves)

    @jax.jit
    def step(leaves: Any, tokens: jax.Array, positions: TokenPositions, cache: Any) -> tuple[jax.Array, Any]:
        output: Any = template.merge(leaves)(tokens, positions, cache=cache, return_kv=True, dtype=jnp.float32)
        return output.hidden, append(cache, output.cache_update)

    cache = init_cache(CONFIG, 2, 8, jnp.float32)
    for start, end in ((0, 4), (4, 5), (5, 6)):
        part = TokenPositions(*(each[:, start:end] for each in positions))
        hidden, cache = step(leaves, tokens[:, start:end], part, cache)
        np.testing.assert_allclose(hidden, whole[:, start:end], atol=1e-5)


def test_its_tensors_have_names() -> None:
    template = abstract_decoder(CONFIG)
    assert set(tensor_sources(CONFIG)) == set(template.variables)
    assert tensor_sources(CONFIG)["layers.blocks.0.attention.value.kernel"].names == (
        "layers.0.mean.value.weight",
        "layers.2.mean.value.weight",
    )


def test_a_layer_is_what_its_spec_says() -> None:
    gemma, hybrid = GEMMA3["tiny"], OLMO_HYBRID["tiny"]
    local, full = gemma.layer("local"), gemma.layer("global")
    assert (local.window, local.rope, local.norms) == (gemma.window, gemma.rope_local, "sandwich")
    assert (full.window, full.rope) == (None, gemma.rope_global)
    assert attrs.evolve(gemma, rope_local=None).layer("local").rope == gemma.rope_global
    assert {kind: layer.norms for kind, layer in hybrid.specs.items()} == {"linear": "pre", "global": "post"}
    assert [layer.is_recurrent for layer in hybrid.specs.values()] == [True, False]
    # One sublayer each: a recurrence, attention without rotary positions, or experts.
    one = NEMOTRON_H["tiny"]
    parts = {kind: (layer.mixer is not None, layer.feed_forward is not None) for kind, layer in one.specs.items()}
    assert parts == {"linear": (True, False), "none": (False, True), "nope": (True, False)}
    assert one.layer("nope").rope is None
    experts = one.layer("none").feed_forward
    assert experts is one.feed_forward
    assert isinstance(one.layer("none", dense=True).feed_forward, MLPConfig)
