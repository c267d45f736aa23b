"""Tokenizers; `nnxdsl/data/tokenizers/` implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import filled

if TYPE_CHECKING:
    from nnxdsl.config import tokenizer as members


@attrs.frozen(kw_only=True)
class Tokenizer(Spec):
    """The tokenizer of a model."""

    Auto: ClassVar[type[members.Auto]]
    Bytes: ClassVar[type[members.Bytes]]
    File: ClassVar[type[members.File]]


@attrs.frozen(kw_only=True)
class Auto(Tokenizer):
    """The tokenizer beside the weights; `Tokenizer.Bytes` for random weights."""


@attrs.frozen(kw_only=True)
class Bytes(Tokenizer):
    """UTF-8 bytes and a few markers: built in, nothing to download.

    Attributes:
        chat_template: A jinja2 template, or a file with one, in place of the built-in one, which renders no tools.
        allow_mismatch: Whether it may be used with weights that have a tokenizer of their own, or fewer rows of the
            embedding than it has ids; else such a run is refused.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"allow_mismatch", "chat_template"})

    chat_template: str | None = None
    allow_mismatch: bool = False


@attrs.frozen(kw_only=True)
class File(Tokenizer):
    """A `tokenizer.json` or sentencepiece `tokenizer.model`, or the directory that holds one.

    Attributes:
        path: The file or the directory.
        chat_template: A jinja2 template, or a file with one, in place of the one beside the tokenizer; None keeps that
            one.
        allow_mismatch: Whether it may have more ids than the embedding has rows; else such a run is refused. Special
            tokens above all others do not count.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"allow_mismatch"})

    path: str = attrs.field(kw_only=False, validator=filled)
    chat_template: str | None = None
    allow_mismatch: bool = False
