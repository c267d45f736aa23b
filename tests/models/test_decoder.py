"""The decoder's own laws: paths and axes, padding, packing, shared prefixes, the cache, rematerialisation, depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.models import params
from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.layers.embedding import Embedding

Leaves = Mapping[str, jax.Array]
TOLERANCE = 1e-5  # hidden states have size 1


def close(got: jax.Array, wanted: jax.Array) -> None:
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=0)


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, 50, jnp.int32)


def test_paths_shapes_and_axes(template: params.AbstractModel) -> None:
    block = {
        "attention.key.kernel": ((32, 16), ("embed", "kv_heads")),
        "attention.key_norm.scale": ((8,), ("head_dim",)),
        "attention.output.kernel": ((32, 32), ("heads", "embed")),
        "attention.query.kernel": ((32, 32), ("embed", "heads")),
        "attention.query_norm.scale": ((8,), ("head_dim",)),
        "attention.value.kernel": ((32, 16), ("embed", "kv_heads")),
        "mlp.down.kernel": ((64, 32), ("mlp", "embed")),
        "mlp.gate.kernel": ((32, 64), ("embed", "mlp")),
        "mlp.up.kernel": ((32, 64), ("embed", "mlp")),
        "post_attention_norm.scale": ((32,), ("norm",)),
        "post_mlp_norm.scale": ((32,), ("norm",)),
        "pre_attention_norm.scale": ((32,), ("norm",)),
        "pre_mlp_norm.scale": ((32,), ("norm",)),
    }
    wanted = {"embed.embedding": ((50, 32), ("vocab", "embed")), "norm.scale": ((32,), ("norm",))}
    for name, (shape, axes) in block.items():
        wanted |= {f"layers.blocks.{i}.{name}": ((2, *shape), ("layers", *axes)) for i in range(3)}
        wanted[f"tail.blocks.0.{name}"] = (shape, axes)
    assert {path: (leaf.shape, leaf.axes) for path, leaf in template.variables.items()} == wanted
    assert {(leaf.dtype, leaf.kind) for leaf in template.variables.values()} == {(np.dtype("float32"), nnx.Param)}


def test_flatten_and_merge_are_inverse(config: DecoderConfig, template: params.AbstractModel) -> None:
    leaves = jax.jit(lambda: params.flatten(Decoder(config, rngs=nnx.Rngs(3))))()
    again = params.flatten(template.merge(leaves))
    assert list(again) == list(template.variables)
    assert all(again[path] is leaf or bool((again[path] == leaf).all()) for path, leaf in leaves.items())
    stack = leaves["layers.blocks.1.mlp.up.kernel"]
    assert not bool((stack[0] == stack[1]).any())  # each period draws its own
    with pytest.raises(KeyError, match=r"missing \['norm.scale'\], unknown \['norm.weight'\]"):
        template.merge({**{p: x for p, x in leaves.items() if p != "norm.scale"}, "norm.weight": stack})


def test_padding_changes_nothing(leaves: Leaves, forward: Callable[..., jax.Array]) -> None:
    tokens, lengths = draw(0, 3, 12), jnp.array([12, 7, 1])
    hidden = forward(leaves, tokens, positions_right_padded(lengths, 12))
    assert bool(jnp.isfinite(hidden).all())  # pads too: a NaN there would reach real tokens through 0 * NaN
    slot = jnp.arange(12)[None]
    other = jnp.where(slot < lengths[:, None], tokens, draw(1, 3, 12))
    # Real tokens do not see the padding at all, so this is exact.
    same = forward(leaves, other, positions_right_padded(lengths, 12))
    assert all(bool((same[b, :n] == hidden[b, :n]).all()) for b, n in enumerate([12, 7, 1]))
    shifted = jnp.stack([jnp.roll(row, 12 - n) for row, n in zip(tokens, [12, 7, 1], strict=True)])
    left = forward(leaves, shifted, positions_left_padded(lengths, 12))
    for b, n in enumerate([12, 7, 1]):
        close(left[b, 12 - n :], hidden[b, :n])


@pytest.mark.extended
def test_segments_of_a_packed_row_do_not_see_each_other(leaves: Leaves, forward: Callable[..., jax.Array]) -> None:
    tokens = draw(2, 2, 12)
    apart = forward(leaves, tokens, positions_right_padded(jnp.array([7, 5]), 12))
    row = jnp.concatenate([tokens[0, :7], tokens[1, :5]])[None]
    position = jnp.concatenate([jnp.arange(7), jnp.arange(5)])[None]
    segment = jnp.array([[1] * 7 + [2] * 5])
    packed = forward(leaves, row, TokenPositions(position, segment, jnp.zeros_like(segment)))
    close(packed[0, :7], apart[0, :7])
    close(packed[0, 7:], apart[1, :5])


def test_shared_prefix_equals_two_rows(leaves: Leaves, forward: Callable[..., jax.Array]) -> None:
    prompt_size, size = 9, 7
    prompt_length, lengths = np.array([9, 4, 1]), np.array([[7, 3], [5, 7], [1, 6]])  # rows x (chosen, rejected)
    prompt, completions = draw(3, 3, prompt_size), draw(4, 3, 2, size)
    before = positions_left_padded(jnp.asarray(prompt_length), prompt_size)
    slot = jnp.arange(size)[None]

    def continuation(side: int, branch: int) -> TokenPositions:
        position = prompt_length[:, None] + slot
        segment = (slot < lengths[:, side, None]).astype(jnp.int32)
        return TokenPositions(position, segment, jnp.full_like(segment, branch))

    def joined(*parts: TokenPositions) -> TokenPositions:
        return TokenPositions(*(jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True)))

    packed = forward(
        leaves,
        jnp.concatenate([prompt, completions[:, 0], completions[:, 1]], axis=1),
        joined(before, continuation(0, 1), continuation(1, 2)),
    )
    for side in (0, 1):
        # The ordinary row, made without Places of branches: the sequence from slot 0 on.
        rows = jnp.stack(
            [
                jnp.pad(jnp.concatenate([prompt[b, prompt_size - n :], completions[b, side]]), (0, prompt_size - n))
                for b, n in enumerate(prompt_length)
            ]
        )
        apart = forward(
            leaves, rows, positions_right_padded(jnp.asarray(prompt_length + lengths[:, side]), prompt_size + size)
        )
        for b, n in enumerate(prompt_length):
            m, start = lengths[b, side], prompt_size + side * size
            close(packed[b, prompt_size - n : prompt_size], apart[b, :n])
            close(packed[b, start : start + m], apart[b, n : n + m])


@pytest.mark.parametrize(
    "policies", [("products", "full"), pytest.param(("attention", "inputs", "offload"), marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_remat_changes_no_gradient(template: params.AbstractModel, leaves: Leaves, policies: tuple[str, ...]) -> None:
    tokens, places = draw(6, 2, 8), positions_right_padded(jnp.array([8, 5]), 8)

    def loss(leaves: Leaves, remat: str) -> jax.Array:
        hidden, *_ = template.merge(leaves)(tokens, places, dtype=jnp.float32, remat=remat)
        return jnp.sum(jnp.sin(hidden))

    plain, *others = (jax.jit(jax.grad(loss), static_argnums=1)(leaves, remat) for remat in ("none", *policies))
    for path, gradient in plain.items():
        largest = float(jnp.abs(gradient).max())
        assert largest > 0, path
        for remat, other in zip(policies, others, strict=True):
            np.testing.assert_allclose(other[path], gradient, atol=1e-5 * largest, rtol=0, err_msg=f"{remat} {path}")
    primitives = str(jax.make_jaxpr(lambda leaves: loss(leaves, "full"))(leaves))
    assert "checkpoint" in primitives or "remat" in primitives
    with pytest.raises(ValueError, match=r"remat: expected one of .none., .*, got .all."):
        template.merge(leaves)(tokens, places, dtype=jnp.float32, remat="all")


def test_program_does_not_grow_with_depth(config: DecoderConfig) -> None:
    def lines(layers: int) -> int:
        deep = config.with_fields({"layers.num_layers": layers})
        template = abstract_decoder(deep)
        values = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in template.variables.items()}

        def run(values: Leaves) -> jax.Array:
            return template.merge(values)(
                jnp.zeros((1, 4), jnp.int32), positions_right_padded(jnp.array([4]), 4), dtype=jnp.float32
            )[0]

        return len(str(jax.make_jaxpr(run)(values)).splitlines())

    assert lines(33) == lines(6)


@pytest.mark.slow
def test_fewer_layers_than_a_period_are_all_tail(config: DecoderConfig) -> None:
    short = config.with_fields({"layers.num_layers": 2})
    decoder = Decoder(short, rngs=nnx.Rngs(0))
    assert decoder.layers is None
    places = positions_right_padded(jnp.array([3]), 3)
    whole, *_ = decoder(draw(7, 1, 3), places, dtype=jnp.float32)
    cached, new, *_ = decoder(
        draw(7, 1, 3), places, cache=init_cache(short, 1, 3, jnp.float32), return_kv=True, dtype=jnp.float32
    )
    close(cached, whole)
    assert new is not None
    assert new.layers is None


@pytest.mark.extended
def test_low_precision_keeps_its_dtype(
    template: params.AbstractModel, leaves: Leaves, forward: Callable[..., jax.Array]
) -> None:
    tokens, places = draw(8, 2, 8), positions_right_padded(jnp.array([8, 5]), 8)
    low = jax.jit(lambda leaves: template.merge(leaves)(tokens, places, dtype=jnp.bfloat16)[0])(leaves)
    assert low.dtype == jnp.bfloat16
    high = forward(leaves, tokens, places)
    assert float(jnp.abs(low[0] - high[0]).mean()) == pytest.approx(
        0, abs=0.05
    )  # a few steps of 2**-8 over seven layers


def test_embedding_factor_is_rounded_as_gemma_does() -> None:
    embed = Embedding(2, 3072, factor=3072**0.5, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    embed.embedding[...] = jnp.ones((2, 3072))
    assert float(embed(jnp.array([[1]]), jnp.bfloat16)[0, 0, 0]) == 55.5
    assert float(embed(jnp.array([[1]]), jnp.float32)[0, 0, 0]) == pytest.approx(3072**0.5, rel=1e-7)
    assert bool(jnp.isnan(embed(jnp.array([[2]]), jnp.float32)).all())
