"""A choice of an answer: the tokens, the text and the log-probabilities that its row has got so far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs

from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.generate.pretrained import TokenLogps
from nnxdsl.generate.sampler import Piece
from nnxdsl.generate.streaming import PartialText


@attrs.define
class Choice:
    """One completion of one prompt.

    Attributes:
        tokenizer: The tokenizer.
        stops: Texts that end it.
        stop_ids: Token ids that end it.
        ids: Its tokens, a stop token included.
        logps: Their log-probabilities.
        text: Its text, without the stop.
        finish_reason: "stop", or "length" where it has as many tokens as it may have; None before its end.
    """

    tokenizer: TokenizerBase
    stops: Sequence[str]
    stop_ids: Collection[int]
    ids: list[int] = attrs.field(factory=list, init=False)
    logps: list[float] = attrs.field(factory=list, init=False)
    text: str = attrs.field(default="", init=False)
    finish_reason: str | None = attrs.field(default=None, init=False)
    _sent: int = attrs.field(default=0, init=False)

    def add(self, piece: Piece) -> None:
        """Adds the tokens of a piece, as far as they are before a stop."""
        for token, logp in zip(piece.ids, piece.logps, strict=True):
            self.ids.append(token)
            self.logps.append(float(logp))
            if token in self.stop_ids:
                self.finish_reason = "stop"
                break
        if piece.is_done and self.finish_reason is None:
            self.finish_reason = "length"
        ids = self.ids[:-1] if self.finish_reason == "stop" else self.ids
        self.text = self._text(ids) if self.finish_reason is None else self.tokenizer.decode(ids)
        if self._place(self.text) is not None:
            self._cut()

    def _cut(self) -> None:
        """Ends it with the first token that completes a stop."""
        sizes = range(1, len(self.ids) + 1)
        size = next((size for size in sizes if self._place(self._text(self.ids[:size])) is not None), len(self.ids))
        self.ids, self.logps, self.text = self.ids[:size], self.logps[:size], self.text[: self._place(self.text)]
        self.finish_reason = "stop"

    def _place(self, text: str) -> int | None:
        """Where the first stop is in a text."""
        return min((place for stop in self.stops if (place := text.find(stop)) >= 0), default=None)

    def _text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without a character that is not complete."""
        partial = PartialText(self.tokenizer)
        partial.add(ids)
        return partial.text

    def take(self) -> str:
        """The text that was not taken yet; what may be the beginning of a stop is held back until the end."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= max((_overlap(self.text, stop) for stop in self.stops), default=0)
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        return new


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of a text are the first ones of a stop."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def token_text(tokenizer: TokenizerBase, token: int) -> str:
    """The text of one token."""
    return tokenizer.decode([token], skip_special=False)


def of_completion(tokenizer: TokenizerBase, ids: Sequence[int], logps: Sequence[float | None], top: Any) -> Any:
    """`logprobs` of a choice of a completion; `top` are the most likely tokens of each place, None for none."""
    tokens = [token_text(tokenizer, token) for token in ids]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {"tokens": tokens, "token_logprobs": list(logps), "top_logprobs": top, "text_offset": offsets[: len(ids)]}


def of_prompt(tokenizer: TokenizerBase, ids: Sequence[int], logps: TokenLogps) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a choice, by token id, the most likely first; None for the first token.

    Args:
        tokenizer: The tokenizer.
        ids: The prompt.
        logps: Log-probabilities of all tokens but the first.
    """
    each: list[dict[str, Any] | None] = [None]
    for token, logp, top_ids, top_logps in zip(ids[1:], *logps, strict=True):
        place = dict[str, Any]()
        likely = enumerate(zip(top_ids.tolist(), top_logps.tolist(), strict=True), 1)
        for rank, (other, its) in [*((rank, one) for rank, one in likely), (None, (token, float(logp)))]:
            entry = {"logprob": its, "rank": rank, "decoded_token": token_text(tokenizer, other)}
            place.setdefault(str(other), entry)
        each.append(place)
    return each


def of_chat(tokenizer: TokenizerBase, ids: Sequence[int], logps: Sequence[float], top: Any) -> Any:
    """`logprobs` of a choice of a chat."""

    def one(text: str, logp: float) -> dict[str, Any]:
        # A part of a character has no text, and its bytes are not known.
        return {"token": text, "logprob": logp, "bytes": None if "\ufffd" in text else list(text.encode())}

    places = [list(place.items()) for place in top] if top else [[] for _ in ids]
    return {
        "content": [
            {**one(token_text(tokenizer, token), logp), "top_logprobs": [one(*each) for each in place]}
            for token, logp, place in zip(ids, logps, places, strict=True)
        ]
    }


def most_likely(tokenizer: TokenizerBase, ids: Sequence[int], logps: TokenLogps) -> list[dict[str, float]]:
    """The most likely tokens at each place by their text, of several with one text the likeliest, and `ids` themselves.

    Args:
        tokenizer: The tokenizer.
        ids: Tokens of which `logps` has the log-probabilities.
        logps: Log-probabilities.
    """
    each = list[dict[str, float]]()
    for token, logp, top_ids, top_logps in zip(ids, *logps, strict=True):
        by_text = dict[str, float]()
        for other, its in zip([*top_ids, token], [*top_logps, logp], strict=True):
            by_text.setdefault(token_text(tokenizer, int(other)), float(its))
        each.append(by_text)
    return each
