"""The kinds of batch of a training step."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""A numpy array; in a program a jax array or tracer."""


class PairBatch(NamedTuple):
    """B preference pairs, each prompt once. Padding is 0; masks are made from lengths, not from ids.

    In KTO, `chosen` is a row's own completion, whatever its label, and `rejected` a mismatched one from a row with
    another prompt: the loss reads its log-probability without a gradient.

    Attributes:
        prompt: [B, P] int32, left-padded: the last prompt token is at P - 1.
        chosen: [B, R] int32, right-padded; ends with its end token unless it was truncated.
        rejected: [B, R] int32, as `chosen`.
        prompt_length: [B] int32, at least 1.
        chosen_length: [B] int32, at least 1.
        rejected_length: [B] int32, at least 1.
        weight: [B] float32, 1 for a pair, 0 for a row that fills up the batch.
        reference_chosen: [B] float32, cached reference log-probability of the whole completion, or None.
        reference_rejected: [B] float32, as `reference_chosen`.
        desirable: [B] float32, in KTO 1 for a desirable completion, else 0. None for pairs.
        chosen_mask: [B, R] bool, True for targets: of completions of several turns the tokens of the assistant, while
            those of others are context. None where every token of all completions is a target.
        rejected_mask: [B, R] bool, as `chosen_mask`.
        margin: [B] float32, by how much the reward of `chosen` is to exceed that of `rejected`; None for 0.
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
    chosen_mask: Array = None
    rejected_mask: Array = None
    margin: Array = None


class SequenceBatch(NamedTuple):
    """B token sequences with loss masks. Padding is 0; masks are made from lengths, not from ids.

    Attributes:
        tokens: [B, T] int32, right-padded.
        length: [B] int32, at least 2.
        loss_mask: [B, T] bool, True for targets (predicted from the token before); never at position 0.
        weight: [B] float32, 1 for a sequence, 0 for a row that fills up the batch.
        teacher_top_ids: [B, T, k] int32, the teacher's most likely tokens at each target, or None; elsewhere 0.
        teacher_top_logps: [B, T, k + 1] float32, their log-probabilities, and last that of all other tokens together.
    """

    tokens: Array
    length: Array
    loss_mask: Array
    weight: Array
    teacher_top_ids: Array = None
    teacher_top_logps: Array = None


class PackedPairs(NamedTuple):
    """Pairs packed in rows of T slots, each `[prompt | chosen | rejected]`; padding is at the end of a row.

    There are G blocks of r rows; arrays per target and per pair (at most K) are by block.

    Attributes:
        tokens: [G, r, T] int32.
        position: [G, r, T] int32, from the pair's first token; both completions follow its prompt.
        segment: [G, r, T] int32, 1 and up for the pairs of a row, 0 for padding.
        branch: [G, r, T] int32, 0 in prompts, 1 in chosen, 2 in rejected completions.
        source: [G, C] int32, the slot that predicts a target: row * T + slot in its block.
        target: [G, C] int32, tokens of completions; of several turns, those of the assistant.
        owner: [G, C] int32, the completion of a target: k for the chosen one of pair k, K + k for the rejected one, 2K
            for padding.
        prompt_length: [G, K] int32; 1 where there is no pair, as in the two others.
        chosen_length: [G, K] int32.
        rejected_length: [G, K] int32.
        weight: [G, K] float32, 1 for a pair, 0 where there is none.
        reference_chosen: [G, K] float32, as in `PairBatch`.
        reference_rejected: [G, K] float32, as in `PairBatch`.
        desirable: [G, K] float32, as in `PairBatch`.
        chosen_targets: [G, K] int32, targets of the chosen completion. None where every token is one.
        rejected_targets: [G, K] int32, as `chosen_targets`.
        margin: [G, K] float32, as in `PairBatch`.
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
    chosen_targets: Array = None
    rejected_targets: Array = None
    margin: Array = None


class PackedSequences(NamedTuple):
    """Sequences packed in G blocks of r rows of T slots; padding is at the end of a row.

    Attributes:
        tokens: [G, r, T] int32.
        position: [G, r, T] int32, from the sequence's first token.
        segment: [G, r, T] int32, 1 and up for the sequences of a row, 0 for padding.
        source: [G, C] int32, the slot that predicts a target: row * T + slot in its block.
        target: [G, C] int32.
        loss_mask: [G, C] bool, False for padding.
        weight: [G] float32, 1 for a block with sequences, 0 for one without.
        teacher_top_ids: [G, C, k] int32, as in `SequenceBatch`, by target.
        teacher_top_logps: [G, C, k + 1] float32, likewise.
    """

    tokens: Array
    position: Array
    segment: Array
    source: Array
    target: Array
    loss_mask: Array
    weight: Array
    teacher_top_ids: Array = None
    teacher_top_logps: Array = None


class RolloutBatch(NamedTuple):
    """B prompts, each with a completion sampled from the policy. Padding is 0.

    Attributes:
        tokens: [B, T] int32, prompt and completion, right-padded.
        length: [B] int32, of both together.
        completion_ids: [B, R] int32, the completion, right-padded.
        completion_length: [B] int32, tokens of the completion.
        loss_mask: [B, R] bool, True on tokens of the completion that the policy sampled.
        weight: [B] float32, 1 for a completion, 0 for one that is left out of the loss, or fills up the batch.
        advantages: [B, R] float32.
        max_completion_length: [B] float32, the most tokens of a completion in sampling.
        old_logps: [B, R] float32, log-probability of each token when it was sampled, or None for the policy's own.
        ref_logps: [B, R] float32, log-probability of each token under the reference, where rewards have the KL
            divergence; else None.
        sampler_logps: [B, R] float32, log-probability of each token as the sampler computed it, or None.
        entropy_mask: [B, R] bool, True on the tokens of highest entropy, which the policy term has; None for all.
        teacher_logps: [B, R] float32, log-probability of each token under a teacher behind a server; else None.
        teacher_top_ids: [B, R, k] int32, the most likely tokens of such a teacher at each token, or None.
        teacher_top_logps: [B, R, k + 1] float32, their log-probabilities, and last that of all other tokens together.
        teacher_index: [B] int32, which of several teachers gave them, from 0; else None.
        teacher_tokens: [B, T'] int32, the teacher's prompt and the completion, right-padded; None where the teacher
            sees the policy's prompt.
        teacher_length: [B] int32, of both together, or None.
        routed_experts: [B, T, L, k] int16, the experts of each token in sampling, by layer; -1 in padding and in layers
            without experts. None where routers select anew.
    """

    tokens: Array
    length: Array
    completion_ids: Array
    completion_length: Array
    loss_mask: Array
    weight: Array
    advantages: Array
    max_completion_length: Array
    old_logps: Array = None
    ref_logps: Array = None
    sampler_logps: Array = None
    entropy_mask: Array = None
    teacher_logps: Array = None
    teacher_top_ids: Array = None
    teacher_top_logps: Array = None
    teacher_index: Array = None
    teacher_tokens: Array = None
    teacher_length: Array = None
    routed_experts: Array = None


class GroupBatch(NamedTuple):
    """P prompts, each once, with the G completions of its group. Padding is 0.

    Attributes:
        prompt: [P, L] int32, left-padded: the last prompt token is at L - 1.
        prompt_length: [P] int32, at least 1.
        completion_ids: [P, G, R] int32, right-padded.
        completion_length: [P, G] int32, as in `RolloutBatch`.
        loss_mask: [P, G, R] bool, as in `RolloutBatch`.
        weight: [P, G] float32, as in `RolloutBatch`.
        advantages: [P, G, R] float32.
        max_completion_length: [P, G] float32, as in `RolloutBatch`.
        old_logps: [P, G, R] float32, as in `RolloutBatch`.
        ref_logps: [P, G, R] float32, as in `RolloutBatch`.
        sampler_logps: [P, G, R] float32, as in `RolloutBatch`.
        entropy_mask: [P, G, R] bool, as in `RolloutBatch`.
        teacher_logps: [P, G, R] float32, as in `RolloutBatch`.
        teacher_top_ids: [P, G, R, k] int32, as in `RolloutBatch`.
        teacher_top_logps: [P, G, R, k + 1] float32, as in `RolloutBatch`.
        teacher_index: [P, G] int32, as in `RolloutBatch`.
        teacher_prompt: [P, L'] int32, the teacher's prompts, left-padded; None where it sees those of the policy.
        teacher_prompt_length: [P] int32, at least 1, or None.
        routed_experts: [P, L + G R, layers, k] int16, as in `RolloutBatch`: of the prompt, and of the completions.
    """

    prompt: Array
    prompt_length: Array
    completion_ids: Array
    completion_length: Array
    loss_mask: Array
    weight: Array
    advantages: Array
    max_completion_length: Array
    old_logps: Array = None
    ref_logps: Array = None
    sampler_logps: Array = None
    entropy_mask: Array = None
    teacher_logps: Array = None
    teacher_top_ids: Array = None
    teacher_top_logps: Array = None
    teacher_index: Array = None
    teacher_prompt: Array = None
    teacher_prompt_length: Array = None
    routed_experts: Array = None


#: The arrays that a `RolloutBatch` and a `GroupBatch` both hold: a row for each completion, in the latter by group.
PER_COMPLETION = tuple(name for name in GroupBatch._fields if name in RolloutBatch._fields and name != "routed_experts")

Batch = PairBatch | SequenceBatch | PackedPairs | PackedSequences | RolloutBatch | GroupBatch


def token_count(batch: Batch) -> Array:
    """Tokens of a batch without padding; the prompt of a pair or group counts once, mismatched completions do not."""
    if isinstance(batch, PackedPairs) and batch.desirable is not None:
        return ((batch.segment > 0) & (batch.branch < 2)).sum()
    if isinstance(batch, PackedPairs | PackedSequences):
        return (batch.segment > 0).sum()
    if isinstance(batch, GroupBatch):
        is_real = batch.weight.max(axis=1) > 0
        return ((batch.prompt_length + batch.completion_length.sum(axis=1)) * is_real).sum()
    weight = batch.weight.astype("int32")
    if isinstance(batch, PairBatch):
        counted = batch.prompt_length + batch.chosen_length
        return ((counted if batch.desirable is not None else counted + batch.rejected_length) * weight).sum()
    return (batch.length * weight).sum()


def non_padding_fraction(batch: Batch) -> float:
    """Fraction of the slots in the layers that are not padding."""
    if isinstance(batch, PairBatch):
        parts = [batch.prompt, batch.chosen, batch.rejected]
    else:
        parts = [batch.prompt, batch.completion_ids] if isinstance(batch, GroupBatch) else [batch.tokens]
    return float(token_count(batch)) / sum(part.size for part in parts)
