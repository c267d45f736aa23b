"""The largest batch that an experiment's data may yield, before a row of it is read."""

from __future__ import annotations

import numpy as np
from jax.sharding import Sharding

from nnxdsl.config.batching import Batching, Packed, Padded
from nnxdsl.config.data import Data
from nnxdsl.data.batch import Batch
from nnxdsl.data.packing import Packer, Size
from nnxdsl.errors import NotRegisteredError
from nnxdsl.program.batches.base import AbstractArrays, Lengths, kind_of_data

PADDED = Padded()


def lengths(data: Data) -> Lengths:
    """The longest row that an experiment's data may yield; of no tokens where nothing bounds it."""
    kind = kind_of_data(data)
    return Lengths(0, 0) if kind is None else kind.padded(kind.abstract(data, AbstractArrays(1)))[1]


def abstract_batch(
    data: Data,
    rows: int,
    sharding: Sharding | None = None,
    *,
    has_ref_logps: bool = False,
    has_old_logps: bool = False,
    batching: Batching = PADDED,
    blocks: int = 1,
    teacher_top_k: int | None = None,
) -> Batch:
    """The largest batch of an experiment's data, without values.

    Args:
        data: Source of the rows.
        rows: Of the data, in a batch.
        sharding: Of all its arrays.
        has_ref_logps: Whether the batch carries the reference's log-probabilities.
        has_old_logps: Whether rollouts carry the log-probabilities of sampling.
        batching: How rows become arrays; bucketed batches are as long as padded ones at most.
        blocks: Of a packed batch.
        teacher_top_k: How many of a teacher's most likely tokens a batch has for each target; None for no teacher.

    Raises:
        NotRegisteredError: Nothing bounds the lengths of this data's rows.
    """
    kind = kind_of_data(data)
    if kind is None:
        raise NotRegisteredError(
            f"{type(data).__qualname__} has no length_fields, or no kind of batch is registered for "
            f"{data.batch_kind!r}, so its program cannot be compiled ahead of time"
        )
    packed = kind_of_data(data, is_packed=True)
    if isinstance(batching, Packed) and packed is not None:
        arrays = AbstractArrays(blocks, sharding, has_ref_logps, has_old_logps, teacher_top_k)
        return packed.abstract(data, arrays, largest(lengths(data), rows, batching, blocks))
    return kind.abstract(data, AbstractArrays(rows, sharding, has_ref_logps, has_old_logps, teacher_top_k))


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
