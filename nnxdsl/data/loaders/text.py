"""Plain text for language modelling: one document per row, every token after the first is a target."""

from __future__ import annotations

from nnxdsl.config.data import Text
from nnxdsl.data.loaders.build import build_dataset, load, require_fit
from nnxdsl.data.loaders.conversations import sequence
from nnxdsl.data.loaders.convert import Example
from nnxdsl.data.loaders.fields import Fields, read_text, require
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import Encoder


@load.register(Text)
def load_text(
    data: Text,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
    cache: TokenCache | None = None,
) -> Sequences:
    """Texts of a file; see `load`. Each is BOS + text + EOS, truncated on its right; targets are all tokens."""
    encoder = Encoder(tokenizer)

    def convert(row: Fields) -> Example:
        require(row, (data.field,), f"Data.Text reads '{data.field}' (set by field=...)")
        text = encoder.guard.text(read_text(row, data.field), data.field, opens=True, ends=True)
        if not text.strip():
            raise RowError("empty text", f"field '{data.field}' is empty")
        ids = encoder.ended(encoder.text(text))
        return sequence(ids, [True] * len(ids), data.max_length)

    rows = build_dataset(
        data, convert, ("tokens", "target"), tokenizer=tokenizer, vocabulary=vocabulary, reads={data.field}, cache=cache
    )
    require_fit(rows.parts["tokens"].lengths.__getitem__, rows, max_position, "lower data.max_length")
    return Sequences(rows)
