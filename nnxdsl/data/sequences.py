"""Tokenized sequences with loss masks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import PackedSequences, SequenceBatch
from nnxdsl.data.dataset import Dataset, Int32, fill_rows, round_length
from nnxdsl.data.packing import Layout, Size


class Sequences(Dataset):
    """Conversations or texts; `shapes` has "length"."""

    teacher: tuple[Int32, npt.NDArray[np.float32]] | None = None
    """What a teacher says of all targets, row after row, once it is known: its likeliest words [targets, k], and their
    log-probabilities with that of all others behind them [targets, k + 1], NaN where not."""

    @functools.cached_property
    def target_ends(self) -> npt.NDArray[np.int64]:
        """[rows + 1] how many targets there are before each row, and in all."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._parts["target"].sums(), dtype=np.int64)])

    def with_teacher_top_k(self, words: Int32, logp: npt.NDArray[np.float32]) -> Sequences:
        """The same sequences, whose batches also hold what a teacher says of their targets.

        Args:
            words: [targets, k] its likeliest words for each target of each row, in the order of the rows.
            logp: [targets, k + 1] their log-probabilities, and that of all other words.

        Raises:
            ValueError: There are more or fewer targets.
        """
        targets, count = int(self.target_ends[-1]), words.shape[-1]
        if words.shape != (targets, count) or logp.shape != (targets, count + 1):
            raise ValueError(f"expected what is said of {targets:,} targets, got {words.shape} and {logp.shape}")
        copied = copy.copy(self)
        copied.teacher = words, logp
        return copied

    def target_places(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Where the targets of rows are among those of all rows, row after row."""
        ends = self.target_ends
        return np.concatenate([np.arange(int(ends[row]), int(ends[row + 1])) for row in rows])

    def _teacher_top_k(self, rows: Sequence[int], where: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """What a teacher says of rows, laid out by where their targets are in a batch, in the order of both."""
        if self.teacher is None:
            return {}
        places, found = self.target_places(rows), {}
        for name, flat in zip(("teacher_words", "teacher_logp"), self.teacher, strict=True):
            found[name] = np.zeros((*where.shape, flat.shape[-1]), flat.dtype)
            found[name][where] = flat[places]
        return found

    def _shapes(self) -> dict[str, int]:
        return {"length": round_length(self._parts["tokens"].longest)}

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> SequenceBatch:
        """The sequences at `indices`; see `Dataset.batch`."""
        rows, weight = fill_rows(indices, size)
        width = self.shapes["length"]
        mask = self._parts["target"].right_padded(rows, width).astype(bool)
        return SequenceBatch(
            tokens=self._parts["tokens"].right_padded(rows, width),
            length=self._parts["tokens"].lengths[rows],
            loss_mask=mask,
            weight=weight,
            **self._teacher_top_k(rows, mask),
        )

    def axis_lengths(self) -> dict[str, Int32]:
        """As of every dataset."""
        return {"length": self._parts["tokens"].lengths}

    def loads(self) -> tuple[Int32, Int32]:
        """As of every dataset: all tokens of a sequence, and those that the loss reads."""
        return self._parts["tokens"].lengths, self._parts["target"].sums()

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> PackedSequences:
        """As of every dataset."""
        tokens, position, segment = np.zeros((3, size.blocks, size.rows, size.length), np.int32)
        source, target = np.zeros((2, size.blocks, size.targets), np.int32)
        ends = np.zeros((size.blocks, 1), np.int32)  # targets of each block
        order: list[int] = []  # rows as they lie, block after block
        for block, lines in enumerate(layout):
            for line, items in enumerate(lines):
                slot = 0
                for ordinal, item in enumerate(items, start=1):
                    ids = self._parts["tokens"][rows[item]]
                    order.append(int(rows[item]))
                    here = block, line, slice(slot, slot + len(ids))
                    tokens[here], position[here], segment[here] = ids, np.arange(len(ids)), ordinal
                    wanted = np.flatnonzero(self._parts["target"][rows[item]])
                    scored = block, slice(int(ends[block, 0]), int(ends[block, 0]) + len(wanted))
                    source[scored] = line * size.length + slot + wanted - 1  # predicted from the slot before
                    target[scored] = ids[wanted]
                    slot, ends[block, 0] = here[2].stop, scored[1].stop
        mask = np.arange(size.targets) < ends
        return PackedSequences(
            tokens=tokens,
            position=position,
            segment=segment,
            source=source,
            target=target,
            loss_mask=mask,
            weight=(ends[:, 0] > 0).astype(np.float32),
            **self._teacher_top_k(order, mask),
        )
