"""A source of data of somebody else's: the spec, what reads its file, and its rows as batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import FileData
from nnxdsl.data import Encoder, Sequences, TokenizerBase, load
from nnxdsl.data.dataset import TokenizedRows, fill_rows
from nnxdsl.data.loaders.build import build_dataset
from nnxdsl.data.loaders.conversations import sequence
from nnxdsl.data.loaders.convert import Example
from small_lab.scored_batch import ScoredBatch


@attrs.frozen(kw_only=True)
class Scored(FileData):
    """Texts with a score: `text` and `score`, a number, in each row.

    Attributes:
        path: A JSONL file.
        max_length: Longest text in tokens.
    """

    batch_kind: ClassVar[str] = "scored"
    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    rows: ClassVar[str] = "scored texts"

    path: str = attrs.field(kw_only=False)
    max_length: int = 32


class ScoredSequences(Sequences):
    """Sequences, each with a score."""

    def __init__(self, rows: TokenizedRows) -> None:
        super().__init__(rows)
        self.scores = np.array([row["score"] for row in rows.columns], np.float32)

    def batch(self, indices: Sequence[int] | npt.NDArray[np.integer], size: int) -> ScoredBatch:
        """The sequences at `indices` with their scores; see `Dataset.batch`."""
        rows, _ = fill_rows(indices, size)
        same = super().batch(indices, size)
        return ScoredBatch(same.tokens, same.length, same.loss_mask, same.weight, self.scores[rows])


@load.register(Scored)
def _(data: Scored, tokenizer: TokenizerBase, *, vocabulary: int | None = None, **_: Any) -> ScoredSequences:
    encoder = Encoder(tokenizer)

    def convert(row: Mapping[str, Any]) -> Example:
        ids = encoder.ended(encoder.text(row["text"]))
        return sequence(ids, [True] * len(ids), data.max_length)._replace(columns=dict(row))

    parts = ("tokens", "target")
    return ScoredSequences(build_dataset(data, convert, parts, tokenizer=tokenizer, vocabulary=vocabulary))
