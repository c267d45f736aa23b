"""The tokenizer of a run as files beside its weights, and what generation needs to know of it; knows no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.tokenizer import File, Tokenizer
from nnxdsl.data.tokenizers.base import BytesTokenizer, TokenizerBase, open_tokenizer
from nnxdsl.data.tokenizers.bytes_as_hf import byte_files
from nnxdsl.data.tokenizers.missing_tokenizer import MissingTokenizer
from nnxdsl.errors import DataError, NnxdslError
from nnxdsl.weights import sources

GENERATION = "generation_config.json"
NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)
"""Files that stand beside weights on the Hub and belong to the tokenizer, or to generation."""


@attrs.frozen
class TokenizerFiles:
    """What a directory of weights is given beside them.

    Attributes:
        description: what it is, for people.
        source: the directory that it is copied from; None where nothing is.
        only: the tokenizer's own file, where it was named and not its directory.
        template: the chat template that is used in place of the directory's own.
        tokenizer: the tokenizer itself; None where it could not be opened.
    """

    description: str
    source: Path | None = None
    only: Path | None = None
    template: str | None = None
    tokenizer: TokenizerBase | None = None

    @classmethod
    def of(cls, experiment: Experiment, home: Path) -> TokenizerFiles:
        """Those of the tokenizer that a run used."""
        try:
            owner = sources.tokenizer_owner(experiment)
            directory = sources.tokenizer_directory(owner, home)
            tokenizer = open_tokenizer(owner.model.tokenizer, directory)
        except (NnxdslError, OSError) as error:
            return cls(f"none is written, since that of the run cannot be opened: {error}")
        if isinstance(tokenizer, MissingTokenizer):
            return cls("none is written, since the weights of the run came without one", directory)
        if isinstance(tokenizer, BytesTokenizer):
            return cls("the built-in bytes, as a tokenizer.json that gives the same ids", tokenizer=tokenizer)
        spec = owner.model.tokenizer
        if isinstance(spec, File):
            path = Path(spec.path).expanduser()
            only, directory = (path, path.parent) if path.is_file() else (None, path)
            template = tokenizer.chat_template if spec.chat_template is not None else None
            return cls(f"that of {path}", directory, only, template, tokenizer)
        return cls(f"that of {directory}", directory, tokenizer=tokenizer)

    def ids(self, words: int) -> dict[str, Any]:
        """What `config.json` says of it: the ids that begin, end and fill a text.

        Those beyond so many words of the model are left out, which transformers would not load: a run on rows of ids
        may have a tokenizer with more.
        """
        if self.tokenizer is None:
            return {}
        found: dict[str, Any] = {"bos_token_id": self.tokenizer.bos_id, "eos_token_id": self.tokenizer.eos_id}
        if isinstance(self.tokenizer, BytesTokenizer):
            found["pad_token_id"] = self.tokenizer.pad_id
        return {name: word for name, word in found.items() if word is None or word < words}

    def write(self, directory: Path, max_length: int, words: int) -> None:
        """Writes the files.

        Args:
            directory: where to.
            max_length: positions of the model.
            words: of the model's vocabulary.

        Raises:
            DataError: what was written is not the same tokenizer.
        """
        if self.source is not None:
            copy(self.source, directory)
        if self.only is not None:
            shutil.copyfile(self.only, directory / ("tokenizer" + self.only.suffix))
        if self.template is not None:
            (directory / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        if isinstance(self.tokenizer, BytesTokenizer):
            for name, content in byte_files(self.tokenizer, max_length).items():
                text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                (directory / name).write_text(text, encoding="utf-8")
        if self.tokenizer is not None and not (directory / GENERATION).exists():
            ends = [word for word in sorted(self.tokenizer.stop_ids) if word < words]
            settings = {**self.ids(words), "eos_token_id": ends or None}
            (directory / GENERATION).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        self._check(directory)

    def _check(self, directory: Path) -> None:
        if self.tokenizer is None or isinstance(self.tokenizer, BytesTokenizer):
            return
        if open_tokenizer(Tokenizer.File(str(directory)), None).fingerprint != self.tokenizer.fingerprint:
            raise DataError(
                f"{directory}: its tokenizer is not that of the run, {self.description}; this should not be"
            )


def copy(source: Path, directory: Path) -> list[str]:
    """Copies the tokenizer's files of one directory to another, and gives their names."""
    found = [name for name in NAMES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, directory / name)
    return found
