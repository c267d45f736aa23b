"""The longest batches that an experiment's data may yield, before a row of it is read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from nnxdsl.config.batching import Batching, Packed, Padded
from nnxdsl.config.data import Conversations, Data, Feedback, Preferences, Prompts, Text
from nnxdsl.data.batch import Batch, PackedPairs, PackedSequences, PairBatch, RolloutBatch, SequenceBatch
from nnxdsl.data.packing import Packer, Size
from nnxdsl.errors import NotRegisteredError
from nnxdsl.program.batches.base import Lengths

PADDED = Padded()


def lengths(data: Data) -> Lengths:
    """The longest rows that an experiment's data may yield."""
    match data:
        case Preferences() | Feedback():
            return Lengths(data.max_prompt_length + 2 * data.max_completion_length, 2 * data.max_completion_length)
        case Prompts():
            return Lengths(data.max_prompt_length + data.max_completion_length, data.max_completion_length)
        case Conversations() | Text():
            return Lengths(data.max_length, data.max_length - 1)
        case _:
            return Lengths(0, 0)


def abstract_batch(
    data: Data,
    rows: int,
    sharding: Sharding | None = None,
    *,
    has_cached: bool = False,
    batching: Batching = PADDED,
    blocks: int = 1,
    teacher_top_k: int | None = None,
) -> Batch:
    """The largest batch of an experiment's data, without its arrays.

    Args:
        data: Where rows come from.
        rows: Of the data, in a batch.
        sharding: Of all its arrays.
        has_cached: Whether pairs carry what the reference says of them, and answers what the policy said of them.
        batching: How rows become arrays; what is cut to its own length is padded at most.
        blocks: Of a packed batch.
        teacher_top_k: How many words of a teacher sequences carry for each target; None for nothing of one.

    Raises:
        NotRegisteredError: nothing is known of this data's lengths.
    """
    longest = lengths(data)
    packed = largest(longest, rows, batching, blocks) if isinstance(batching, Packed) and longest.trunk else None
    count = rows if packed is None else blocks

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=sharding)

    def top(targets: int, count: int) -> tuple[Any, Any]:
        return array(targets, count), array(targets, count + 1, dtype=jnp.float32)

    if packed is not None:
        tokens, targets = array(packed.rows, packed.length), array(packed.targets)
        if isinstance(data, Preferences | Feedback):
            items, weight = array(packed.items), array(packed.items, dtype=jnp.float32)
            cached, liked = weight if has_cached else None, weight if isinstance(data, Feedback) else None
            rows_of = tokens, tokens, tokens, tokens
            return PackedPairs(*rows_of, targets, targets, targets, items, items, items, weight, cached, cached, liked)
        mask = array(packed.targets, dtype=jnp.bool_)
        teacher = () if teacher_top_k is None else top(packed.targets, teacher_top_k)
        return PackedSequences(tokens, tokens, tokens, targets, targets, mask, array(dtype=jnp.float32), *teacher)
    weight = array(dtype=jnp.float32)
    match data:
        case (
            Preferences(max_prompt_length=prompt, max_completion_length=response)
            | Feedback(max_prompt_length=prompt, max_completion_length=response)
        ):
            tokens = (array(prompt), array(response), array(response))
            cached, liked = weight if has_cached else None, weight if isinstance(data, Feedback) else None
            return PairBatch(*tokens, array(), array(), array(), weight, cached, cached, liked)
        case Prompts(max_prompt_length=prompt, max_completion_length=response):
            mask, old = array(response, dtype=jnp.bool_), array(response, dtype=jnp.float32) if has_cached else None
            teacher = array(prompt + response), array(), array(response), mask
            return RolloutBatch(*teacher, weight, weight, weight, old)
        case Conversations(max_length=length) | Text(max_length=length):
            teacher = () if teacher_top_k is None else top(length, teacher_top_k)
            return SequenceBatch(array(length), array(), array(length, dtype=jnp.bool_), weight, *teacher)
        case _:
            raise NotRegisteredError(
                f"{type(data).__qualname__} says nothing of its lengths, so its program cannot be compiled ahead"
            )


def largest(longest: Lengths, rows: int, batching: Packed, blocks: int) -> Size:
    """The size of a packed batch whose rows are all the longest.

    Args:
        longest: Of the data; what is longer than a packed row is refused when the data is read.
        rows: Of the data, in a batch.
        batching: How long packed rows are.
        blocks: Of the batch.
    """
    tokens, targets = (np.array([min(size, batching.length or size)]) for size in (longest.trunk, longest.head))
    step = np.zeros(rows, np.int64)
    packer = Packer(tokens, targets, batch_size=rows, blocks=blocks, length=batching.length, sample=[step])
    return packer.pack(step)[0]
