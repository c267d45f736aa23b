"""Orders and duplicates of many rows, computed piece by piece, equal those computed at once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from nnxdsl import DataError, Order
from nnxdsl.data import permutation, ragged, row_order, sampler
from nnxdsl.data.loaders import tally as tally_module
from nnxdsl.data.loaders.tally import Tally
from nnxdsl.data.ragged import Ragged
from nnxdsl.data.row_order import is_permutation, sorted_pieces
from nnxdsl.data.sampler import ordered


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (row_order, sampler, tally_module):
        monkeypatch.setattr(module, "PIECE", 100)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_those_of_one_stable_sort() -> None:
    values = np.random.default_rng(0).integers(0, 2**64, 1_000, dtype=np.uint64)
    values[::7] = values[0]
    values[5], values[6] = 0, 2**64 - 1
    pieces = list(sorted_pieces(lambda: np.array_split(values, 13), len(values)))
    rows = np.concatenate([rows for rows, _ in pieces])
    assert rows.tolist() == np.argsort(values, kind="stable").tolist()
    assert np.concatenate([ours for _, ours in pieces]).tolist() == values[rows].tolist()
    assert len(pieces) == 10
    assert max(len(rows) for rows, _ in pieces) < 300


@pytest.mark.parametrize("order", [Order.Shuffled(), Order.AsInFile()])
def test_a_mapped_order_is_the_one_in_memory(
    order: Order, small_pieces: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mapped = permutation(order, 1_234, 3, 1)
    assert isinstance(mapped.base, np.memmap)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"the order of 1,234 rows cannot be written to .*none.*TMPDIR"):
        permutation(order, 1_234, 3, 1)
    monkeypatch.undo()
    at_once = permutation(order, 1_234, 3, 1)
    assert not isinstance(at_once.base, np.memmap)
    assert mapped.tolist() == at_once.tolist()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("wrong", [-1, 0, 1_000])
def test_an_order_has_each_row_once(wrong: int) -> None:
    order = ordered(Order.Shuffled(), 1_000, 0, 0).copy()
    assert is_permutation(order)
    order[int(np.flatnonzero(order == 700)[0])] = wrong
    assert not is_permutation(order)


@pytest.mark.usefixtures("small_pieces")
def test_duplicates_are_found_across_pieces() -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 1_000, dtype=np.uint64)
    hashes[[950, 400, 777]] = hashes[3], hashes[3], hashes[500]
    tally = Tally([600, 1_000], rows=1_000)
    tally.find_duplicates(hashes, np.arange(1_000) + 1)
    assert tally.odd == {"duplicate": 3}
    assert tally.first == {"duplicate": (0, 401)}


def test_rows_are_found_from_few_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "STRIDE", 8)
    draw = np.random.default_rng(2)
    rows = [draw.integers(0, 2, draw.integers(0, 5)).astype(np.int32) for _ in range(67)]
    built = Ragged(np.concatenate(rows), np.array([len(row) for row in rows], np.int32))
    assert [built[row].tolist() for row in range(67)] == [row.tolist() for row in rows]
    assert built[-1].tolist() == rows[-1].tolist()
    assert built.sums().tolist() == [int(row.sum()) for row in rows]
    with pytest.raises(IndexError):
        built[67]
    assert len(Ragged(np.zeros(0, np.int32), np.zeros(0, np.int32))) == 0
