"""The kinds of batch that a training step reads. Knows shapes and meanings, nothing of files or tokenizers."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""numpy arrays as they leave this floor; jax arrays or tracers once a program has them."""


class PairBatch(NamedTuple):
    """B preference pairs, each prompt once. Padding is 0 and means nothing: masks go by length, never by id.

    Of feedback, `chosen` is a row's own completion, whatever its label, and `rejected` that of a row with another
    prompt: a mismatched one, of which the loss reads how likely it is, and learns nothing.

    Attributes:
        prompt: [B, P] int32, left-padded: the last prompt token always stands at P - 1.
        chosen: [B, R] int32, right-padded; ends with its end token unless it was cut.
        rejected: [B, R] int32, as `chosen`.
        prompt_length: [B] int32, tokens in the prompt, at least 1.
        chosen_length: [B] int32, at least 1.
        rejected_length: [B] int32, at least 1.
        weight: [B] float32, 1 for a pair, 0 for a row that only fills the batch.
        reference_chosen: [B] float32, the reference's log-probability of the whole completion, or None: not known.
        reference_rejected: [B] float32, as `reference_chosen`.
        desirable: [B] float32, of feedback: 1 where a row's own completion is desirable, else 0. None for pairs.
    """

    prompt: Array
    chosen: Array
    rejected: Array
    prompt_length: Array
    chosen_length: Array
    rejected_length: Array
    weight: Array
    reference_chosen: Array = None
    reference_rejected: Array = None
    desirable: Array = None


class SequenceBatch(NamedTuple):
    """B token sequences with their targets marked. Padding is 0 and means nothing: masks go by length, never by id.

    Attributes:
        tokens: [B, T] int32, right-padded.
        length: [B] int32, at least 2.
        loss_mask: [B, T] bool, True where the token is a target (predicted from the one before); never at position 0.
        weight: [B] float32, 1 for a sequence, 0 for a row that only fills the batch.
        teacher_words: [B, T, k] int32, the words that a teacher finds likeliest in each target's place, or None: not
            known. Zeros where there is no target.
        teacher_logp: [B, T, k + 1] float32, their log-probabilities, and last that of all other words together.
    """

    tokens: Array
    length: Array
    loss_mask: Array
    weight: Array
    teacher_words: Array = None
    teacher_logp: Array = None


class PackedPairs(NamedTuple):
    """Pairs side by side in rows of T slots, each `[prompt | chosen | rejected]`; padding is at a row's end.

    Rows stand in G blocks of r; what belongs to a block's pairs, K at most, is listed for the block.

    Attributes:
        tokens: [G, r, T] int32.
        position: [G, r, T] int32, from the pair's first token; both completions start after its prompt.
        segment: [G, r, T] int32, 1 and up for the pairs of a row, 0 for padding.
        branch: [G, r, T] int32, 0 in prompts, 1 in chosen, 2 in rejected completions.
        source: [G, C] int32, the slot that predicts a target: row * T + slot in its block.
        target: [G, C] int32, tokens of completions.
        owner: [G, C] int32, whose the target is: k for the chosen completion of pair k, K + k for the rejected one, 2K
            for padding.
        prompt_length: [G, K] int32; 1 where there is no pair, as are the two others.
        chosen_length: [G, K] int32.
        rejected_length: [G, K] int32.
        weight: [G, K] float32, 1 for a pair, 0 where there is none.
        reference_chosen: [G, K] float32, the reference's log-probability of the whole completion, or None: not known.
        reference_rejected: [G, K] float32, as `reference_chosen`.
        desirable: [G, K] float32, as of `PairBatch`.
    """

    tokens: Array
    position: Array
    segment: Array
    branch: Array
    source: Array
    target: Array
    owner: Array
    prompt_length: Array
    chosen_length: Array
    rejected_length: Array
    weight: Array
    reference_chosen: Array = None
    reference_rejected: Array = None
    desirable: Array = None


class PackedSequences(NamedTuple):
    """Sequences side by side in rows of T slots; padding is at a row's end. Rows stand in G blocks of r.

    Attributes:
        tokens: [G, r, T] int32.
        position: [G, r, T] int32, from the sequence's first token.
        segment: [G, r, T] int32, 1 and up for the sequences of a row, 0 for padding.
        source: [G, C] int32, the slot that predicts a target: row * T + slot in its block.
        target: [G, C] int32.
        loss_mask: [G, C] bool, False for padding.
        weight: [G] float32, 1 for a block with sequences, 0 for one without.
        teacher_words: [G, C, k] int32, as of `SequenceBatch`, by target.
        teacher_logp: [G, C, k + 1] float32, likewise.
    """

    tokens: Array
    position: Array
    segment: Array
    source: Array
    target: Array
    loss_mask: Array
    weight: Array
    teacher_words: Array = None
    teacher_logp: Array = None


class RolloutBatch(NamedTuple):
    """B prompts, each with an answer that a policy gave to it. Padding is 0 and means nothing, as everywhere.

    Attributes:
        tokens: [B, T] int32, prompt and answer, right-padded.
        length: [B] int32, of both together.
        answer: [B, R] int32, the answer alone, right-padded.
        loss_mask: [B, R] bool, True on the answer's tokens.
        weight: [B] float32, 1 for an answer, 0 for a row that only fills the batch.
        advantage: [B] float32, by how much the answer is better than others.
        limit: [B] float32, the most tokens that the answer could have had.
        old: [B, R] float32, the log-probability of each of its tokens when it was drawn, or None: that of the policy
            as it is.
    """

    tokens: Array
    length: Array
    answer: Array
    loss_mask: Array
    weight: Array
    advantage: Array
    limit: Array
    old: Array = None


Batch = PairBatch | SequenceBatch | PackedPairs | PackedSequences | RolloutBatch


def token_count(batch: Batch) -> Array:
    """Real tokens of a batch, int32 on devices; the prompt of a pair counts once, mismatched completions do not."""
    if isinstance(batch, PackedPairs) and batch.desirable is not None:
        return ((batch.segment > 0) & (batch.branch < 2)).sum()
    if isinstance(batch, PackedPairs | PackedSequences):
        return (batch.segment > 0).sum()
    weight = batch.weight.astype("int32")
    if isinstance(batch, PairBatch):
        own = batch.prompt_length + batch.chosen_length
        return ((own if batch.desirable is not None else own + batch.rejected_length) * weight).sum()
    return (batch.length * weight).sum()


def real_share(batch: Batch) -> float:
    """Share of the slots that go through the layers whose token is real, and no padding."""
    parts = [batch.prompt, batch.chosen, batch.rejected] if isinstance(batch, PairBatch) else [batch.tokens]
    return float(token_count(batch)) / sum(part.size for part in parts)
