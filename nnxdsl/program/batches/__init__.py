"""The kinds of batch, one a file: how each goes through a model, what the loss reads of it, and what it costs.

Importing the package registers the built-in kinds; `register` adds others.
"""

from nnxdsl.program.batches import packed_pairs, packed_sequences, pairs, rollouts, sequences
from nnxdsl.program.batches.base import (
    AbstractArrays,
    BatchKind,
    BatchLengths,
    Lengths,
    LossInputs,
    PairOptions,
    Rows,
    Targets,
    kind_of,
    register,
)

__all__ = [
    "AbstractArrays",
    "BatchKind",
    "BatchLengths",
    "Lengths",
    "LossInputs",
    "PairOptions",
    "Rows",
    "Targets",
    "kind_of",
    "packed_pairs",
    "packed_sequences",
    "pairs",
    "register",
    "rollouts",
    "sequences",
]
