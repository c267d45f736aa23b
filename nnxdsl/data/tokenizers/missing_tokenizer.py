"""What stands for the tokenizer of weights that come without one: rows of token ids need none. Knows no row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import attrs

from nnxdsl.errors import DataError

_INTO_TOKENS = "turn text into tokens (rows of text or chats, evaluation.prompts, rollouts)"
_INTO_TEXT = "turn tokens into text (samples, rewards, the text of rows)"
_ENDS = "know where an answer ends (generation)"

_NEEDED_FOR: Mapping[str, str] = {
    "encode": _INTO_TOKENS,
    "decode": _INTO_TEXT,
    "vocab_size": "know the size of the vocabulary",
    "bos_id": _INTO_TOKENS,
    "bos_token": _INTO_TOKENS,
    "eos_id": _ENDS,
    "eos_token": _ENDS,
    "special_ids": _INTO_TOKENS,
    "stop_ids": _ENDS,
}


@attrs.frozen
class MissingTokenizer:
    """Refuses whatever a tokenizer is required for, and says what to set.

    Attributes:
        directory: Of the weights, where a tokenizer was looked for.
        names: Files that were looked for.
    """

    directory: Path
    names: tuple[str, ...]

    chat_template: ClassVar[None] = None
    fingerprint: ClassVar[str] = "no tokenizer"

    def __getattr__(self, name: str) -> Any:
        """Refuses what a tokenizer would have.

        Raises:
            DataError: Says what a tokenizer is required for.
        """
        if name in _NEEDED_FOR:
            self._refuse(_NEEDED_FOR[name])
        raise AttributeError(name)

    def _refuse(self, purpose: str) -> NoReturn:
        raise DataError(
            f"{self.directory}: no tokenizer here, looked for {' and '.join(self.names)}; a tokenizer is required to "
            f"{purpose}; set model.tokenizer=Tokenizer.File(path) or Tokenizer.Bytes(), or model.weights that come "
            f"with one; only rows of token ids (prompt_ids, chosen_ids, ...) need none"
        )
