"""Tokenizers of model directories: `tokenizer.json` and sentencepiece, with the JSON files beside them."""

from __future__ import annotations

import bisect
import hashlib
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import attrs
import tokenizers

from nnxdsl.data.loaders.files import kind_of
from nnxdsl.data.tokenizers.chat_template import template_source
from nnxdsl.errors import DataError

_END_OF_TURN_TOKENS = ("<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>")
"""Usual end-of-turn tokens: generation stops at them even if no file names them."""

ADDITIONAL_TEMPLATES = "additional_chat_templates"
"""Folder of the named chat templates beside `chat_template.jinja`."""

SEGMENTS = 256
"""Segments of texts whose ids are cached."""
PROBED = 8
"""Special tokens with which encoding by segments is compared with encoding the whole text."""


@attrs.frozen
class _TokenizerConfig:
    """Settings in the files beside a tokenizer; None or empty if no file has them."""

    bos_token: str | None
    eos_token: str | None
    add_bos: bool | None
    end_ids: tuple[int, ...]
    chat_templates: dict[str, str]


class FileTokenizer:
    """The part of a tokenizer that the files beside it determine; see `TokenizerBase` for the attributes."""

    bos_token: str
    eos_token: str
    eos_id: int
    stop_ids: frozenset[int]
    chat_template: str | None
    tool_use_template: str | None
    bos_id: int | None = None
    text_digest: str
    """sha256 hex over all of `fingerprint` but the stop ids."""
    fingerprint: str

    def _set_special_tokens(
        self,
        file: Path,
        config: _TokenizerConfig,
        id_of: Callable[[str], int | None],
        token_of: Callable[[int], str | None],
    ) -> int | None:
        """Sets all of them but `bos_id` and `fingerprint`; returns the id of BOS.

        Raises:
            DataError: No file names EOS, or a special token is not in the vocabulary.
        """
        for name, token in (("eos_token", config.eos_token), ("bos_token", config.bos_token)):
            if token and id_of(token) is None:
                raise DataError(f"{file}: {name} is {token!r}, which is no token of this vocabulary")
        eos_id = id_of(config.eos_token) if config.eos_token else next(iter(config.end_ids), None)
        if eos_id is None:
            raise DataError(
                f"{file}: no file names the token that ends a text; add tokenizer_config.json with an "
                f'"eos_token" beside it'
            )
        ends_of_turn = {token for token in map(id_of, _END_OF_TURN_TOKENS) if token is not None}
        self.bos_token, self.eos_token = config.bos_token or "", config.eos_token or token_of(eos_id) or ""
        self.eos_id, self.stop_ids = eos_id, frozenset({eos_id, *config.end_ids, *ends_of_turn})
        self.chat_template = config.chat_templates.get("default")
        self.tool_use_template = config.chat_templates.get("tool_use")
        return id_of(config.bos_token) if config.bos_token else None

    def _set_fingerprint(self, source: bytes) -> None:
        tokens = [self.bos_id, self.bos_token, self.eos_id, self.eos_token]
        others = [] if self.tool_use_template is None else [self.tool_use_template]

        def digest(*stop_ids: list[int]) -> str:
            parts = json.dumps([*tokens, *stop_ids, self.chat_template, *others]).encode()
            return hashlib.sha256(hashlib.sha256(source).digest() + parts).hexdigest()

        self.text_digest, self.fingerprint = digest(), digest(sorted(self.stop_ids))


class _Offsets(Sequence[tuple[int, int]]):
    """Characters of the ids of encoded segments, each with the place where it begins.

    A list of all of them takes longer than encoding, and only those at the borders of turns are read.
    """

    def __init__(self, segments: list[tuple[int, tokenizers.Encoding]]) -> None:
        self._segments = segments
        self._ends = list(itertools.accumulate(len(encoding) for _, encoding in segments))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, int]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(index, slice):
            return [self[token] for token in range(*index.indices(len(self)))]
        number = bisect.bisect_right(self._ends, index)
        place, encoding = self._segments[number]
        start, stop = encoding.token_to_chars(index - self._ends[number] + len(encoding)) or (0, 0)
        return place + start, place + stop


class HFTokenizer(FileTokenizer):
    """A `tokenizer.json`, through the `tokenizers` library.

    BOS and EOS come from `tokenizer_config.json`, else `special_tokens_map.json`, else the ids in
    `generation_config.json` or `config.json`. `bos_id` is None if the tokenizer adds no BOS to text (GPT-2, Qwen).

    Args:
        file: The `tokenizer.json`.
        chat_template: jinja2 source, or a file with it, in place of the directory's own.

    Raises:
        DataError: The file is damaged, or no file names the token that ends a text.
    """

    def __init__(self, file: Path, chat_template: str | None = None) -> None:
        source = _read(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(source)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file}: no tokenizer that the tokenizers library can read: {error}") from error
        # A file may have truncation or padding enabled, which would silently change rows.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.special_ids = frozenset(
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )
        settings = _read_tokenizer_config(file.parent, chat_template)
        first = self._tokenizer.encode("a", add_special_tokens=True).ids[:1]
        self._split, self._segments = self._splitter(), dict[str, tokenizers.Encoding]()
        bos_id = self._set_special_tokens(file, settings, vocabulary.get, self._tokenizer.id_to_token)
        adds_bos = bos_id is not None and (first == [bos_id] if settings.add_bos is None else settings.add_bos)
        self.bos_id = bos_id if adds_bos else None
        self._set_fingerprint(source)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS and EOS."""
        return [token for _, encoding in self._encodings(text) for token in encoding.ids]

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """The characters of each id of `text`, looked up as they are read."""
        return _Offsets(list(self._encodings(text)))

    def _encodings(self, text: str) -> Iterator[tuple[int, tokenizers.Encoding]]:
        """The segments of `text`, encoded: where each begins, and its ids."""
        if self._split is None:
            yield 0, self._encode(text)
            return
        place = 0
        for segment in self._split(text):
            if segment:
                if segment not in self._segments:
                    if len(self._segments) == SEGMENTS:
                        self._segments.clear()
                    self._segments[segment] = self._encode(segment)
                yield place, self._segments[segment]
                place += len(segment)

    def _encode(self, text: str) -> tokenizers.Encoding:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _splitter(self) -> Callable[[str], list[str]] | None:
        """Splits a text at its special tokens, so that each segment can be encoded by itself.

        A chat is rendered several times to find its turns, and most segments of these texts are the same. None if
        a segment's ids depend on its neighbours: special tokens that strip blanks beside them or match whole words
        only, or a pre-tokenizer that treats the beginning of the text differently.
        """
        added = [token for token in self._tokenizer.get_added_tokens_decoder().values() if not token.normalized]
        if not added or any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        markers = sorted((token.content for token in added), key=len, reverse=True)  # the longest match is taken
        split = re.compile("(" + "|".join(map(re.escape, markers)) + ")").split
        probes = [f"a{marker}b c{marker} d\n{marker}\n{marker}{marker}e " for marker in markers[:PROBED]]
        for probe in probes:
            if self._encode(probe).ids != [token for part in split(probe) if part for token in self._encode(part).ids]:
                return None
        return split

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=skip_special)


class SentencePieceTokenizer(FileTokenizer):
    """A sentencepiece model (`tokenizer.model`). Control pieces in text become their ids, as chat templates need it.

    Args:
        file: The model.
        chat_template: jinja2 source, or a file with it, in place of the directory's own.

    Raises:
        DataError: sentencepiece is not installed, the file is damaged, or no file names the token that ends a text.
    """

    def __init__(self, file: Path, chat_template: str | None = None) -> None:
        try:
            library = importlib.import_module("sentencepiece")
        except ImportError as error:
            raise DataError(
                f"{file}: reading it needs sentencepiece: pip install 'nnxdsl[sentencepiece]'; a directory with a "
                f"tokenizer.json does not"
            ) from error
        source = _read(file)
        try:
            self._model = library.SentencePieceProcessor(model_proto=source)
        except RuntimeError as error:
            raise DataError(f"{file}: no sentencepiece model: {str(error).splitlines()[0]}") from error
        self.vocab_size = self._model.get_piece_size()
        control = {self._model.id_to_piece(i): i for i in range(self.vocab_size) if self._model.is_control(i)}
        # Chat models define turn tokens as user-defined pieces, which count as special, too.
        markers = {piece: self._id(piece) for piece in ("<start_of_turn>", *_END_OF_TURN_TOKENS)}
        self._control = control
        self.special_ids = frozenset(control.values()) | {i for i in markers.values() if i is not None}
        self._split = re.compile("(" + "|".join(map(re.escape, control)) + ")").split if control else None
        settings = _read_tokenizer_config(file.parent, chat_template)
        config = attrs.evolve(
            settings,
            bos_token=settings.bos_token or self._piece(self._model.bos_id()),
            eos_token=settings.eos_token or self._piece(self._model.eos_id()),
        )
        bos_id = self._set_special_tokens(file, config, self._id, self._piece)
        self.bos_id = None if settings.add_bos is False else bos_id
        self._set_fingerprint(source)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS and EOS."""
        if self._split is None:
            return self._model.encode(text)
        ids: list[int] = []
        for part in self._split(text):
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids.extend(self._model.encode(part))
        return ids

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters of each id of `text`."""
        spans: list[tuple[int, int]] = []
        place = 0
        for part in [text] if self._split is None else self._split(text):
            if part in self._control:
                spans.append((place, place + len(part)))
            elif part:
                pieces = self._model.encode(part, out_type="immutable_proto").pieces
                spans += [(place + piece.begin, place + piece.end) for piece in pieces]
            place += len(part)
        return spans

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`."""
        parts: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if token in self.special_ids:
                parts.append(self._model.decode(run))
                parts.append("" if skip_special else self._model.id_to_piece(token))
                run = []
            else:
                run.append(token)
        return "".join([*parts, self._model.decode(run)])

    def _id(self, piece: str) -> int | None:
        token = self._model.piece_to_id(piece)
        return token if self._model.id_to_piece(token) == piece else None

    def _piece(self, token: int) -> str | None:
        return self._model.id_to_piece(token) if 0 <= token < self.vocab_size else None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _read_text(file: Path) -> str:
    source = _read(file)
    try:
        return source.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: expected a chat template in UTF-8, got byte 0x{source[error.start]:02x} at position "
            f"{error.start + 1}"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} without the file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: expected an object, got {kind_of(value)}")
    return value


def _read_tokenizer_config(directory: Path, template: str | None) -> _TokenizerConfig:
    config, special = directory / "tokenizer_config.json", directory / "special_tokens_map.json"
    generation, model = directory / "generation_config.json", directory / "config.json"
    add_bos = _read_json(config).get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise DataError(f"{config}: add_bos_token: expected true or false, got {kind_of(add_bos)}")
    return _TokenizerConfig(
        bos_token=token_text(config, "bos_token") or token_text(special, "bos_token"),
        eos_token=token_text(config, "eos_token") or token_text(special, "eos_token"),
        add_bos=add_bos,
        end_ids=_end_ids(generation if "eos_token_id" in _read_json(generation) else model),
        chat_templates=_templates(directory) if template is None else {"default": template_source(template)},
    )


def token_text(file: Path, name: str) -> str | None:
    """A token in the JSON files: its text, or an object with it as "content"."""
    value = _read_json(file).get(name)
    token = value.get("content") if isinstance(value, dict) else value
    if not isinstance(token, str | None):
        raise DataError(f"{file}: {name}: expected a token's text, or an object with it as 'content', got {value!r}")
    return token


def _end_ids(file: Path) -> tuple[int, ...]:
    """`eos_token_id` of a JSON file, or of its `text_config`: one id, several, or none."""
    fields = _read_json(file)
    value, text = fields.get("eos_token_id"), fields.get("text_config")
    if value is None and isinstance(text, dict):
        value = text.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise DataError(f"{file}: eos_token_id: expected a token id or a list of them, got {value!r}")
    return tuple(ids)


def _templates(directory: Path) -> dict[str, str]:
    """The chat templates of a directory by name, as transformers reads them: files go before the config."""
    jinja, others = directory / "chat_template.jinja", directory / ADDITIONAL_TEMPLATES
    files = {"default": jinja} if jinja.is_file() else {}
    files |= {file.stem: file for file in sorted(others.glob("*.jinja"))} if others.is_dir() else {}
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    for file in (directory / "tokenizer_config.json", directory / "chat_template.json"):
        template = _read_json(file).get("chat_template")
        if isinstance(template, list):
            return _named(file, template)
        if not isinstance(template, str | None):
            raise DataError(f"{file}: chat_template: expected text or a list of templates, got {kind_of(template)}")
        if template:
            return {"default": template}
    return {}


def _named(file: Path, templates: list[Any]) -> dict[str, str]:
    """Several templates of a file by name."""
    named: dict[str, str] = {}
    for number, entry in enumerate(templates, start=1):
        name, template = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str):
            raise DataError(
                f"{file}: chat_template, entry {number}: expected an object with 'name' and 'template' as text"
            )
        named[name] = template
    return named
