"""Rows of every layout through a recurrent mixer, for comparison with rows of one sequence each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl.models import params
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, RowLayout
from nnxdsl.models.attention.view import View
from nnxdsl.models.recurrent.rows import RecurrentState

FIGURES = Path(__file__).parent.parent / "reference/mixers"
EMBED = 20
"""Width of the stored layers' tokens."""
Leaves = dict[str, jax.Array]


def view(places: TokenPositions, row: RowLayout | None) -> View:
    none = jnp.zeros((*places.positions.shape, 1))
    return View(AttentionMethod(row=row), places, None, (none, none))


class Layer(NamedTuple):
    """A mixer with its stored weights and figures."""

    config: Any
    template: params.AbstractModel
    leaves: Leaves
    figures: dict[str, np.ndarray]
    tolerance: float = 1e-6
    """Of the largest output, between rows of different layouts."""

    def __call__(
        self,
        leaves: Leaves,
        x: jax.Array,
        places: TokenPositions,
        row: RowLayout | None,
        past: RecurrentState | None = None,
    ) -> tuple[jax.Array, RecurrentState]:
        model: Any = self.template.merge(leaves)
        return model(x, view(places, row), past)


def relative(got: Any, wanted: Any, tolerance: float, least: float = 0.0) -> None:
    """The largest difference against the largest figure, or against one that is as large as figures are elsewhere."""
    scale = max(np.abs(wanted).max(), least)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(wanted) / scale, atol=tolerance, rtol=0)


def leaves_of(weights: dict[str, str], figures: dict[str, np.ndarray], prefix: str) -> Leaves:
    """Tensors of the Hub, by our paths, as our leaves: linear weights the other way round, all others as they are."""
    result = {path: figures[prefix + name] for path, name in weights.items()}
    return {path: jnp.asarray(value.T if value.ndim == 2 else value) for path, value in result.items()}


def check_reference(layer: Layer, weights: dict[str, str], *, out: float, memory: float, to_x: float) -> None:
    """Outputs, memory and gradients of the stored figures, and outputs of rows with padding before them.

    Args:
        layer: with its figures.
        weights: the Hub's name of each tensor, by path.
        out: tolerance of outputs, as those below relative to the largest.
        memory: of the memory.
        to_x: of gradients of the inputs.
    """
    x, c, lengths = (jnp.asarray(layer.figures[key]) for key in ("x", "c", "lengths"))
    rows_, length = x.shape[:2]
    whole, short = positions_right_padded(jnp.full((rows_,), length), length), positions_left_padded(lengths, length)

    @jax.jit
    def run(leaves: Leaves, x: jax.Array) -> tuple[Any, ...]:
        def total(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, RecurrentState]]:
            out, state = layer(leaves, x, whole, rows.sequence(length))
            return jnp.sum(out * c), (out, state)

        (_, (out, state)), to = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(leaves, x)
        return out, state.memory, *to, layer(leaves, x, short, None)[0]

    got, got_memory, to_weights, got_to_x, padded = run(layer.leaves, x)
    relative(got, layer.figures["out"], out)
    relative(got_memory, layer.figures["memory"], memory)
    relative(got_to_x, layer.figures["to_x"], to_x)
    for path, wanted in leaves_of(weights, layer.figures, "to.").items():
        relative(to_weights[path], wanted, 2e-5)  # sums over all tokens, some of which cancel
    real = np.asarray(short.segment_ids)[..., None] > 0
    assert not real.all()
    relative(np.where(real, padded, 0), layer.figures["padded"], out)
    assert np.isfinite(np.asarray(padded)).all()


Lengths = Sequence[tuple[int, int, int]]


class Laid(NamedTuple):
    """Slots of rows, and where each stands in a table of rows that hold one sequence each.

    Attributes:
        places: of the rows `[B, T]`.
        source: `[N, L]`, the slot (of all B T) that each slot of the table is filled from; 0 where `length` is over.
        length: `[N]` of the table's rows.
        place: `[B, T]`, where a slot's output stands in the table (of all N L).
        real: `[B, T]` bool.
    """

    places: TokenPositions
    source: np.ndarray
    length: np.ndarray
    place: np.ndarray
    real: np.ndarray


def laid_out(of_rows: Sequence[Lengths], size: int, most: int, *, pair: tuple[int, int] | None = None) -> Laid:
    """Pairs of (prompt, chosen, rejected) tokens one after another in each row, or one pair in parts of known slots."""
    places = np.zeros((3, len(of_rows), size), np.int32)
    source, length = np.zeros((most, size), np.int32), np.zeros(most, np.int32)
    index = np.zeros((len(of_rows), size), np.int32)
    number = 0
    for row, pairs in enumerate(of_rows):
        start = 0
        for segment, lengths in enumerate(pairs, 1):
            prompt: list[int] = []
            for branch, tokens in enumerate(lengths):
                first = start
                if pair is not None:
                    first = (pair[0] - tokens, pair[0], sum(pair))[branch]
                slots = list(range(first, first + tokens))
                start += tokens
                places[0, row, slots] = np.arange(tokens) + (lengths[0] if branch else 0)
                places[1, row, slots] = segment
                places[2, row, slots] = branch
                if branch == 0:
                    prompt = slots
                if branch or sum(lengths[1:]) == 0:
                    path = prompt + slots if branch else slots
                    source[number, : len(path)] = np.array(path, int) + row * size
                    length[number] = len(path)
                    index[row, path] = np.arange(len(path)) + number * size
                    number += 1
    return Laid(TokenPositions(*map(jnp.asarray, places)), source, length, index, places[1] > 0)


GRADIENTS = [False, pytest.param(True, marks=pytest.mark.slow)]  # which take several times as long to compile


def compared(layer: Layer, row: RowLayout | None, size: int, most: int, gradients: bool) -> Callable[[Laid, int], None]:
    """Compares a row's output, and gradients with respect to everything, with those of a row for each sequence."""

    @jax.jit
    def both(leaves: Leaves, x: jax.Array, c: jax.Array, laid: Laid) -> Any:
        def joined(leaves: Leaves, x: jax.Array) -> jax.Array:
            return layer(leaves, x, laid.places, row)[0]

        def apart(leaves: Leaves, x: jax.Array) -> jax.Array:
            table = x.reshape(-1, x.shape[-1])[laid.source]  # [N, L, D]
            out = layer(leaves, table, positions_right_padded(laid.length, size), rows.sequence(size))[0]
            return out.reshape(-1, x.shape[-1])[laid.place]

        result = []
        for run in (joined, apart):
            out, back = jax.vjp(run, leaves, x)
            to = back(c * laid.real[..., None]) if gradients else None
            result.append((jnp.where(laid.real[..., None], out, 0), to, jnp.isfinite(out)))
        return result

    def check(laid: Laid, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, c = (jnp.asarray(rng.normal(size=(*laid.real.shape, EMBED)), jnp.float32) for _ in range(2))
        (out, to, finite), (wanted, wanted_to, _) = both(layer.leaves, x, c, laid)
        assert bool(finite.all())
        relative(out, wanted, layer.tolerance)
        if not gradients:
            return
        relative(to[1], wanted_to[1], 1e-5)
        # Sums over all tokens, some of which cancel.
        jax.tree.map(lambda got, wanted: relative(got, wanted, 5e-5, 1.0), to[0], wanted_to[0])
        assert not np.asarray(to[1])[~laid.real].any()  # what stands in the padding is never read

    return check


SLOTS = 40
sequences = st.tuples(st.integers(1, 18), st.integers(0, 18), st.integers(0, 18))
packed_rows = st.lists(sequences, min_size=1, max_size=4).map(
    lambda pairs: [pair for number, pair in enumerate(pairs) if sum(map(sum, pairs[: number + 1])) <= SLOTS]
)


def check_pairs(layer: Layer, gradients: bool) -> None:
    """The prompt of a pair is computed once."""
    prompt, response = 18, 17
    row = rows.pair(prompt, response)
    check = compared(layer, row.filled(row.size + 3), row.size + 3, 4, gradients)
    for number, of_rows in enumerate(
        ([[(18, 17, 17)], [(1, 16, 2)]], [[(17, 0, 17)], [(2, 1, 0)]], [[(9, 5, 16)], [(16, 3, 15)]])
    ):
        check(laid_out(of_rows, row.size + 3, 4, pair=(prompt, response)), number)


def check_packed_rows(layer: Layer, gradients: bool) -> None:
    """Branches that begin in a later chunk than their prompt ended, in the same one, at its end; padding at the end."""
    check = compared(layer, rows.packed(SLOTS), SLOTS, 16, gradients)
    check(laid_out([[(5, 16, 18)], [(16, 3, 5), (3, 2, 1), (1, 1, 1), (3, 0, 0), (2, 2, 0)]], SLOTS, 16), 0)
    check(laid_out([[(2, 1, 2), (1, 31, 3)], [(12, 4, 16), (8, 0, 0)]], SLOTS, 16), 1)

    @settings(max_examples=8, deadline=None)
    @given(st.tuples(packed_rows, packed_rows), st.integers(0, 9))
    def law(of_rows: Sequence[Lengths], seed: int) -> None:
        check(laid_out(of_rows, SLOTS, 16), seed)

    law()


def check_unknown_rows(layer: Layer) -> None:
    """Rows of which nothing is known."""
    check = compared(layer, None, 34, 4, True)
    check(laid_out([[(9, 6, 11)], [(10, 12, 12)]], 34, 4), 0)
    check(laid_out([[(5, 6, 7)], [(12, 1, 10)]], 34, 4, pair=(12, 11)), 1)  # with padding before and between


def check_decoding(layer: Layer) -> None:
    """Prompts padded on their left, then one token of each row at a time, then several, then a row that has ended."""
    x, lengths = jnp.asarray(layer.figures["x"][:, :12]), jnp.asarray([7, 2])

    def one(number: jax.Array) -> TokenPositions:
        return TokenPositions(*(jnp.full((2, 1), value, jnp.int32) for value in (number, 1, 0)))

    several = TokenPositions(*(jnp.concatenate(part, axis=1) for part in zip(one(10), one(11), strict=True)))
    ended = several._replace(segment_ids=several.segment_ids.at[1].set(0))

    @jax.jit
    def begin(leaves: Leaves, x: jax.Array) -> tuple[jax.Array, RecurrentState]:
        out, state = layer(leaves, x[:, :7], positions_left_padded(lengths, 7), None)
        outs = [out]
        for number in range(7, 10):
            out, state = layer(leaves, x[:, number : number + 1], one(number), None, state)
            outs.append(out)
        return jnp.concatenate(outs, axis=1), state

    @jax.jit
    def go_on(leaves: Leaves, x: jax.Array, state: RecurrentState) -> tuple[Any, ...]:
        out, after = layer(leaves, x[:, 10:], several, None, state)
        _, stayed = layer(leaves, x[:, 10:], ended, None, state)
        _, still = layer(leaves, x[:, 11:], TokenPositions(*(part[:, :1] for part in ended)), None, state)
        whole, wanted = layer(leaves, x, positions_left_padded(lengths + 5, 12), rows.packed(12))
        return out, after, stayed, still, whole, wanted

    first, state = begin(layer.leaves, x)
    out, after, stayed, still, whole, wanted = go_on(layer.leaves, x, state)
    out = jnp.concatenate([first, out], axis=1)
    real = np.asarray(positions_left_padded(lengths + 5, 12).segment_ids)[..., None] > 0
    relative(np.where(real, out, 0), np.where(real, whole, 0), layer.tolerance)
    relative(after.conv_state, wanted.conv_state, 1e-6)
    relative(after.memory, wanted.memory, 1e-6)
    for other in (stayed, still):
        for mine, before in zip(other, state, strict=True):
            np.testing.assert_array_equal(mine[1], before[1])
