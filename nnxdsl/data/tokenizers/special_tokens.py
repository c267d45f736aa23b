"""Markers of a tokenizer written out in the text of rows: what may stand there, and what is refused. Knows no file."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.messages import Message, Tools, read_messages, texts


class SpecialTokenGuard:
    """Refuses text that would become special or stop tokens: a forged turn, a second BOS or a second end.

    Args:
        tokenizer: Whose markers.
        cure: What the message says to do about one.
    """

    def __init__(self, tokenizer: TokenizerBase, cure: str = "take it out") -> None:
        self._tokenizer = tokenizer
        self._cure = cure

    @functools.cached_property
    def _ids(self) -> frozenset[int]:
        return self._tokenizer.special_ids | self._tokenizer.stop_ids

    def text(self, text: str, field: str, *, opens: bool = False, ends: bool = False) -> str:
        """The text without the BOS and EOS that exports write around it, so that the caller adds each once.

        Args:
            text: A field's text.
            field: Its name.
            opens: The text may begin with BOS. It stays where the tokenizer itself adds none.
            ends: The text may end with EOS, and blanks after that.

        Raises:
            RowError: Another marker is in it.
        """
        ids = self._tokenizer.encode(text)
        if self._ids.isdisjoint(ids):
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
        """A field as messages: text is one message of `role`.

        Raises:
            RowError: It is no list of messages, or a marker is in its text.
        """
        if isinstance(value, str):
            return [{"role": role, "content": self.text(value, field, ends=role == "assistant")}]
        messages = read_messages(value, field)
        for number, message in enumerate(messages, start=1):
            self._refuse(list(message.values()), f"field '{field}', message {number}")
        return messages

    def tools(self, tools: Tools | None) -> Tools | None:
        """The tools of a row, in whose text no marker is: only the template of a chat may write them.

        Raises:
            RowError: A marker is in them.
        """
        self._refuse(tools, "field 'tools'")
        return tools

    def _refuse(self, value: object, where: str) -> None:
        for text in texts(value):
            self.ids(self._tokenizer.encode(text), text, where)

    def ids(self, ids: Iterable[int], text: str, where: str) -> None:
        """Refuses markers among the ids of `text`.

        Raises:
            RowError: Names the first of them.
        """
        for token in ids:
            if token not in self._ids:
                continue
            marker = self._tokenizer.decode([token], skip_special=False)
            # The id for what a vocabulary does not have is special as well, but nobody wrote it.
            if marker.strip().casefold() in text.casefold():
                raise RowError(
                    "marker in text", f"{where}: contains {marker!r}, which is a marker of the tokenizer; {self._cure}"
                )
