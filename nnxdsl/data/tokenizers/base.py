"""The protocol of tokenizers, the built-in byte-level one, and the choice of an experiment's tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, cast

from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.tokenizer import Auto, Bytes, File, Tokenizer
from nnxdsl.data.tokenizers.chat_template import TURNS, template_source
from nnxdsl.data.tokenizers.huggingface import HFTokenizer, SentencePieceTokenizer
from nnxdsl.data.tokenizers.missing_tokenizer import MissingTokenizer
from nnxdsl.errors import DataError

_NAMES = ("tokenizer.json", "tokenizer.model")


class TokenizerBase(Protocol):
    """Protocol of a tokenizer.

    Attributes:
        vocab_size: Number of ids.
        bos_id: Token before plain text, None if this tokenizer adds none.
        bos_token: BOS in chat templates, "" if there is none; may exist if `bos_id` is None.
        eos_id: Token that ends a text.
        eos_token: Its text.
        special_ids: Special tokens, which `decode` skips.
        stop_ids: Ids at which generation stops: `eos_id`, those of `generation_config.json`, usual end-of-turn tokens.
        chat_template: jinja2 source, None if there is none.
        tool_use_template: That of chats with tools, the template named "tool_use"; None for `chat_template`.
        fingerprint: sha256 hex over everything that determines the ids of texts and chats.
    """

    vocab_size: int
    bos_id: int | None
    bos_token: str
    eos_id: int
    eos_token: str
    special_ids: frozenset[int]
    stop_ids: frozenset[int]
    chat_template: str | None
    tool_use_template: str | None
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS and EOS; a special token in the text becomes its id."""
        ...

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """For each id of `encode(text)` the characters of `text` that it stands for: the first, and one past the last.

        All ids of a character that takes several have its place. Both ends ascend.
        """
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`, with bytes that are not UTF-8 as U+FFFD."""
        ...


class BytesTokenizer:
    """Every UTF-8 byte is a token, followed by five special tokens; further ids up to `vocab_size` are unused.

    It needs no file, for tiny models and tests; `decode(encode(text), skip_special=False)` restores every text.
    """

    tool_use_template: str | None = None
    SPECIAL = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")

    def __init__(self, chat_template: str | None = None) -> None:
        self.vocab_size = 320  # 261 in use; a multiple of 64 divides over any usual mesh
        self.pad_id, bos_id, self.eos_id, self.start_of_turn_id, self.end_of_turn_id = range(256, 261)
        self.bos_id: int | None = bos_id
        self.bos_token, self.eos_token = "<bos>", "<eos>"
        self.special_ids = frozenset(range(256, self.vocab_size))
        self.stop_ids = frozenset({self.eos_id, self.end_of_turn_id})
        self.chat_template: str | None = TURNS if chat_template is None else chat_template
        self._id_of = {token: 256 + i for i, token in enumerate(self.SPECIAL)}
        self._split = re.compile("(" + "|".join(map(re.escape, self.SPECIAL)) + ")").split
        self.fingerprint = hashlib.sha256(f"nnxdsl bytes 1\n{self.chat_template}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`, special tokens as one id each."""
        if "<" not in text:
            return list(text.encode("utf-8"))
        ids: list[int] = []
        for part in self._split(text):
            if part in self._id_of:
                ids.append(self._id_of[part])
            else:
                ids.extend(part.encode("utf-8"))
        return ids

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The character of each byte, or the characters of each special token."""
        spans: list[tuple[int, int]] = []
        place = 0
        for part in self._split(text):
            if part in self._id_of:
                spans.append((place, place + len(part)))
            else:
                for start, character in enumerate(part, start=place):
                    spans += [(start, start + 1)] * len(character.encode("utf-8"))
            place += len(part)
        return spans

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        out = bytearray()
        for token in ids:
            if token < 256:
                out.append(token)
            elif not skip_special:
                marker = self.SPECIAL[token - 256] if token < 256 + len(self.SPECIAL) else f"<unused{token}>"
                out += marker.encode()
        return out.decode("utf-8", errors="replace")


def open_tokenizer(spec: Tokenizer, weights_dir: Path | None) -> TokenizerBase:
    """The tokenizer of an experiment with weights in `weights_dir` (None for random ones).

    `Tokenizer.Auto()` is the tokenizer beside the weights (a `MissingTokenizer` if there is none), else bytes.

    Raises:
        DataError: There is no tokenizer at the path, or it cannot be read.
    """
    match spec:
        case Tokenizer.Bytes(chat_template=template):
            return BytesTokenizer(None if template is None else template_source(template))
        case Tokenizer.File(path=path, chat_template=template):
            return _from_files(Path(path).expanduser(), template)
        case Tokenizer.Auto():
            return BytesTokenizer() if weights_dir is None else _tokenizer_of_weights(weights_dir)
        case _:
            raise DataError(f"cannot open {spec!r}; use Tokenizer.Auto, Tokenizer.Bytes or Tokenizer.File")


def mismatch(spec: Tokenizer, tokenizer: TokenizerBase, weights_dir: Path | None, vocab_size: int) -> str | None:
    """A message if a tokenizer does not match a model, with the fix; None if it does.

    An embedding may have more rows than the tokenizer has ids, and random weights have no tokenizer. Special tokens
    above all others may be missing in it, as in the published Gemma 3 1B: rows with them are refused one by one.

    Args:
        spec: The setting, which may allow the mismatch.
        tokenizer: The tokenizer that it names.
        weights_dir: Of the weights; None for random ones.
        vocab_size: The number of rows of the model's embedding.
    """
    allows = isinstance(spec, Bytes | File) and spec.allow_mismatch
    if allows or isinstance(tokenizer, MissingTokenizer) or (isinstance(spec, Auto) and weights_dir is None):
        return None
    if isinstance(spec, Bytes) and weights_dir is not None and (file := _file_in(weights_dir)) is not None:
        return (
            f"Tokenizer.Bytes() has other ids than {file}, the tokenizer of the weights; unset it to use that one, "
            f"or set Tokenizer.Bytes(allow_mismatch=True)"
        )
    last = _last_id(tokenizer)
    if last < vocab_size:
        return None
    used = File(str(weights_dir)) if isinstance(spec, Auto) else spec
    return (
        f"{render(used)} has ids up to {last:,}, but the model's embedding has {vocab_size:,} rows; set the tokenizer "
        f"of the model with Tokenizer.File(path), or, if the data is token ids, set "
        f"{render(evolve(used, {'allow_mismatch': True}))}"
    )


def _last_id(tokenizer: TokenizerBase) -> int:
    """The largest id that is not one of the special tokens above all others; EOS and BOS count."""
    last = tokenizer.vocab_size - 1
    while last in tokenizer.special_ids:
        last -= 1
    return max(last, tokenizer.eos_id, tokenizer.bos_id or 0)


def _file_in(directory: Path) -> Path | None:
    """The file of the tokenizer in a directory; None if there is none."""
    return next((directory / name for name in _NAMES if (directory / name).is_file()), None)


def _tokenizer_of_weights(directory: Path) -> TokenizerBase:
    if directory.is_dir() and _file_in(directory) is None:
        return cast("TokenizerBase", MissingTokenizer(directory, _NAMES))
    return _from_files(directory, None)


def _from_files(path: Path, template: str | None) -> TokenizerBase:
    file = _file_in(path) or path
    if not file.exists():
        raise DataError(f"{path}: no such file or directory; a tokenizer is a directory with {' or '.join(_NAMES)}")
    if file.is_dir():
        raise DataError(
            f"{path}: no tokenizer here, looked for {' and '.join(_NAMES)}; name one with Tokenizer.File(path), "
            f"or take the built-in Tokenizer.Bytes()"
        )
    if file.suffix == ".json":
        return HFTokenizer(file, chat_template=template)
    if file.suffix == ".model":
        return SentencePieceTokenizer(file, chat_template=template)
    raise DataError(f"{file}: expected a tokenizer.json (tokenizers) or a *.model (sentencepiece)")
