"""Tokenized prompts for online RL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import PER_COMPLETION, GroupBatch, RolloutBatch, SequenceBatch
from nnxdsl.data.dataset import Dataset, Rows, TokenizedRows, round_length
from nnxdsl.data.ragged import Joined, Selected
from nnxdsl.errors import DataError


class Prompts(Dataset):
    """Prompts whose completions are sampled from the policy; `shapes` has "prompt" and "response".

    Where a teacher has prompts of its own, these are the part "teacher_prompt", and `shapes` has that, too.

    Attributes:
        columns: The columns of each row in the file.
        max_completion_length: Maximal tokens of a completion, end token included.
    """

    def __init__(self, rows: TokenizedRows, max_completion_length: int) -> None:
        self.max_completion_length = max_completion_length
        self.columns = rows.columns
        super().__init__(rows)

    def select(self, rows: Rows) -> Dataset:
        """See `Dataset.select`."""
        same = super().select(rows)
        assert isinstance(same, Prompts)
        same.columns = Selected(self.columns, rows)
        return same

    def joined(self, datasets: Sequence[Dataset]) -> Dataset:
        """See `Dataset.joined`; the largest maximal length is that of all completions."""
        same, parts = super().joined(datasets), [dataset for dataset in datasets if isinstance(dataset, Prompts)]
        assert isinstance(same, Prompts)
        same.columns = Joined([part.columns for part in parts])
        same.max_completion_length = same.shapes["response"]
        return same

    def _shapes(self) -> dict[str, int]:
        prompts = {name: round_length(part.longest) for name, part in self._parts.items()}
        return {**prompts, "response": self.max_completion_length}

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> SequenceBatch:
        """Not available: prompts have no completions.

        Raises:
            DataError: Always.
        """
        raise DataError(f"{self.report.source}: prompts alone are no batch; nnxdsl.rollouts makes batches")

    def rollout_batch(
        self,
        rows: Sequence[int],
        completions: Sequence[Sequence[int]],
        is_sampled: Sequence[Sequence[bool]] | None = None,
        size: int | None = None,
        logps: Sequence[npt.NDArray[np.floating]] | None = None,
        teacher_logps: Sequence[npt.NDArray[np.floating]] | None = None,
        teacher_index: Sequence[int] | None = None,
        teacher_top_k: Sequence[tuple[npt.NDArray[np.integer], npt.NDArray[np.floating]]] | None = None,
        routed_experts: Sequence[npt.NDArray[np.int16]] | None = None,
    ) -> RolloutBatch:
        """A batch of sampled completions, each after its prompt, whose advantages are 0.

        Args:
            rows: The row of each completion.
            completions: Their token ids, at most `max_completion_length` each, end tokens included.
            is_sampled: Which of them the policy sampled; None for all.
            size: Rows of the batch; None for the number of completions.
            logps: The log-probability of each token under the sampler; None if it gave none.
            teacher_logps: Those under a teacher behind a server; None without one.
            teacher_index: Which of several teachers gave them; None with one.
            teacher_top_k: The teacher's most likely tokens at each token `[n, k]`, and their log-probabilities and that
                of all others `[n, k + 1]`; None where `teacher_logps` is all that is read.
            routed_experts: The experts of the tokens of prompts and completions, `[tokens, layers, k]`; None for none.
        """
        size = len(rows) if size is None else size
        completion_ids = np.zeros((size, self.max_completion_length), np.int32)
        mask, completion_length = np.zeros(completion_ids.shape, bool), np.zeros(size, np.int32)
        advantages, *per_token = np.zeros((3, *completion_ids.shape), np.float32)
        for place in range(size):
            index = place if place < len(rows) else 0
            completion = np.asarray(completions[index], np.int32)
            completion_length[place] = len(completion)
            completion_ids[place, : len(completion)] = completion
            mask[place, : len(completion)] = True if is_sampled is None else is_sampled[index]
            for array, values in zip(per_token, (logps, teacher_logps), strict=True):
                if values is not None:
                    array[place, : len(completion)] = values[index]
        weight = (np.arange(size) < len(rows)).astype(np.float32)
        index = None if teacher_index is None else np.resize(np.array(teacher_index, np.int32), size)
        max_length = np.full(size, self.max_completion_length, np.float32)
        top_k = (None, None) if teacher_top_k is None else _padded_top_k(teacher_top_k, completion_ids.shape)
        # A teacher behind a server has read its prompts.
        is_served = teacher_logps is not None or teacher_top_k is not None
        has_teacher_prompts = "teacher_prompt" in self._parts and not is_served
        teacher = self._joined("teacher_prompt", rows, completions, size) if has_teacher_prompts else (None, None)
        tokens, length = self._joined("prompt", rows, completions, size)
        return RolloutBatch(
            tokens,
            length,
            completion_ids,
            completion_length,
            mask,
            weight,
            advantages,
            max_completion_length=max_length,
            sampler_logps=None if logps is None else per_token[0],
            teacher_logps=None if teacher_logps is None else per_token[1],
            teacher_top_ids=top_k[0],
            teacher_top_logps=top_k[1],
            teacher_index=index,
            teacher_tokens=teacher[0],
            teacher_length=teacher[1],
            routed_experts=None if routed_experts is None else _padded_experts(routed_experts, tokens.shape),
        )

    def _joined(
        self, part: str, rows: Sequence[int], completions: Sequence[Sequence[int]], size: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Prompts of a part with completions, right-padded `[size, T]`, and their lengths; filled up with the first."""
        tokens = np.zeros((size, round_length(self.shapes[part] + self.max_completion_length)), np.int32)
        length = np.zeros(size, np.int32)
        for place in range(size):
            index = place if place < len(rows) else 0
            ids = np.concatenate([self._parts[part][rows[index]], np.asarray(completions[index], np.int32)])
            tokens[place, : len(ids)], length[place] = ids, len(ids)
        return tokens, length

    def grouped(self, batch: RolloutBatch, size: int) -> GroupBatch:
        """A batch in which every `size` completions of a prompt, one after another, share a row."""
        count = len(batch.weight) // size
        arrays = {name: array for name in PER_COMPLETION if (array := getattr(batch, name)) is not None}
        grouped = GroupBatch(
            *_prompts(batch.tokens, batch.length - batch.completion_length, size, self.shapes["prompt"]),
            **{name: array.reshape(count, size, *array.shape[1:]) for name, array in arrays.items()},
            routed_experts=_grouped_experts(batch, size, self.shapes["prompt"]),
        )
        if batch.teacher_tokens is None:
            return grouped
        lengths, width = batch.teacher_length - batch.completion_length, self.shapes["teacher_prompt"]
        prompts, lengths = _prompts(batch.teacher_tokens, lengths, size, width)
        return grouped._replace(teacher_prompt=prompts, teacher_prompt_length=lengths)


def _padded_top_k(
    top_k: Sequence[tuple[npt.NDArray[np.integer], npt.NDArray[np.floating]]], shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """A teacher's top k, padded to the shape of completions; filled up with the first."""
    k = top_k[0][0].shape[1]
    ids, logps = np.zeros((*shape, k), np.int32), np.zeros((*shape, k + 1), np.float32)
    for place in range(shape[0]):
        completion_top_k = top_k[place if place < len(top_k) else 0]
        ids[place, : len(completion_top_k[0])], logps[place, : len(completion_top_k[1])] = completion_top_k
    return ids, logps


def _padded_experts(experts: Sequence[npt.NDArray[np.int16]], shape: tuple[int, ...]) -> npt.NDArray[np.int16]:
    """The experts of rows of tokens of that shape, right-padded; filled up with the first."""
    padded = np.full((*shape, *experts[0].shape[1:]), -1, np.int16)
    for place, row in enumerate(padded):
        each = experts[place if place < len(experts) else 0]
        row[: len(each)] = each
    return padded


def _grouped_experts(batch: RolloutBatch, size: int, width: int) -> npt.NDArray[np.int16] | None:
    """The experts of rows `[prompt | completion 1 | ... ]`, whose prompts are left-padded to `width`; None without."""
    if batch.routed_experts is None:
        return None
    response = batch.completion_ids.shape[1]
    shape = len(batch.weight) // size, width + size * response, *batch.routed_experts.shape[2:]
    grouped = np.full(shape, -1, np.int16)
    for place, experts in enumerate(batch.routed_experts):
        (row, index), length = divmod(place, size), batch.completion_length[place]
        prompt, start = batch.length[place] - length, width + index * response
        grouped[row, width - prompt : width] = experts[:prompt]  # all completions of a group have the same
        grouped[row, start : start + length] = experts[prompt : prompt + length]
    return grouped


def _prompts(
    tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], size: int, width: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The prompt of every `size` rows of tokens, left-padded to `width`, and its length."""
    lengths = lengths[::size].astype(np.int32)
    prompts = np.zeros((len(lengths), width), np.int32)
    for row, length in enumerate(lengths):
        prompts[row, width - length :] = tokens[row * size, :length]
    return prompts, lengths
