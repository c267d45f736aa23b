"""Writes the tokenizer of a run, and the generation config, into a directory of weights."""

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
from nnxdsl.data.tokenizers.encode import stop_ids
from nnxdsl.data.tokenizers.huggingface import ADDITIONAL_TEMPLATES, FileTokenizer, token_text
from nnxdsl.data.tokenizers.missing_tokenizer import MissingTokenizer
from nnxdsl.errors import DataError, NnxdslError
from nnxdsl.formats.files import read_json
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
"""Files of tokenizers and generation in a Hub directory."""


@attrs.frozen
class TokenizerFiles:
    """The tokenizer files for a directory of weights.

    Attributes:
        description: A description for the user.
        source: The directory to copy files from; None for none.
        only: The tokenizer's file, if the experiment names a file and not a directory.
        template: A chat template that replaces the directory's own.
        tokenizer: The tokenizer; None if it could not be opened.
    """

    description: str
    source: Path | None = None
    only: Path | None = None
    template: str | None = None
    tokenizer: TokenizerBase | None = None

    @classmethod
    def from_experiment(cls, experiment: Experiment, home: Path) -> TokenizerFiles:
        """The files of the tokenizer that a run used."""
        try:
            owner = sources.tokenizer_owner(experiment)
            directory = sources.tokenizer_directory(owner, home)
            tokenizer = open_tokenizer(owner.model.tokenizer, directory)
        except (NnxdslError, OSError) as error:
            return cls(f"none, since the run's tokenizer cannot be opened: {error}")
        if isinstance(tokenizer, MissingTokenizer):
            return cls("none, since the run's weights have no tokenizer", directory)
        if isinstance(tokenizer, BytesTokenizer):
            return cls("the built-in byte tokenizer, as a tokenizer.json with the same ids", tokenizer=tokenizer)
        spec = owner.model.tokenizer
        if isinstance(spec, File):
            path = Path(spec.path).expanduser()
            only, directory = (path, path.parent) if path.is_file() else (None, path)
            template = tokenizer.chat_template if spec.chat_template is not None else None
            return cls(f"that of {path}", directory, only, template, tokenizer)
        return cls(f"that of {directory}", directory, tokenizer=tokenizer)

    def ids(self, vocab_size: int) -> dict[str, Any]:
        """The ids of special tokens for `config.json`; `eos_token_id` has all at which the run's sampling stops.

        Ids beyond the model's vocabulary are left out, since transformers would refuse them: a run on rows of token ids
        may have a tokenizer with a larger vocabulary.
        """
        if self.tokenizer is None:
            return {}
        ids: dict[str, Any] = {"bos_token_id": self.tokenizer.bos_id}
        if (pad := self._pad()) is not None:
            ids["pad_token_id"] = pad
        usable = {name: token for name, token in ids.items() if token is None or token < vocab_size}
        return {**usable, **self._stops(vocab_size)}

    def _pad(self) -> int | None:
        """The id of padding, without which transformers classifies no batches; None if the tokenizer names none."""
        if isinstance(self.tokenizer, BytesTokenizer):
            return self.tokenizer.pad_id
        text = None if self.source is None else token_text(self.source / "tokenizer_config.json", "pad_token")
        if text is None or self.tokenizer is None:
            return None
        ids = self.tokenizer.encode(text)
        return ids[0] if len(ids) == 1 and ids[0] in self.tokenizer.special_ids else None

    def _stops(self, vocab_size: int) -> dict[str, int | list[int]]:
        """`eos_token_id`: EOS first, a list if there are several; {} if the model's vocabulary has none of them."""
        assert self.tokenizer is not None
        stops, eos = stop_ids(self.tokenizer), self.tokenizer.eos_id
        usable = [token for token in (eos, *sorted(stops - {eos})) if token < vocab_size]
        return {"eos_token_id": usable if len(usable) > 1 else usable[0]} if usable else {}

    def write(self, directory: Path, max_length: int, vocab_size: int) -> None:
        """Writes the files.

        Args:
            directory: The directory of the weights.
            max_length: The maximum length of the model.
            vocab_size: The size of the model's vocabulary.

        Raises:
            DataError: The files hold another tokenizer.
        """
        if self.source is not None:
            copy(self.source, directory)
        if self.only is not None:
            shutil.copyfile(self.only, directory / ("tokenizer" + self.only.suffix))
        if self.template is not None:
            shutil.rmtree(directory / ADDITIONAL_TEMPLATES, ignore_errors=True)
            (directory / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        if isinstance(self.tokenizer, BytesTokenizer):
            for name, content in byte_files(self.tokenizer, max_length).items():
                text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                (directory / name).write_text(text, encoding="utf-8")
        if self.tokenizer is not None:
            self._write_generation(directory / GENERATION, vocab_size)
        self._check(directory)

    def _write_generation(self, file: Path, vocab_size: int) -> None:
        """Writes the ids at which the run's sampling stops beside the settings in a file that was copied."""
        settings = read_json(file) if file.is_file() else self.ids(vocab_size)
        stops = self._stops(vocab_size).get("eos_token_id")
        if file.is_file() and _as_set(settings.get("eos_token_id")) == _as_set(stops):
            return
        file.write_text(json.dumps({**settings, "eos_token_id": stops}, indent=2) + "\n", encoding="utf-8")

    def _check(self, directory: Path) -> None:
        if not isinstance(self.tokenizer, FileTokenizer):
            return
        written = open_tokenizer(Tokenizer.File(str(directory)), None)
        if not isinstance(written, FileTokenizer) or written.text_digest != self.tokenizer.text_digest:
            raise DataError(f"{directory}: internal error: its tokenizer is not that of the run, {self.description}")


def _as_set(ids: int | list[int] | None) -> set[int]:
    if ids is None:
        return set()
    return set(ids) if isinstance(ids, list) else {ids}


def copy(source: Path, directory: Path) -> list[str]:
    """Copies the tokenizer files of one directory to another, and returns their names."""
    others = source / ADDITIONAL_TEMPLATES
    templates = sorted(others.glob("*.jinja")) if others.is_dir() else []
    names = [name for name in NAMES if (source / name).is_file()]
    names += [f"{ADDITIONAL_TEMPLATES}/{file.name}" for file in templates]
    if templates:
        (directory / ADDITIONAL_TEMPLATES).mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, directory / name)
    return names
