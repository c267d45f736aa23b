"""The two kinds of batch that a training step reads. Knows shapes and meanings, nothing of files or tokenizers."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""numpy arrays as they leave this floor; jax arrays or tracers once a program has them."""


class PairBatch(NamedTuple):
    """B preference pairs, each prompt once. Padding is 0 and means nothing: masks go by length, never by id.

    Attributes:
        prompt: [B, P] int32, left-padded: the last prompt token always stands at P - 1.
        chosen: [B, R] int32, right-padded; ends with its end token unless it was cut.
        rejected: [B, R] int32, as `chosen`.
        prompt_length: [B] int32, tokens in the prompt, at least 1.
        chosen_length: [B] int32, at least 1.
        rejected_length: [B] int32, at least 1.
        weight: [B] float32, 1 for a pair, 0 for a row that only fills the batch.
    """

    prompt: Array
    chosen: Array
    rejected: Array
    prompt_length: Array
    chosen_length: Array
    rejected_length: Array
    weight: Array


class SequenceBatch(NamedTuple):
    """B token sequences with their targets marked. Padding is 0 and means nothing: masks go by length, never by id.

    Attributes:
        tokens: [B, T] int32, right-padded.
        length: [B] int32, at least 2.
        loss_mask: [B, T] bool, True where the token is a target (predicted from the one before); never at position 0.
        weight: [B] float32, 1 for a sequence, 0 for a row that only fills the batch.
    """

    tokens: Array
    length: Array
    loss_mask: Array
    weight: Array
