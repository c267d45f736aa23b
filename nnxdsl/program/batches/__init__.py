"""The kinds of batch, one a file: rows for the model, loss inputs, and lengths.

Importing the package registers the built-in kinds; `register` adds others.
"""

from nnxdsl.program.batches import groups, packed_pairs, packed_sequences, pairs, rollouts, sequences
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
    "groups",
    "kind_of",
    "packed_pairs",
    "packed_sequences",
    "pairs",
    "register",
    "rollouts",
    "sequences",
]
