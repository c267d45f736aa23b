"""Masks against their sentence, token by token, and attention against numpy in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded


def test_masks_say_what_their_sentence_says() -> None:
    rng = np.random.default_rng(0)
    queries = TokenPositions(rng.integers(0, 9, (3, 7)), rng.integers(0, 3, (3, 7)), rng.integers(0, 3, (3, 7)))
    keys = TokenPositions(rng.integers(0, 9, (3, 11)), rng.integers(0, 3, (3, 11)), rng.integers(0, 3, (3, 11)))
    those = TokenPositions(*map(jnp.asarray, queries)), TokenPositions(*map(jnp.asarray, keys))
    local, everything = attention_mask(*those, window=3), attention_mask(*those)
    seen = 0
    for b, i, j in np.ndindex(3, 7, 11):
        wanted = (
            queries.segment_ids[b, i] == keys.segment_ids[b, j]
            and keys.branch_ids[b, j] in (0, queries.branch_ids[b, i])
            and keys.positions[b, j] <= queries.positions[b, i]
        )
        assert everything[b, i, j] == wanted
        assert local[b, i, j] == (wanted and queries.positions[b, i] - keys.positions[b, j] < 3)
        seen += wanted
    assert seen > 10


def test_window_counts_the_token_itself() -> None:
    places = positions_right_padded(jnp.array([6]), 6)
    assert np.flatnonzero(attention_mask(places, places, window=3)[0, 5]).tolist() == [3, 4, 5]


def test_padding_on_either_side() -> None:
    right, left = positions_right_padded(jnp.array([2, 4]), 4), positions_left_padded(jnp.array([2, 4]), 4)
    assert right.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert right.segment_ids.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert left.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert left.segment_ids.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    for places in (right, left):
        assert bool(attention_mask(places, places).any(-1).all())  # no row sees nothing


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_attend_equals_repeated_keys_in_float64(heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng(1)
    query, key, value = (rng.normal(size=(2, n, h, 8)) for n, h in ((5, heads), (6, kv_heads), (6, kv_heads)))
    seen = rng.random((2, 5, 6)) < 0.6
    seen[:, :, 0] = True
    repeated = [np.repeat(x, heads // kv_heads, axis=2) for x in (key, value)]
    scores = np.einsum("btnh,bsnh->bnts", query, repeated[0]) * 0.3
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), repeated[1])
    got = dot_product_attention(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)), jnp.asarray(seen), 0.3)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_a_row_that_sees_nothing_is_finite() -> None:
    x = jnp.ones((1, 2, 1, 4), jnp.float32) * 1e4
    assert bool(jnp.isfinite(dot_product_attention(x, -x, x, jnp.zeros((1, 2, 2), bool), 1.0)).all())
