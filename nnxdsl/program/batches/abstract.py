"""The largest batch that an experiment's data may yield, before a row of it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import Sharding

from nnxdsl.config.batching import Batching, Packed, Padded
from nnxdsl.config.data import Data
from nnxdsl.data.batch import Batch, GroupBatch
from nnxdsl.data.packing import Packer, Size
from nnxdsl.errors import NotRegisteredError
from nnxdsl.program.batches.base import AbstractArrays, BatchKind, Lengths, kind_of_class, kind_of_data

PADDED = Padded()


def lengths(data: Data, num_generations: int = 1) -> Lengths:
    """The longest row that an experiment's data may yield; of no tokens where nothing bounds it.

    Args:
        data: Source of the rows.
        num_generations: Completions of a row of a batch of groups; 1 for none.
    """
    kind = _kind(data, num_generations)
    arrays = AbstractArrays(1, num_generations=num_generations)
    return Lengths(0, 0) if kind is None else kind.padded(kind.abstract(data, arrays))[1]


def _kind(data: Data, num_generations: int) -> BatchKind[Any] | None:
    kind = kind_of_data(data)
    return kind if kind is None or num_generations == 1 else kind_of_class(GroupBatch)


def abstract_batch(
    data: Data,
    rows: int,
    sharding: Sharding | None = None,
    *,
    has_ref_logps: bool = False,
    has_old_logps: bool = False,
    has_entropy_mask: bool = False,
    routed_experts: tuple[int, int] | None = None,
    served_teachers: int = 0,
    batching: Batching = PADDED,
    blocks: int = 1,
    teacher_top_k: int | None = None,
    num_generations: int = 1,
) -> Batch:
    """The largest batch of an experiment's data, without values.

    Args:
        data: Source of the rows.
        rows: Of the data, in a batch.
        sharding: Of all its arrays.
        has_ref_logps: Whether the batch carries the reference's log-probabilities.
        has_old_logps: Whether rollouts carry the log-probabilities of sampling.
        has_entropy_mask: Whether they say which tokens have the highest entropy.
        routed_experts: Numbers of layers and of experts of a token, where rollouts have these; else None.
        served_teachers: How many teachers behind servers give log-probabilities that they carry.
        batching: How rows become arrays; bucketed batches are as long as padded ones at most.
        blocks: Of a packed batch.
        teacher_top_k: How many of a teacher's most likely tokens a batch has for each target; None for no teacher.
        num_generations: Completions of a row of a batch of groups; 1 for none.

    Raises:
        NotRegisteredError: Nothing bounds the lengths of this data's rows.
    """
    kind = _kind(data, num_generations)
    if kind is None:
        raise NotRegisteredError(
            f"{type(data).__qualname__} has no length_fields, or no kind of batch is registered for "
            f"{data.batch_kind!r}, so its program cannot be compiled ahead of time"
        )
    packed = kind_of_data(data, is_packed=True)
    if isinstance(batching, Packed) and packed is not None:
        arrays = AbstractArrays(blocks, sharding, has_ref_logps, has_old_logps, teacher_top_k=teacher_top_k)
        return packed.abstract(data, arrays, largest(lengths(data), rows, batching, blocks))
    flags = has_ref_logps, has_old_logps, num_generations, teacher_top_k, has_entropy_mask, served_teachers
    arrays = AbstractArrays(rows, sharding, *flags, routed_experts)
    return kind.abstract(data, arrays)


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
