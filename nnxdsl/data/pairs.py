"""Tokenized preference pairs, and KTO completions paired with mismatched ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import PackedPairs, PairBatch
from nnxdsl.data.dataset import Dataset, Int32, fill_rows, round_length
from nnxdsl.data.packing import Layout, Size, places
from nnxdsl.data.ragged import Ragged

COMPLETIONS = {"chosen": "chosen_mask", "rejected": "rejected_mask"}
"""The completions of a pair, and the masks of their targets."""


class Pairs(Dataset):
    """Preference pairs; `shapes` has "prompt" and "response".

    Where some completions have several turns, the parts `chosen_mask` and `rejected_mask` mark the targets of each; a
    mask without values is that of a completion whose tokens are all targets. The part `margin` has the four bytes of a
    float32 number.
    """

    masks = frozenset(COMPLETIONS.values())

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
        parts = [dataset for dataset in datasets if isinstance(dataset, Pairs)]
        if any(part.has_masks for part in parts):
            parts = [part._with_masks() for part in parts]
        if any("margin" in part._parts for part in parts):
            parts = [part._with_margins() for part in parts]
        same = super(Pairs, parts[0]).joined(parts)
        assert isinstance(same, Pairs)
        labels = [part.desirable for part in parts if part.desirable is not None]
        same.desirable = np.concatenate(labels) if labels else None
        return same

    @property
    def has_masks(self) -> bool:
        """Whether some completions have tokens that are no targets."""
        return not self.masks.isdisjoint(self._parts)

    def _with_masks(self) -> Pairs:
        same, rows = copy.copy(self), len(self)
        empty = {mask: Ragged(np.zeros(0, np.int32), np.zeros(rows, np.int32)) for mask in COMPLETIONS.values()}
        same._parts = {**empty, **self._parts}
        return same

    def _with_margins(self) -> Pairs:
        same, rows = copy.copy(self), len(self)
        zeros = Ragged(np.zeros(4 * rows, np.uint8), np.full(rows, 4, np.int32))
        same._parts = {"margin": zeros, **self._parts}
        return same

    def _margins(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float32] | None:
        """The margins of rows, 0 where a row is below 0; None for pairs without margins."""
        part = self._parts.get("margin")
        if part is None:
            return None
        margins = part.right_padded(np.maximum(rows, 0).ravel().tolist(), 4).astype(np.uint8).view(np.float32)
        return np.where(rows >= 0, margins.reshape(rows.shape), np.float32(0))

    def targets(self, name: str) -> Int32:
        """[rows] targets of the completions `name`."""
        lengths, mask = self._parts[name].lengths, self._parts.get(COMPLETIONS[name])
        return lengths if mask is None else np.where(mask.lengths > 0, mask.sums(), lengths)

    def mask(self, name: str, row: int) -> npt.NDArray[np.bool_]:
        """Which tokens of the completion `name` of a row are targets."""
        mask = self._parts.get(COMPLETIONS[name])
        if mask is None or not mask.lengths[row]:
            return np.ones(self._parts[name].lengths[row], bool)
        return mask[row].astype(bool)

    def _padded_masks(self, rows: Sequence[int]) -> dict[str, npt.NDArray[np.bool_]]:
        """The masks of a batch by field; none where every token of all completions is a target."""
        if not self.has_masks:
            return {}
        masks = {mask: np.zeros((len(rows), self.shapes["response"]), bool) for mask in COMPLETIONS.values()}
        for name, mask in COMPLETIONS.items():
            for line, row in zip(masks[mask], rows, strict=True):
                line[: self._parts[name].lengths[row]] = self.mask(name, row)
        return masks

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
            margin=self._margins(np.array(rows)),
            **self._padded_masks(rows),
        )

    def axis_lengths(self) -> dict[str, Int32]:
        """See `Dataset.axis_lengths`; the length of "response" is that of the longer completion."""
        chosen, rejected = self._parts["chosen"].lengths, self._parts["rejected"].lengths
        return {"prompt": self._parts["prompt"].lengths, "response": np.maximum(chosen, rejected)}

    def packing_lengths(self) -> tuple[Int32, Int32]:
        """See `Dataset.packing_lengths`; the prompt counts once, the targets are those of both completions."""
        prompt, chosen, rejected = (self._parts[name].lengths for name in ("prompt", *COMPLETIONS))
        return prompt + chosen + rejected, self.targets("chosen") + self.targets("rejected")

    def packed(self, rows: npt.NDArray[np.integer], size: Size, layout: Layout) -> PackedPairs:
        """See `Dataset.packed`."""
        tokens, position, segment, branch = np.zeros((4, size.blocks, size.rows, size.length), np.int32)
        source, target = np.zeros((2, size.blocks, size.targets), np.int32)
        owner = np.full((size.blocks, size.targets), 2 * size.items, np.int32)
        lengths, counts = (np.ones((n, size.blocks, size.items), np.int32) for n in (3, 2))
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
                    # The slot before a token predicts it; the prompt's last one predicts the first of both completions.
                    sources = line * size.length + slot + prompt - 1 + np.arange(chosen + rejected)
                    sources[chosen] = sources[0]
                    masks = [self.mask(name, int(rows[item])) for name in COMPLETIONS]
                    is_target, of_each = np.concatenate(masks), [int(mask.sum()) for mask in masks]
                    targets = block, slice(begin, begin + sum(of_each))
                    source[targets] = sources[is_target]
                    target[targets] = np.concatenate(parts[1:])[is_target]
                    owner[targets] = np.repeat([number, size.items + number], of_each)
                    lengths[:, block, number], counts[:, block, number] = (prompt, chosen, rejected), of_each
                    slot, begin, number = here[2].stop, targets[1].stop, number + 1
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
            margin=self._margins(row_of),
            chosen_targets=counts[0] if self.has_masks else None,
            rejected_targets=counts[1] if self.has_masks else None,
        )
