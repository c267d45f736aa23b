"""Every kernel of attention against the dense product, value and gradient; what a row's layout rules out, by masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.blockwise import attend_in_blocks
from nnxdsl.models.attention.cudnn import attend_cudnn
from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, RowLayout
from nnxdsl.models.attention.splash import attend_splash
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel
from nnxdsl.models.pipeline import Stages

Lengths = Sequence[tuple[int, ...]]


def side_by_side(lengths: Lengths, row: RowLayout) -> TokenPositions:
    """Places of rows of such parts, by numpy: a first part ends at its last slot if others follow."""
    place = np.zeros((3, len(lengths), row.size), np.int32)
    for number, length in enumerate(lengths):
        start = 0
        for branch, (tokens, size) in enumerate(zip(length, row.parts, strict=True)):
            first = start + (size - tokens if branch == 0 and len(row.parts) > 1 else 0)
            slots = slice(first, first + tokens)
            place[0, number, slots] = np.arange(tokens) + (length[0] if branch else 0)
            place[1, number, slots] = 1
            place[2, number, start : start + size] = branch
            start += size
    return TokenPositions(*place)  # pyright: ignore[reportArgumentType] - masks are made of numpy's arrays as well


@st.composite
def laid_out(draw: Callable[..., Any], most: int = 9) -> tuple[RowLayout, Lengths]:
    parts = tuple(draw(st.lists(st.integers(1, most), min_size=1, max_size=1)))
    if draw(st.booleans()):
        parts += (draw(st.integers(1, most)),) * 2
    row = RowLayout(parts, sum(parts) + draw(st.sampled_from([0, 3])))
    lengths = [tuple(draw(st.integers(0 if index else 1, size)) for index, size in enumerate(parts)) for _ in range(2)]
    return row, lengths


CUDNN = 2e-2
"""The length of the difference of two results in bfloat16, of that of one: value and gradients."""

windows = st.one_of(st.none(), st.integers(1, 12))


@settings(max_examples=60, deadline=None)
@given(laid_out(), windows, st.integers(1, 6))
def test_a_row_never_rules_out_what_a_token_sees(
    inputs: tuple[RowLayout, Lengths], window: int | None, block: int
) -> None:
    row, lengths = inputs
    places = side_by_side(lengths, row)
    real = np.asarray(places.segment_ids) > 0
    seen = np.asarray(attention_mask(places, places, window)) & real[:, :, None] & real[:, None, :]
    assert not (seen & ~row.sees(window)).any()
    full = side_by_side([row.parts], row)  # nothing is padding: then it is what the tokens see, slot for slot
    used = sum(row.parts)
    assert np.array_equal(attention_mask(full, full, window)[0, :used, :used], row.sees(window)[:used, :used])
    # Blocks are the row, each with all that its queries see, in order.
    actual = row.blocks(window, block)
    assert [slot for one in actual for slot in range(*one.queries)] == list(range(row.size))
    for one in actual:
        keys = [slot for start, stop in one.keys for slot in range(start, stop)]
        assert keys == sorted(set(keys))
        assert set(np.flatnonzero(row.sees(window)[slice(*one.queries)].any(axis=0))) <= set(keys)
        assert 0 < one.queries[1] - one.queries[0] <= block


def test_of_a_packed_row_only_the_order_is_known() -> None:
    row = rows.packed(7)
    assert np.array_equal(row.sees(2), np.tril(np.ones((7, 7), bool)))
    # Two pairs of which the second's rejected answer looks back over its chosen one: farther than a window of slots.
    places = TokenPositions(
        jnp.asarray([[0, 1, 1, 0, 1, 1, 2]]), jnp.asarray([[1, 1, 1, 2, 2, 2, 2]]), jnp.asarray([[0, 1, 2, 0, 1, 2, 2]])
    )
    assert not (np.asarray(attention_mask(places, places, 2))[0] & ~row.sees(2)).any()
    with pytest.raises(ValueError, match="one part"):
        RowLayout((4, 3), 7, packed=True)
    with pytest.raises(ValueError, match="do not fit"):
        RowLayout((4, 4), 7)


def compared(
    kernel: Callable[..., jax.Array], row: RowLayout, lengths: Lengths, *, window: int | None, cap: float | None = None,
    heads: int = 4, kv_heads: int = 2, width: int = 8, seed: int = 0, dtype: Any = jnp.float32,
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """Values at real tokens, and gradients of a sum over them, of the dense product and of a kernel."""
    rng = np.random.default_rng(seed)
    places = side_by_side(lengths, row)
    shapes = ((len(lengths), row.size, n, width) for n in (heads, kv_heads, kv_heads, heads))
    query, key, value, toward = (jnp.asarray(rng.normal(size=shape) * 1.5, dtype) for shape in shapes)
    capped = {} if cap is None else {"soft_cap": cap}

    def both(
        query: jax.Array, key: jax.Array, value: jax.Array, toward: jax.Array, places: TokenPositions
    ) -> list[tuple[jax.Array, ...]]:
        real = (places.segment_ids > 0)[:, :, None, None]
        result = []
        for one in (
            lambda q, k, v: dot_product_attention(q, k, v, attention_mask(places, places, window), 0.4, cap),
            lambda q, k, v: kernel(q, k, v, places, row, window=window, scale=0.4, **capped),
        ):
            out, back = jax.vjp(one, query, key, value)
            result.append((jnp.where(real, out, 0), *back(jnp.where(real, toward, 0)), jnp.isfinite(out)))
        return result

    dense, other = jax.jit(both)(query, key, value, toward, places)
    assert bool(other[-1].all())
    return [np.asarray(x, np.float32) for x in dense[:-1]], [np.asarray(x, np.float32) for x in other[:-1]]


def close(result: tuple[list[np.ndarray], list[np.ndarray]]) -> None:
    dense, other = result
    np.testing.assert_allclose(other[0], dense[0], atol=1e-5, rtol=1e-5)
    for mine, wanted in zip(other[1:], dense[1:], strict=True):
        np.testing.assert_allclose(mine, wanted, atol=5e-5, rtol=5e-5)


@pytest.mark.gpu
@pytest.mark.extended
@settings(max_examples=4, deadline=None)
@given(laid_out(), windows, st.sampled_from([None, 2.0]), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.integers(1, 5))
def test_blocks_give_what_the_dense_product_gives(
    inputs: tuple[RowLayout, Lengths], window: int | None, cap: float | None, heads: tuple[int, int], queries: int
) -> None:
    kernel = partial(attend_in_blocks, queries=queries)
    close(compared(kernel, *inputs, window=window, cap=cap, heads=heads[0], kv_heads=heads[1]))


@pytest.mark.extended
@settings(max_examples=4, deadline=None)
@given(laid_out(), windows, st.sampled_from([(4, 4), (4, 2)]))
def test_two_rows_of_a_pair_give_what_its_one_row_gives(
    inputs: tuple[RowLayout, Lengths], window: int | None, heads: tuple[int, int]
) -> None:
    kernel = partial(attend_cudnn, implementation="xla")
    close(compared(kernel, *inputs, window=window, heads=heads[0], kv_heads=heads[1]))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(("row", "window", "cap"), [(rows.pair(50, 35), 20, 5.0), (rows.sequence(130), None, None)])
def test_splash_gives_what_the_dense_product_gives(row: RowLayout, window: int | None, cap: float | None) -> None:
    lengths = [tuple(size - less for size in row.parts) for less in (0, 7)]
    kernel = partial(attend_splash, interpret=True)
    close(compared(kernel, row, lengths, window=window, cap=cap, heads=2, kv_heads=1, width=16))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="runs on a GPU alone")
@pytest.mark.parametrize("row", [rows.pair(50, 35), rows.pair(512, 256), rows.sequence(130), rows.sequence(1024)])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_cudnn_gives_what_the_dense_product_gives(row: RowLayout, window: int | None, width: int) -> None:
    lengths = [tuple(size - less for size in row.parts) for less in (0, 7)]
    actual = compared(attend_cudnn, row, lengths, window=window, width=width, dtype=jnp.bfloat16)
    for dense, other in zip(*actual, strict=True):
        assert np.linalg.norm(other - dense) == pytest.approx(0, abs=CUDNN * float(np.linalg.norm(dense)))


@pytest.mark.gpu
def test_blocks_of_half_precision() -> None:
    kernel = partial(attend_in_blocks, queries=8)
    actual = compared(kernel, rows.pair(20, 10), [(20, 10, 7), (13, 4, 10)], window=None, dtype=jnp.bfloat16)
    for dense, other in zip(*actual, strict=True):
        np.testing.assert_allclose(other, dense, atol=0.05, rtol=0.03)


def test_rows_without_a_token_are_finite() -> None:
    for kernel in (partial(attend_in_blocks, queries=4), partial(attend_cudnn, implementation="xla")):
        _, other = compared(kernel, rows.pair(6, 4), [(0, 0, 0), (6, 4, 4)], window=3)
        assert all(np.isfinite(x).all() for x in other)


def test_what_a_kernel_cannot_compute_it_refuses(
    config: Any, template: AbstractModel, leaves: dict[str, jax.Array]
) -> None:
    x, places = jnp.zeros((1, 4, 1, 8)), positions_right_padded(jnp.asarray([4]), 4)
    for kernel in (attend_cudnn, attend_splash):
        with pytest.raises(ValueError, match="packed"):
            kernel(x, x, x, places, rows.packed(4), window=None, scale=1.0)
    model = template.merge(leaves)
    assert isinstance(model, Decoder)
    for row in (None, rows.sequence(5)):
        with pytest.raises(ValueError, match="chunked attention needs the layout of 4 slots"):
            model(jnp.zeros((1, 4), jnp.int32), places, dtype=jnp.float32, method=AttentionMethod("chunked", row))


@pytest.mark.slow
def test_a_decoder_in_stages_gives_what_it_gives_with_the_dense_product(
    template: AbstractModel, leaves: dict[str, jax.Array]
) -> None:
    row = rows.pair(9, 6).filled(24)
    places = side_by_side([(9, 6, 3), (4, 5, 6)], row)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 24)), jnp.int32)

    def run(
        leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions, method: AttentionMethod
    ) -> jax.Array:
        model = template.merge(leaves)
        assert isinstance(model, Decoder)
        stages = None if method.kernel == "dense" else Stages(2, 2, "stage")
        hidden, *_ = model(tokens, places, dtype=jnp.float32, remat="full", stages=stages, method=method)
        return jnp.mean(jnp.where(places.segment_ids[..., None] > 0, hidden**2, 0))

    def both(*inputs: Any) -> list[Any]:
        return [
            jax.value_and_grad(run)(*inputs, method) for method in (AttentionMethod(), AttentionMethod("chunked", row))
        ]

    dense, blocks = jax.jit(both)(leaves, tokens, places)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), blocks, dense)


@pytest.mark.extended
def test_a_decoder_gives_what_it_gives_with_the_dense_product(
    forward: Callable[..., jax.Array], template: AbstractModel, leaves: dict[str, jax.Array]
) -> None:
    row = rows.pair(9, 6).filled(24)
    places = side_by_side([(9, 6, 3), (4, 5, 6)], row)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 24)), jnp.int32)

    def run(leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        model = template.merge(leaves)
        assert isinstance(model, Decoder)
        return model(tokens, places, dtype=jnp.float32, remat="full", method=AttentionMethod("chunked", row))[0]

    real = np.asarray(places.segment_ids)[..., None] > 0
    actual, wanted = (jax.jit(one)(leaves, tokens, places) for one in (run, forward))
    np.testing.assert_allclose(np.where(real, actual, 0), np.where(real, wanted, 0), atol=2e-5)
