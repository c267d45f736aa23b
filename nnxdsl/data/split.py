"""Train/test split by a hash of each row, so that a row stays on its side when others are added."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from nnxdsl.data.dataset import Dataset
from nnxdsl.errors import DataError


def train_test_split(dataset: Dataset, test_size: float) -> tuple[Dataset, Dataset]:
    """The rows to train on, and those that are held out.

    A row is held out if the hash of its prompt, or of all its ids where it has none, is among the lowest share of all
    hashes: it stays where it is when rows are added, removed or moved, and equal prompts are on one side. The share of
    rows is therefore met on average, not exactly.

    Args:
        dataset: All rows.
        test_size: The share, between 0 and 1.

    Raises:
        DataError: All rows are on one side.
    """
    part = dataset._parts["prompt" if "prompt" in dataset._parts else "tokens"]
    positions = (_position(part[row]) for row in range(len(dataset)))
    is_held_out = np.fromiter(positions, np.float64, len(dataset)) < test_size
    train, test = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    if not len(train) or not len(test):
        raise DataError(
            f"{dataset.report.source}: test_size={test_size:g} holds out {len(test):,} of {len(dataset):,} rows, of "
            f"which those with equal prompts stay together; set another, or give evaluation.data"
        )
    return dataset.select(train), dataset.select(test)


def _position(ids: npt.NDArray[np.int32]) -> float:
    """A number from 0 to 1 that a row's ids decide."""
    digest = hashlib.sha256(b"nnxdsl split 1" + ids.astype("<i4").tobytes()).digest()
    return int.from_bytes(digest[:6], "little") / 2**48
