"""Tokenized preference pairs, and KTO completions paired with mismatched ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import PackedPairs, PairBatch
from nnxdsl.data.dataset import Dataset, Int32, fill_rows, round_length
from nnxdsl.data.packing import Layout, Size, places


class Pairs(Dataset):
    """Preference pairs; `shapes` has "prompt" and "response"."""

    reference: npt.NDArray[np.float32] | None = None
    """[rows, 2] cached reference log-probabilities of chosen and rejected; NaN where missing."""
    desirable: npt.NDArray[np.float32] | None = None
    """[rows] in KTO, 1 where `chosen` is a desirable completion, else 0."""

    def with_reference_logps(self, logps: npt.NDArray[np.float32]) -> Pairs:
        """The same pairs with cached reference log-probabilities of chosen and rejected, `logps` [rows, 2].

        Raises:
            ValueError: `logps` has another shape.
        """
        if logps.shape != (len(self), 2):
            raise ValueError(f"expected log-probabilities of shape {(len(self), 2)}, got {logps.shape}")
        copied = copy.copy(self)
        copied.reference = logps.astype(np.float32)
        return copied

    def joined(self, datasets: Sequence[Dataset]) -> Dataset:
        """See `Dataset.joined`."""
        same, parts = super().joined(datasets), [dataset for dataset in datasets if isinstance(dataset, Pairs)]
        assert isinstance(same, Pairs)
        labels = [part.desirable for part in parts if part.desirable is not None]
        same.desirable = np.concatenate(labels) if labels else None
        return same

    def _shapes(self) -> dict[str, int]:
        response = max(self._parts["chosen"].longest, self._parts["rejected"].longest)
        return {"prompt": round_length(self._parts["prompt"].longest), "response": round_length(response)}

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> PairBatch:
        """The pairs at `indices`; see `Dataset.batch`."""
        rows, weight = fill_rows(indices, size)
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
        """See `Dataset.axis_lengths`; the length of "response" is that of the longer completion."""
        chosen, rejected = self._parts["chosen"].lengths, self._parts["rejected"].lengths
        return {"prompt": self._parts["prompt"].lengths, "response": np.maximum(chosen, rejected)}

    def packing_lengths(self) -> tuple[Int32, Int32]:
        """See `Dataset.packing_lengths`; the prompt counts once, the targets are those of both completions."""
        targets = self._parts["chosen"].lengths + self._parts["rejected"].lengths
        return self._parts["prompt"].lengths + targets, targets

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> PackedPairs:
        """See `Dataset.packed`."""
        tokens, position, segment, branch = np.zeros((4, size.blocks, size.rows, size.length), np.int32)
        source, target = np.zeros((2, size.blocks, size.targets), np.int32)
        owner = np.full((size.blocks, size.targets), 2 * size.items, np.int32)
        lengths = np.ones((3, size.blocks, size.items), np.int32)
        for block, lines in enumerate(layout):
            begin, number = 0, 0  # next target and next pair of the block
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
                    completions = block, slice(begin, begin + chosen + rejected)
                    # The slot before a token predicts it; the prompt's last one predicts the first of both completions.
                    source[completions] = line * size.length + slot + prompt - 1 + np.arange(chosen + rejected)
                    source[block, begin + chosen] = source[block, begin]
                    target[completions] = np.concatenate(parts[1:])
                    owner[completions] = np.repeat([number, size.items + number], [chosen, rejected])
                    lengths[:, block, number] = prompt, chosen, rejected
                    slot, begin, number = here[2].stop, completions[1].stop, number + 1
        row_of = places(rows, size, layout)
        is_pair = row_of >= 0
        logps = None if self.reference is None else np.where(is_pair, np.moveaxis(self.reference[row_of], -1, 0), 0)
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
            weight=is_pair.astype(np.float32),
            reference_chosen=None if logps is None else logps[0],
            reference_rejected=None if logps is None else logps[1],
            desirable=None if self.desirable is None else np.where(is_pair, self.desirable[row_of], np.float32(0)),
        )
