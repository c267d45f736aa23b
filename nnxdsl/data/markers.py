"""Markers of a tokenizer written out in the text of rows: what may stand there, and what is refused. Knows no file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nnxdsl.data.chat import Message
from nnxdsl.data.rows import RowError
from nnxdsl.data.tokenizer import TokenizerBase


class Markers:
    """Refuses text that would become special or stop tokens: a forged turn, a second BOS or a second end.

    Args:
        tokenizer: Whose markers.
        cure: What the message says to do about one.
    """

    def __init__(self, tokenizer: TokenizerBase, cure: str = "take it out") -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.special_ids | tokenizer.stop_ids
        self._cure = cure

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

    def messages(self, messages: Sequence[Message], field: str) -> None:
        """Refuses markers in any text of a chat: only its template may write them.

        Raises:
            RowError: Names the message, counted from 1.
        """
        for number, message in enumerate(messages, start=1):
            for text in (text for value in message.values() for text in _texts(value)):
                self.ids(self._tokenizer.encode(text), text, f"field '{field}', message {number}")

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


def _texts(value: object) -> Iterator[str]:
    """Every text in a message, whatever its fields: templates write names and tool calls as they write content."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
