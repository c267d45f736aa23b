"""Stands in for the tokenizer of weights that come without one: rows of token ids need none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import attrs

from nnxdsl.errors import DataError

_PURPOSES = {
    "turn text into tokens (rows of text or chats, evaluation.prompts, rollouts)": (
        *("encode", "offsets", "bos_id", "bos_token", "special_ids"),
    ),
    "turn tokens into text (samples, rewards, the text of rows)": ("decode",),
    "know the size of the vocabulary": ("vocab_size",),
    "know where an answer ends (generation)": ("eos_id", "eos_token", "stop_ids"),
}


@attrs.frozen
class MissingTokenizer:
    """Refuses the attributes of a tokenizer with advice on what to set.

    Attributes:
        directory: Of the weights, where a tokenizer was searched.
        names: Files that were searched.
    """

    directory: Path
    names: tuple[str, ...]

    chat_template: ClassVar[None] = None
    tool_use_template: ClassVar[None] = None
    fingerprint: ClassVar[str] = "no tokenizer"

    def __getattr__(self, name: str) -> Any:
        """Raises DataError, with its purpose, for an attribute of tokenizers."""
        for purpose, names in _PURPOSES.items():
            if name in names:
                raise DataError(
                    f"{self.directory}: no tokenizer here, looked for {' and '.join(self.names)}; a tokenizer is "
                    f"required to {purpose}; set model.tokenizer=Tokenizer.File(path) or Tokenizer.Bytes(), or "
                    f"model.weights that come with one; only rows of token ids (prompt_ids, chosen_ids, ...) need none"
                )
        raise AttributeError(name)
