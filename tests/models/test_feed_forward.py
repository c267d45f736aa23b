"""A feed-forward of another package: a config and a module, and no edit of the decoder or the checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar

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
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import FeedForwardConfig
from nnxdsl.models.config.tensors import TensorSource, linears
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.layers.linear import Linear


@attrs.frozen
class SquaredReLUConfig(FeedForwardConfig):
    """Two products with a squared ReLU between them (So et al., arXiv:2109.08668)."""

    module: ClassVar[str] = f"{__name__}:SquaredReLU"
    width: int = 48

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        return linears({"mlp.inputs": "mlp.c_fc", "mlp.output": "mlp.c_proj"})


class SquaredReLU(nnx.Module):
    def __init__(self, embed: int, width: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.inputs = Linear(embed, width, axes=("embed", "mlp"), rngs=rngs, param_dtype=param_dtype)
        self.output = Linear(width, embed, axes=("mlp", "embed"), rngs=rngs, param_dtype=param_dtype)

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> SquaredReLU:
        assert isinstance(config.feed_forward, SquaredReLUConfig)
        return cls(config.embed_dim, config.feed_forward.width, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, None]:
        return self.output(jax.nn.relu(self.inputs(x)) ** 2), None


CONFIG = LLAMA3["tiny"].with_fields({"vocab_size": 32, "feed_forward": SquaredReLUConfig(), "layers.dense_layers": 1})


@pytest.mark.extended
def test_it_runs_in_the_stack_behind_a_dense_layer() -> None:
    template = abstract_decoder(CONFIG)
    leaves = jax.jit(lambda: params.flatten(Decoder(CONFIG, rngs=nnx.Rngs(0))))()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 6)))

    @jax.jit
    def loss(leaves: dict[str, jax.Array]) -> jax.Array:
        model: Any = template.merge(leaves)
        output = model(tokens, positions_right_padded(jnp.full((2,), 6), 6), dtype=jnp.float32)
        assert output.router_stats is None
        return jnp.mean(jnp.square(model.logits(output.hidden)))

    gradients = jax.grad(loss)(leaves)
    assert all(np.all(np.isfinite(each)) and np.any(each != 0) for each in gradients.values())


def test_its_tensors_have_names() -> None:
    template = abstract_decoder(CONFIG)
    sources = tensor_sources(CONFIG)
    assert set(sources) == set(template.variables)
    assert sources["lead.blocks.0.mlp.down.kernel"].names == ("layers.0.mlp.down_proj.weight",)
    assert sources["layers.blocks.0.mlp.inputs.kernel"].names == tuple(
        f"layers.{layer}.mlp.c_fc.weight" for layer in range(1, 5)
    )
