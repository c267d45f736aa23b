"""A stack in stages computes what the stack computes, and so does its gradient."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.formats import hf
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.families.nemotron_h import NEMOTRON_H
from nnxdsl.models.params import abstract, flatten
from nnxdsl.models.pipeline import Stages, idle_share, run_stages

REFERENCE = Path(__file__).parent.parent / "reference"


def affine(weights: jax.Array, x: jax.Array, context: jax.Array) -> jax.Array:
    """A stack of `x * w + c`, one for each weight."""
    return jax.lax.scan(lambda x, w: (x * w + context[:, None, None], None), x, weights)[0]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (2, 1), (2, 4), (3, 2), (6, 8)])
def test_stages_are_the_stack(stages: int, parts: int) -> None:
    draw = np.random.default_rng(stages * 10 + parts)
    weights, x, context = (draw.standard_normal(shape).astype(np.float32) for shape in ((6,), (8, 3, 2), (8,)))
    cut = Stages(stages, parts, "stage")

    def staged(weights: jax.Array, x: jax.Array) -> jax.Array:
        return run_stages(affine, weights, x, context, cut)

    def total(run: object, *arguments: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *inputs: jnp.sum(jnp.sin(run(*inputs))), argnums=(0, 1))(*arguments)  # type: ignore[operator]

    np.testing.assert_allclose(staged(weights, x), affine(weights, x, context), rtol=1e-6, atol=1e-6)
    whole = total(lambda weights, x: affine(weights, x, context), weights, x)
    for mine, expected in zip(total(staged, weights, x), whole, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=2e-6, atol=2e-6)


# Two periods with a selection each, which the layers before them and the last one have for themselves.
SHARED_INDEX = hf.read_config(REFERENCE / "families" / "glm_moe_dsa_shared").with_fields(
    {
        "layers.num_layers": 7,
        "vocab_size": 300,
        **dict.fromkeys(("layers.lead_pattern", "layers.pattern"), ("global", "shared_index")),
    }
)
# Two periods, and a last layer that no stage has.
NEMOTRON = NEMOTRON_H["tiny"].with_fields(
    {
        "layers.num_layers": 7,
        "layers.pattern": ("linear", "nope", "none"),
        "layers.tail_pattern": ("none",),
    }
)


def test_time_that_a_pipeline_waits() -> None:
    assert idle_share(1, 3) == 0
    assert idle_share(4, 1) == 0.75
    assert idle_share(4, 12) == pytest.approx(3 / 15)


@pytest.mark.extended
@pytest.mark.parametrize(
    "config",
    [
        LLAMA3["tiny"],
        LLAMA3["tiny"].with_fields({"layers.num_layers": 4, "layers.pattern": ("nope", "global")}),
        pytest.param(GEMMA3["tiny"], marks=pytest.mark.slow),
        pytest.param(NEMOTRON, marks=pytest.mark.slow),
        pytest.param(SHARED_INDEX, marks=pytest.mark.slow),
    ],
    ids=[
        *("a stack of layers", "layers without positions", "one period, so one stage", "layers of one sub-block"),
        "layers that share a selection",
    ],
)
def test_a_decoder_in_stages(config: DecoderConfig) -> None:
    stages = config.layers.periods
    build = lambda: Decoder(config, rngs=nnx.Rngs(0))  # noqa: E731
    leaves, template = flatten(build()), abstract(build)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 300, (4, 6)), jnp.int32)
    places = positions_right_padded(jnp.asarray([6, 4, 1, 5], jnp.int32), 6)

    @jax.jit
    def loss(leaves: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        model = template.merge(leaves)
        assert isinstance(model, Decoder)
        sums = []
        for cut in (None, Stages(stages, 2, "stage")):
            hidden, *_ = model(tokens, places, dtype=jnp.float32, stages=cut)
            sums.append(jnp.sum(jnp.sin(hidden) * (places.segment_ids == 1)[..., None]))
        return sums[0], sums[1]

    plain, staged = loss(leaves)
    assert float(staged) == pytest.approx(float(plain), rel=1e-5)
    gradients = [jax.jit(jax.grad(lambda leaves, side=side: loss(leaves)[side]))(leaves) for side in (0, 1)]
    for path, expected in gradients[0].items():
        scale = float(jnp.max(jnp.abs(expected))) + 1e-6
        np.testing.assert_allclose(gradients[1][path], expected, rtol=0, atol=1e-5 * scale, err_msg=path)
