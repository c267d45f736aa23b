"""A cache changes no number, however many tokens come at once; local layers keep their window and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.models import params
from nnxdsl.models.attention.kv_cache import Cache, CacheUpdate, append, init_cache, ring_positions
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig

Leaves = Mapping[str, jax.Array]
Step = Callable[[Leaves, jax.Array, TokenPositions, Cache | None], tuple[jax.Array, Cache]]
SIZE, ROOM = 15, 17  # tokens of a row, and of the cache: two slots stay empty


@pytest.fixture(scope="module")
def step(config: DecoderConfig, template: params.AbstractModel) -> Step:
    @jax.jit
    def run(leaves: Leaves, tokens: jax.Array, places: TokenPositions, cache: Cache | None) -> tuple[jax.Array, Cache]:
        method = AttentionMethod("chunked", sequence(tokens.shape[1])) if cache is None else AttentionMethod()
        hidden, new, *_ = template.merge(leaves)(
            tokens, places, cache=cache, return_kv=True, dtype=jnp.float32, method=method
        )
        return hidden, append(init_cache(config, 3, ROOM, jnp.float32) if cache is None else cache, new)

    return run


@pytest.mark.extended
@pytest.mark.parametrize(
    "counts",
    [
        (8, 1, 1, 1, 1, 1, 1, 1),  # a prompt longer than the window of 4, then token by token
        (3, 1, 1, 1, 6, 1, 1, 1),  # a shorter one, and later more at once than the window has
    ],
)
def test_decoding_with_a_cache_equals_the_whole_forward(
    counts: Sequence[int], leaves: Leaves, forward: Callable[..., jax.Array], step: Step
) -> None:
    first = counts[0]
    lengths = jnp.array([first, 2, 1])
    tokens = jax.random.randint(jax.random.key(5), (3, SIZE), 0, 50, jnp.int32)
    places = positions_left_padded(lengths + SIZE - first, SIZE)
    whole = forward(leaves, tokens, places)
    cache: Cache | None = None
    pieces, start = [], 0
    for count in counts:
        part = slice(start, start + count)
        hidden, cache = step(leaves, tokens[:, part], TokenPositions(*(x[:, part] for x in places)), cache)
        pieces.append(hidden)
        start += count
    got = jnp.concatenate(pieces, axis=1)
    for b, n in enumerate(lengths.tolist()):
        np.testing.assert_allclose(got[b, first - n :], whole[b, first - n :], atol=2e-5, rtol=0)
    assert cache is not None
    assert int(cache.length) == SIZE
    assert cache.positions.segment_ids[:, -2:].tolist() == [[0, 0]] * 3
    ring = ring_positions(cache, 4)  # numbers 12, 13, 14 and 11
    np.testing.assert_array_equal(ring.positions, places.positions[:, [12, 13, 14, 11]])


def test_an_empty_ring_is_padding(config: DecoderConfig) -> None:
    cache = init_cache(config, 1, ROOM, jnp.float32)
    assert ring_positions(cache, 4).segment_ids.tolist() == [[0, 0, 0, 0]]
    three = cache._replace(length=jnp.int32(3), positions=TokenPositions(*(jnp.ones((1, ROOM), jnp.int32),) * 3))
    assert ring_positions(three, 4).segment_ids.tolist() == [[1, 1, 1, 0]]


def test_local_layers_hold_their_window_alone(config: DecoderConfig) -> None:
    rows, kv, head = 3, config.num_kv_heads, config.head_dim

    def size(length: int) -> int:
        cache = jax.eval_shape(lambda: init_cache(config, rows, length, jnp.bfloat16))
        return sum(leaf.size * 2 for leaf in jax.tree.leaves(cache.layers))

    # Two periods of two local layers and a global one, and a local layer after them; keys and values.
    assert size(1000) == 2 * 2 * rows * kv * head * (5 * 4 + 2 * 1000)
    assert size(3) == 2 * 2 * rows * kv * head * 7 * 3


def test_more_tokens_than_slots(config: DecoderConfig) -> None:
    eight, four = (init_cache(config, 3, length, jnp.float32) for length in (8, 4))
    with pytest.raises(ValueError, match="8 tokens do not fit a cache of 4 slots"):
        append(four, CacheUpdate(eight.layers, eight.positions))
