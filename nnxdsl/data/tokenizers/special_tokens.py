"""Special tokens in the text of rows, which are refused or stripped."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.messages import Message, Tools, read_messages, texts


class SpecialTokenGuard:
    """Refuses text that would become special or stop tokens: a forged turn, a second BOS or end token."""

    def __init__(self, tokenizer: TokenizerBase, remedy: str, roles: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._remedy = remedy
        self._roles = roles

    @functools.cached_property
    def _ids(self) -> frozenset[int]:
        return self._tokenizer.special_ids | self._tokenizer.stop_ids

    @functools.cached_property
    def _find_marker(self) -> Callable[[str], object]:
        """Searches a case-folded text for the text of a special token: without one, the text need not be encoded."""
        markers = {self._tokenizer.decode([token], skip_special=False) for token in self._ids}
        markers |= {self._tokenizer.bos_token, self._tokenizer.eos_token} - {""}
        return re.compile("|".join(sorted({re.escape(marker.strip().casefold()) for marker in markers}))).search

    def text(self, text: str, field: str, *, opens: bool = False, ends: bool = False) -> str:
        """The text without BOS and EOS around it, so that the caller can add each once.

        Args:
            text: A field's text.
            field: Its name.
            opens: Whether the text may begin with BOS, which stays if the tokenizer adds none.
            ends: Whether the text may end with EOS, followed by blanks.

        Raises:
            RowError: It has another special token.
        """
        if not self._find_marker(text.casefold()) or self._ids.isdisjoint(self._tokenizer.encode(text)):
            return text
        eos, bos = self._tokenizer.eos_token, self._tokenizer.bos_token
        if ends and eos and text.rstrip().endswith(eos):
            whole = text.rstrip()
            if self._tokenizer.encode(whole)[-1:] == [self._tokenizer.eos_id]:
                text = whole[: -len(eos)]
        opening = ""
        if opens and bos and text.startswith(bos):
            opening = bos if self._tokenizer.bos_id is None else ""
            text = text[len(bos) :]
        self.ids(self._tokenizer.encode(text), text, f"field '{field}'")
        return opening + text

    def chat(self, value: str | list[Any], field: str, role: str) -> list[Message]:
        """A field as messages; text is one message of `role`.

        Raises:
            RowError: It is not a list of messages, or has a special token.
        """
        if isinstance(value, str):
            return [{"role": role, "content": self.text(value, field, ends=role == "assistant")}]
        messages = read_messages(value, field, self._roles)
        for number, message in enumerate(messages, start=1):
            self._refuse(list(message.values()), f"field '{field}', message {number}")
        return messages

    def tools(self, tools: Tools | None) -> Tools | None:
        """The tools of a row, checked.

        Raises:
            RowError: They have a special token.
        """
        self._refuse(tools, "field 'tools'")
        return tools

    def _refuse(self, value: object, location: str) -> None:
        for text in texts(value):
            if self._find_marker(text.casefold()):
                self.ids(self._tokenizer.encode(text), text, location)

    def ids(self, ids: Iterable[int], text: str, location: str) -> None:
        """Refuses special tokens among the ids of `text`.

        Raises:
            RowError: Names the first of them.
        """
        for token in ids:
            if token not in self._ids:
                continue
            marker = self._tokenizer.decode([token], skip_special=False)
            # The id of unknown characters is special, too, but its marker is not in the text.
            if marker.strip().casefold() in text.casefold():
                what = f"contains {marker!r}, which is a special token of the tokenizer"
                raise RowError("marker in text", f"{location}: {what}; {self._remedy}")
