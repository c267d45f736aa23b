"""Tokenized prompts, which a policy completes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import RolloutBatch, SequenceBatch
from nnxdsl.data.dataset import Dataset, TokenizedRows, round_length
from nnxdsl.errors import DataError


class Prompts(Dataset):
    """Prompts that a policy answers itself; `shapes` has "prompt" and "response".

    Attributes:
        columns: Each row as it stands in the file.
        max_completion_length: Longest answer that is drawn, in tokens, its end token included.
    """

    def __init__(self, rows: TokenizedRows, max_completion_length: int) -> None:
        self.max_completion_length = max_completion_length
        self.columns = rows.columns
        super().__init__(rows)

    def _shapes(self) -> dict[str, int]:
        return {"prompt": round_length(self._parts["prompt"].longest), "response": self.max_completion_length}

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
            answers: Ids, at most `max_completion_length`, the end token included where there is one.
            advantage: [answers] of each of them.
            size: Rows of the batch, as of `batch`; None for as many as there are answers.
        """
        size = len(rows) if size is None else size
        width = round_length(self.shapes["prompt"] + self.max_completion_length)
        tokens, completion_mask = (
            np.zeros((size, width), np.int32),
            np.zeros((size, self.max_completion_length), np.int32),
        )
        mask = np.zeros(completion_mask.shape, bool)
        length, advantages = np.zeros(size, np.int32), np.zeros(size, np.float32)
        for place in range(size):
            index = place if place < len(rows) else 0
            prompt, answer = self._parts["prompt"][rows[index]], np.asarray(answers[index], np.int32)
            length[place] = len(prompt) + len(answer)
            tokens[place, : length[place]] = np.concatenate([prompt, answer])
            completion_mask[place, : len(answer)], mask[place, : len(answer)] = answer, True
            advantages[place] = advantage[index]
        weight = (np.arange(size) < len(rows)).astype(np.float32)
        limit = np.full(size, self.max_completion_length, np.float32)
        return RolloutBatch(tokens, length, completion_mask, mask, weight, advantages, limit)
