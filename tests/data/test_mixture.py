"""Mixtures: shares to two rows, every row of a source once an epoch, any place without those before it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxdsl.config.data import Order
from nnxdsl.data.mixture import BLOCK, MixedRows
from nnxdsl.data.sampler import ordered

SOURCES = st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 3000)), min_size=1, max_size=6)


def mixed(shares: list[int], rows: list[int], seed: int = 0, *, shuffled: bool = True) -> MixedRows:
    order = Order.Shuffled() if shuffled else Order.AsInFile()
    return MixedRows(shares, rows, seed, lambda n, epoch: ordered(order, n, seed, epoch), shuffled=shuffled)


@given(SOURCES, st.integers(0, 5), st.booleans())
def test_no_source_is_two_rows_from_its_share(sources: list[tuple[int, int]], seed: int, shuffled: bool) -> None:
    shares, rows = [list(values) for values in zip(*sources, strict=True)]
    mixture, places = mixed(shares, rows, seed, shuffled=shuffled), 3 * BLOCK
    drawn = mixture.source_of(mixture.at(np.arange(places)))
    for blocks in (1, 2, 3):
        counts = np.bincount(drawn[: blocks * BLOCK], minlength=len(rows))
        assert np.abs(counts - mixture.shares * blocks * BLOCK).max() < 2
    expected = mixture.shares * places / np.array(rows)
    assert mixture.epochs(places) == pytest.approx(expected.tolist())


@given(SOURCES, st.integers(0, 3 * BLOCK), st.integers(1, 50))
def test_any_place_is_the_same_without_those_before(sources: list[tuple[int, int]], place: int, size: int) -> None:
    shares, rows = [list(values) for values in zip(*sources, strict=True)]
    here = np.arange(place, place + size)
    whole = mixed(shares, rows).at(np.arange(place + size))
    assert mixed(shares, rows).at(here).tolist() == whole[place:].tolist()
    assert mixed(shares, rows).at(here[::-1]).tolist() == whole[place:][::-1].tolist()


def test_a_source_goes_through_its_epochs_whatever_the_others_do() -> None:
    mixture = mixed([3, 1], [500, 70])
    rows = mixture.at(np.arange(4 * BLOCK))
    for source, (first, count) in enumerate(((0, 500), (500, 70))):
        own = rows[mixture.source_of(rows) == source] - first
        for epoch in range(len(own) // count):
            seen = own[epoch * count : (epoch + 1) * count]
            assert seen.tolist() == ordered(Order.Shuffled(), count, 0, epoch).tolist()


def test_sources_are_spread_evenly_without_shuffling() -> None:
    mixture = mixed([3, 1], [9, 9], shuffled=False)
    assert mixture.source_of(mixture.at(np.arange(8))).tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert mixture.at(np.arange(8)).tolist() == [0, 1, 9, 2, 3, 4, 10, 5]


def test_another_seed_shuffles_otherwise() -> None:
    one, other = (mixed([1, 1], [5000, 5000], seed).at(np.arange(64)) for seed in (0, 1))
    assert one.tolist() != other.tolist()
