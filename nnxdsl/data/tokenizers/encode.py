"""The rules by which text and chats become ids: one BOS, one end, prompt and completion split in token space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.chat_template import ChatTemplate
from nnxdsl.data.tokenizers.messages import Message, Tools, odd_messages
from nnxdsl.data.tokenizers.template_check import check_written
from nnxdsl.errors import DataError

Prompt = str | list[Message]


class Split(NamedTuple):
    """A prompt and its completions as ids.

    Attributes:
        prompt: Ids that every completion shares as its beginning.
        completions: Ids that follow it, each ended once.
        merged: Whether a token reached over the border, so that the prompt is shorter than it would be alone.
    """

    prompt: list[int]
    completions: list[list[int]]
    merged: bool


class Encoder:
    """A tokenizer with its chat template, and the rules of this floor on top of them."""

    def __init__(self, tokenizer: TokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._chat: ChatTemplate | None = None
        self._blank: dict[int, bool] = {}

    @property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            DataError: The tokenizer has none, or it is no jinja2.
        """
        if self._chat is None:
            source = self.tokenizer.chat_template
            if source is None:
                raise DataError(
                    "the rows are chats, but the tokenizer has no chat template; give one with "
                    "Tokenizer.File(path, chat_template=...), or use rows of plain text"
                )
            self._chat = ChatTemplate(source, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token)
        return self._chat

    def text(self, text: str) -> list[int]:
        """Ids of plain text, opened by BOS once where the tokenizer has one."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.encode(text)
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat: the template wrote BOS itself, and a second one in front is dropped."""
        bos, ids = self.tokenizer.bos_id, self.tokenizer.encode(text)
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def prompt(self, prompt: Prompt, tools: Tools | None = None) -> list[int]:
        """Ids from which a model is to answer: text as it is, or a chat with the opening of the model's turn.

        Raises:
            RowError: The template refuses the chat.
        """
        if isinstance(prompt, str):
            return self.text(prompt)
        return self.rendered(self.template.render(prompt, add_generation_prompt=True, tools=tools))

    def check_chat(
        self, messages: Sequence[Message], tools: Tools | None = None, *, is_prompt: bool = False
    ) -> tuple[str, ...]:
        """What deserves a look in a chat that the template writes as a whole.

        Args:
            messages: The chat.
            tools: The functions that it may call.
            is_prompt: Whether the model's turn is to follow.

        Raises:
            RowError: The template leaves out a content, a tool call or the tools.
        """
        written = check_written(self.template, messages, tools, add_generation_prompt=is_prompt)
        return (*odd_messages(messages), *written)

    def split_text(self, prompt: str, completions: Sequence[str]) -> Split:
        """A prompt and completions of plain text, tokenised together and split in token space."""
        return self._split(self.text(prompt), [self.text(prompt + completion) for completion in completions])

    def split_chat(self, prompt: list[Message], answers: Sequence[Message], tools: Tools | None = None) -> Split:
        """A chat and answers to it; the completion begins after the template's generation prompt.

        Raises:
            RowError: The template refuses the chat, or does not begin an answer with its generation prompt.
        """
        opening = self.template.render(prompt, add_generation_prompt=True, tools=tools)
        texts = [self.template.render([*prompt, answer], tools=tools) for answer in answers]
        for text in texts:
            _require_prefix(opening, text)
        return self._split(self.rendered(opening), [self.rendered(text) for text in texts], of_template=True)

    def split_common(self, chosen: str, rejected: str) -> Split:
        """Two texts with an implicit prompt: the tokens that they share at their beginning, BOS included."""
        texts = [self.text(chosen), self.text(rejected)]
        shared = common_prefix(*texts)
        return Split(texts[0][:shared], [self.ended(ids[shared:]) for ids in texts], merged=False)

    def conversation(
        self, messages: list[Message], first_target: int = 0, tools: Tools | None = None
    ) -> tuple[list[int], list[bool], bool]:
        """Ids of a chat, which of them the assistant says (ends of turn included), and whether a border was merged.

        The template is rendered up to and after each of the assistant's turns, so its markers need not be known.

        Args:
            messages: The chat.
            first_target: Assistant turns before this message are context only.
            tools: The functions that it may call.

        Raises:
            RowError: The template refuses the chat, or writes earlier turns differently once later ones follow.
        """
        whole = self.template.render(messages, tools=tools)
        ids = self.rendered(whole)
        mask = [False] * len(ids)
        merged = False
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or turn < first_target:
                continue
            before = self.template.render(messages[:turn], add_generation_prompt=True, tools=tools)
            after = self.template.render(messages[: turn + 1], tools=tools)
            for part in (before, after):
                _require_prefix(part, whole, turn + 1)
            opening = self.rendered(before)
            start = common_prefix(opening, ids)
            merged |= start < len(opening)
            stop = common_prefix(self.rendered(after), ids)
            length = self._end_of(ids[start:stop], of_template=True)
            if turn + 1 < len(messages):
                mask[start : start + (length or stop - start)] = [True] * (length or stop - start)
                continue
            completion_ids = self.ended(ids[start:], of_template=True)
            ids, mask = ids[:start] + completion_ids, mask[:start] + [True] * len(completion_ids)
        return ids, mask, merged

    def ended(self, completion: list[int], *, of_template: bool = False) -> list[int]:
        """The completion with exactly one end: its own (whatever follows that is dropped), or EOS.

        Args:
            completion: Ids.
            of_template: A chat template wrote the tail, so that any special token there may be its end. In plain text
                only a token that stops generation is one.
        """
        length = self._end_of(completion, of_template)
        return completion[:length] if length else [*completion, self.tokenizer.eos_id]

    def _end_of(self, ids: Sequence[int], of_template: bool) -> int:
        """Length up to and including the end token that a template or text wrote itself; 0 if it wrote none.

        Looks at the tail of blanks and special tokens. A token that stops generation is preferred, so that a special
        token of the answer's own (the end of a tool call) is not taken for its end.
        """
        stops, special = self.tokenizer.stop_ids, self.tokenizer.special_ids
        found = {False: 0, True: 0}  # by "stops generation"; walking backwards leaves the earliest of each
        for place in range(len(ids) - 1, -1, -1):
            if ids[place] in stops or (of_template and ids[place] in special):
                found[ids[place] in stops] = place + 1
            elif not self._is_blank(ids[place]):
                break
        return found[True] or found[False]

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self.tokenizer.decode([token]).strip()
        return self._blank[token]

    def _split(self, prompt: list[int], wholes: list[list[int]], *, of_template: bool = False) -> Split:
        border = min(common_prefix(prompt, whole) for whole in wholes)
        completions = [self.ended(whole[border:], of_template=of_template) for whole in wholes]
        return Split(prompt[:border], completions, merged=border < len(prompt))


def stop_ids(tokenizer: TokenizerBase) -> frozenset[int]:
    """The ids at which an answer is over: the tokenizer's own, and the one with which its template ends a turn."""
    if tokenizer.chat_template is None:
        return tokenizer.stop_ids
    probe = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        answer = Encoder(tokenizer).split_chat([probe[0]], [probe[1]]).completions[0]
    except RowError:  # a template for chats of another form; the declared ends still hold
        return tokenizer.stop_ids
    return tokenizer.stop_ids | {answer[-1]}


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of ids that two sequences share from their beginning."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _require_prefix(part: str, whole: str, turn: int | None = None) -> None:
    if whole.startswith(part):
        return
    where = "the answer" if turn is None else f"message {turn}"
    raise RowError(
        "template",
        f"the chat template writes the chat differently once {where} is complete, so the answer cannot be told from "
        f"its prompt; use a template whose earlier text stays as it is",
    )
