"""Rows as token arrays in memory, and batches of static shape that are cut from them."""

from __future__ import annotations

import abc
import copy
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import Batch, PackedPairs, PackedSequences, PairBatch, RolloutBatch, SequenceBatch
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.packing import Layout, Size, places
from nnxdsl.data.ragged import Ragged
from nnxdsl.errors import DataError

Int32 = npt.NDArray[np.int32]

ROUND_TO = 8
"""Batch lengths are rounded up to a multiple of this, as accelerators like it."""


class Kept(NamedTuple):
    """All kept rows of a file."""

    parts: dict[str, Ragged]
    row_ids: list[str]
    report: Report
    digest: str
    is_chat: bool
    columns: Sequence[dict[str, Any]] = ()


class Dataset(abc.ABC):
    """Tokenised rows of one file.

    Attributes:
        report: What became of the file's rows.
        digest: sha256 hex over the file's bytes.
        row_ids: `file:line` of each kept row.
        is_chat: Whether the rows are chats, so that prompts for samples belong in the template as well.
        shapes: Lengths of every batch, by axis: longest kept row, rounded up to a multiple of 8.
    """

    def __init__(self, kept: Kept) -> None:
        self._parts = kept.parts
        self.report = kept.report
        self.digest = kept.digest
        self.row_ids = kept.row_ids
        self.is_chat = kept.is_chat
        self.shapes: dict[str, int] = self._shapes()

    def __len__(self) -> int:
        return len(self.row_ids)

    def ids_digest(self) -> str:
        """sha256 hex over the ids of all rows by part: the same whatever file and template they came from."""
        digest = hashlib.sha256()
        for name, part in sorted(self._parts.items()):
            digest.update(f"{name} {len(part)} ".encode())
            part.update(digest)
        return digest.hexdigest()

    def row(self, index: int) -> dict[str, npt.NDArray[np.int32]]:
        """One row's ids by part, unpadded."""
        return {name: part[index] for name, part in self._parts.items()}

    @abc.abstractmethod
    def _shapes(self) -> dict[str, int]: ...

    @abc.abstractmethod
    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> PairBatch | SequenceBatch:
        """The rows at `indices`, filled up to `size` with copies of the first whose weight is 0.

        Copies rather than zeros: a row of no tokens would turn a mean over its tokens into NaN, and 0 x NaN is NaN.

        Raises:
            ValueError: There is no index, or there are more than `size`.
        """

    def axis_lengths(self) -> dict[str, Int32]:
        """What each row needs of each axis of `shapes`, `[rows]` each.

        Raises:
            DataError: This kind of dataset does not say.
        """
        raise self._unknown("long its rows are")

    def cut_to(self, shapes: Mapping[str, int]) -> Dataset:
        """The same rows, whose batches have other `shapes`; no row of theirs may be longer."""
        same = copy.copy(self)
        same.shapes = dict(shapes)
        return same

    def loads(self) -> tuple[Int32, Int32]:
        """What each row needs in a packed batch: tokens `[rows]`, and of these the targets `[rows]`.

        Raises:
            DataError: This kind of dataset cannot be packed.
        """
        raise self._unknown("it is packed")

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> Batch:
        """A packed batch.

        Args:
            rows: Of this dataset.
            size: Of the batch.
            layout: Where each of `rows` lies.

        Raises:
            DataError: This kind of dataset cannot be packed.
        """
        raise self._unknown("it is packed")

    def _unknown(self, what: str) -> DataError:
        return DataError(
            f"batching: {type(self).__name__} of {self.report.source} does not say how {what}; use Batching.Padded()"
        )


class Pairs(Dataset):
    """Preference pairs; `shapes` has "prompt" and "response"."""

    reference: npt.NDArray[np.float32] | None = None
    """[rows, 2] the reference's log-probabilities of chosen and rejected, once they are known: NaN where not."""
    desirable: npt.NDArray[np.float32] | None = None
    """[rows] of feedback, which is laid out as pairs: 1 where the answer is desirable, else 0."""

    def referenced(self, logps: npt.NDArray[np.float32]) -> Pairs:
        """The same pairs, whose batches also hold what the reference says of them.

        Args:
            logps: [rows, 2] float32 log-probabilities of chosen and rejected, by row of this dataset.

        Raises:
            ValueError: There are more or fewer rows.
        """
        if logps.shape != (len(self), 2):
            raise ValueError(f"expected log-probabilities of shape {(len(self), 2)}, got {logps.shape}")
        known = copy.copy(self)
        known.reference = logps.astype(np.float32)
        return known

    def _shapes(self) -> dict[str, int]:
        response = max(self._parts["chosen"].longest, self._parts["rejected"].longest)
        return {"prompt": _rounded(self._parts["prompt"].longest), "response": _rounded(response)}

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> PairBatch:
        """The pairs at `indices`; see `Dataset.batch`."""
        rows, weight = _filled(indices, size)
        prompt, chosen, rejected = (self._parts[name] for name in ("prompt", "chosen", "rejected"))
        return PairBatch(
            prompt=prompt.left_padded(rows, self.shapes["prompt"]),
            chosen=chosen.right_padded(rows, self.shapes["response"]),
            rejected=rejected.right_padded(rows, self.shapes["response"]),
            prompt_length=prompt.lengths[rows],
            chosen_length=chosen.lengths[rows],
            rejected_length=rejected.lengths[rows],
            weight=weight,
            reference_chosen=None if self.reference is None else self.reference[rows, 0],
            reference_rejected=None if self.reference is None else self.reference[rows, 1],
            desirable=None if self.desirable is None else self.desirable[rows],
        )

    def axis_lengths(self) -> dict[str, Int32]:
        """As of every dataset; a pair needs the longer of its completions."""
        chosen, rejected = self._parts["chosen"].lengths, self._parts["rejected"].lengths
        return {"prompt": self._parts["prompt"].lengths, "response": np.maximum(chosen, rejected)}

    def loads(self) -> tuple[Int32, Int32]:
        """As of every dataset: all tokens of a pair, its prompt once, and those of its completions."""
        targets = self._parts["chosen"].lengths + self._parts["rejected"].lengths
        return self._parts["prompt"].lengths + targets, targets

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> PackedPairs:
        """As of every dataset."""
        tokens, position, segment, branch = np.zeros((4, size.blocks, size.rows, size.length), np.int32)
        source, target = np.zeros((2, size.blocks, size.targets), np.int32)
        owner = np.full((size.blocks, size.targets), 2 * size.items, np.int32)
        lengths = np.ones((3, size.blocks, size.items), np.int32)
        for block, lines in enumerate(layout):
            begin, number = 0, 0  # in the block: the next target, the next pair
            for line, items in enumerate(lines):
                slot = 0
                for ordinal, item in enumerate(items, start=1):
                    parts = [self._parts[name][rows[item]] for name in ("prompt", "chosen", "rejected")]
                    prompt, chosen, rejected = map(len, parts)
                    here = block, line, slice(slot, slot + prompt + chosen + rejected)
                    tokens[here] = np.concatenate(parts)
                    after = prompt + np.arange(max(chosen, rejected))
                    position[here] = np.concatenate([np.arange(prompt), after[:chosen], after[:rejected]])
                    segment[here] = ordinal
                    branch[here] = np.repeat([0, 1, 2], [prompt, chosen, rejected])
                    said = block, slice(begin, begin + chosen + rejected)
                    # A token is predicted from the slot before it, the first of both completions from the prompt's end.
                    source[said] = line * size.length + slot + prompt - 1 + np.arange(chosen + rejected)
                    source[block, begin + chosen] = source[block, begin]
                    target[said] = np.concatenate(parts[1:])
                    owner[said] = np.repeat([number, size.items + number], [chosen, rejected])
                    lengths[:, block, number] = prompt, chosen, rejected
                    slot, begin, number = here[2].stop, said[1].stop, number + 1
        where = places(rows, size, layout)
        known = None if self.reference is None else np.where(where >= 0, np.moveaxis(self.reference[where], -1, 0), 0)
        return PackedPairs(
            tokens=tokens,
            position=position,
            segment=segment,
            branch=branch,
            source=source,
            target=target,
            owner=owner,
            prompt_length=lengths[0],
            chosen_length=lengths[1],
            rejected_length=lengths[2],
            weight=(where >= 0).astype(np.float32),
            reference_chosen=None if known is None else known[0],
            reference_rejected=None if known is None else known[1],
            desirable=None if self.desirable is None else np.where(where >= 0, self.desirable[where], np.float32(0)),
        )


class Sequences(Dataset):
    """Conversations or texts; `shapes` has "length"."""

    teacher: tuple[Int32, npt.NDArray[np.float32]] | None = None
    """What a teacher says of all targets, row after row, once it is known: its likeliest words [targets, k], and their
    log-probabilities with that of all others behind them [targets, k + 1], NaN where not."""

    @functools.cached_property
    def target_ends(self) -> npt.NDArray[np.int64]:
        """[rows + 1] how many targets there are before each row, and in all."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._parts["target"].sums(), dtype=np.int64)])

    def taught(self, words: Int32, logp: npt.NDArray[np.float32]) -> Sequences:
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
        known = copy.copy(self)
        known.teacher = words, logp
        return known

    def target_places(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Where the targets of rows are among those of all rows, row after row."""
        ends = self.target_ends
        return np.concatenate([np.arange(int(ends[row]), int(ends[row + 1])) for row in rows])

    def _said(self, rows: Sequence[int], where: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """What a teacher says of rows, laid out by where their targets are in a batch, in the order of both."""
        if self.teacher is None:
            return {}
        places, found = self.target_places(rows), {}
        for name, flat in zip(("teacher_words", "teacher_logp"), self.teacher, strict=True):
            found[name] = np.zeros((*where.shape, flat.shape[-1]), flat.dtype)
            found[name][where] = flat[places]
        return found

    def _shapes(self) -> dict[str, int]:
        return {"length": _rounded(self._parts["tokens"].longest)}

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> SequenceBatch:
        """The sequences at `indices`; see `Dataset.batch`."""
        rows, weight = _filled(indices, size)
        width = self.shapes["length"]
        mask = self._parts["target"].right_padded(rows, width).astype(bool)
        return SequenceBatch(
            tokens=self._parts["tokens"].right_padded(rows, width),
            length=self._parts["tokens"].lengths[rows],
            loss_mask=mask,
            weight=weight,
            **self._said(rows, mask),
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
                    said = block, slice(int(ends[block, 0]), int(ends[block, 0]) + len(wanted))
                    source[said] = line * size.length + slot + wanted - 1  # predicted from the slot before
                    target[said] = ids[wanted]
                    slot, ends[block, 0] = here[2].stop, said[1].stop
        mask = np.arange(size.targets) < ends
        return PackedSequences(
            tokens=tokens,
            position=position,
            segment=segment,
            source=source,
            target=target,
            loss_mask=mask,
            weight=(ends[:, 0] > 0).astype(np.float32),
            **self._said(order, mask),
        )


class Prompts(Dataset):
    """Prompts that a policy answers itself; `shapes` has "prompt" and "response".

    Attributes:
        columns: Each row as it stands in the file.
        max_response_length: Longest answer that is drawn, in tokens, its end token included.
    """

    def __init__(self, kept: Kept, max_response_length: int) -> None:
        self.max_response_length = max_response_length
        self.columns = kept.columns
        super().__init__(kept)

    def _shapes(self) -> dict[str, int]:
        return {"prompt": _rounded(self._parts["prompt"].longest), "response": self.max_response_length}

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> SequenceBatch:
        """There is none before the policy has answered.

        Raises:
            DataError: Always.
        """
        raise DataError(f"{self.report.source}: prompts alone are no batch; nnxdsl.trainer.rollouts makes batches")

    def batch_of(
        self,
        rows: Sequence[int],
        answers: Sequence[Sequence[int]],
        advantage: npt.NDArray[np.floating],
        size: int | None = None,
    ) -> RolloutBatch:
        """A batch of answers, each after its prompt.

        Args:
            rows: Of this dataset, one for each answer.
            answers: Ids, at most `max_response_length`, the end token included where there is one.
            advantage: [answers] of each of them.
            size: Rows of the batch, as of `batch`; None for as many as there are answers.
        """
        size = len(rows) if size is None else size
        width = _rounded(self.shapes["prompt"] + self.max_response_length)
        tokens, said = np.zeros((size, width), np.int32), np.zeros((size, self.max_response_length), np.int32)
        mask = np.zeros(said.shape, bool)
        length, advantages = np.zeros(size, np.int32), np.zeros(size, np.float32)
        for place in range(size):
            index = place if place < len(rows) else 0
            prompt, answer = self._parts["prompt"][rows[index]], np.asarray(answers[index], np.int32)
            length[place] = len(prompt) + len(answer)
            tokens[place, : length[place]] = np.concatenate([prompt, answer])
            said[place, : len(answer)], mask[place, : len(answer)] = answer, True
            advantages[place] = advantage[index]
        weight = (np.arange(size) < len(rows)).astype(np.float32)
        limit = np.full(size, self.max_response_length, np.float32)
        return RolloutBatch(tokens, length, said, mask, weight, advantages, limit)


def _rounded(length: int) -> int:
    return -(-length // ROUND_TO) * ROUND_TO


def _filled(indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    rows = [int(index) for index in indices]
    if not 0 < len(rows) <= size:
        raise ValueError(f"a batch of {size} rows takes 1 to {size} indices, got {len(rows)}")
    weight = (np.arange(size) < len(rows)).astype(np.float32)
    return rows + rows[:1] * (size - len(rows)), weight
