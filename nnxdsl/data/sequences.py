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

    masks = frozenset({"target"})

    teacher: tuple[Int32, npt.NDArray[np.float32]] | None = None
    """Cached teacher top-k of all targets, row after row: token ids [targets, k]; log-probabilities of these and of all
    other tokens [targets, k + 1], NaN where missing."""

    @functools.cached_property
    def target_ends(self) -> npt.NDArray[np.int64]:
        """[rows + 1] number of targets before each row, and in all."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._parts["target"].sums(), dtype=np.int64)])

    def with_teacher_top_k(self, ids: Int32, logps: npt.NDArray[np.float32]) -> Sequences:
        """The same sequences, whose batches have a teacher's top-k tokens of each target.

        Args:
            ids: [targets, k] the most likely tokens of each target, in the order of the rows.
            logps: [targets, k + 1] their log-probabilities, and that of all other tokens.

        Raises:
            ValueError: The shapes do not match the targets.
        """
        targets, count = int(self.target_ends[-1]), ids.shape[-1]
        if ids.shape != (targets, count) or logps.shape != (targets, count + 1):
            raise ValueError(f"expected top-k tokens of {targets:,} targets, got {ids.shape} and {logps.shape}")
        copied = copy.copy(self)
        copied.teacher = ids, logps
        return copied

    def target_places(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Indices of the targets of some rows among those of all rows."""
        ends = self.target_ends
        return np.concatenate([np.arange(int(ends[row]), int(ends[row + 1])) for row in rows])

    def _teacher_top_k(self, rows: Sequence[int], is_target: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """The teacher's arrays of a batch; `is_target` marks the targets of `rows` in their order."""
        if self.teacher is None:
            return {}
        places, arrays = self.target_places(rows), {}
        for name, flat in zip(("teacher_top_ids", "teacher_top_logps"), self.teacher, strict=True):
            arrays[name] = np.zeros((*is_target.shape, flat.shape[-1]), flat.dtype)
            arrays[name][is_target] = flat[places]
        return arrays

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
        """See `Dataset.axis_lengths`."""
        return {"length": self._parts["tokens"].lengths}

    def packing_lengths(self) -> tuple[Int32, Int32]:
        """See `Dataset.packing_lengths`."""
        return self._parts["tokens"].lengths, self._parts["target"].sums()

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> PackedSequences:
        """See `Dataset.packed`."""
        tokens, position, segment = np.zeros((3, size.blocks, size.rows, size.length), np.int32)
        source, target = np.zeros((2, size.blocks, size.targets), np.int32)
        ends = np.zeros((size.blocks, 1), np.int32)  # targets of each block
        order: list[int] = []  # rows in the order of their positions
        for block, lines in enumerate(layout):
            for line, items in enumerate(lines):
                slot = 0
                for ordinal, item in enumerate(items, start=1):
                    ids = self._parts["tokens"][rows[item]]
                    order.append(int(rows[item]))
                    here = block, line, slice(slot, slot + len(ids))
                    tokens[here], position[here], segment[here] = ids, np.arange(len(ids)), ordinal
                    targets = np.flatnonzero(self._parts["target"][rows[item]])
                    scored = block, slice(int(ends[block, 0]), int(ends[block, 0]) + len(targets))
                    source[scored] = line * size.length + slot + targets - 1  # predicted from the slot before
                    target[scored] = ids[targets]
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
